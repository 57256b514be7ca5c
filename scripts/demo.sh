#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job: Qwen3-0.6B from a Megatron trainer (TP2·PP2·DP2, ranks 0-7) to a vLLM engine (TP4, ranks 8-11), real sizes.
# Usage: demo.sh BUILD JOBS. Prints each step before it starts, the report after the check of the files, then draws the page with
# reshard-inspect, which it builds with JOBS compilers.
set -eu
bin=$1
jobs=$2
work=build/demo
steps=5
number=0
rm -rf "$work"
mkdir -p "$work"

# step TEXT COMMAND...: prints the step with its number, runs the command, and prints the time that it took.
step() {
  local text=$1 begin=$SECONDS
  shift
  number=$((number + 1))
  echo "== step $number of $steps: $text"
  "$@"
  echo "  done in $((SECONDS - begin)) s"
  echo
}

step "compile examples/qwen3-0.6b-8-to-4.yaml to one plan for 12 ranks on two nodes of 8 GPUs, and prove it" \
  "$bin/reshard-compile" examples/qwen3-0.6b-8-to-4.yaml --set=options.topology=examples/topologies/h100x8.yaml \
  -o "$work/refit.rplan" --report="$work/compile.json"
step "run all 12 ranks in memory; check every target byte against the layouts, with two seeds" \
  "$bin/reshard-exec" "$work/refit.rplan" --synthesize --check --repeat=3 --report="$work/exec.json"
step "write the trainer's 8 safetensors files" \
  "$bin/reshard-exec" "$work/refit.rplan" --synthesize --source="$work/trainer"
step "run from these files to the engine's 4 files; read them back and check every byte" \
  "$bin/reshard-exec" "$work/refit.rplan" --source="$work/trainer" --target="$work/engine" --check --report="$work/files.json"
rm -rf "$work/trainer"
/usr/bin/python3 scripts/demo_report.py "$work"
echo
# The main job is done: what only the page needs is built now.
draw() {
  cmake --build "$bin" -j "$jobs" --target reshard-inspect
  "$@"
}
step "build reshard-inspect, and draw the plan, with its time on two nodes of 8 GPUs" draw \
  "$bin/reshard-inspect" "$work/refit.rplan" --format=html --simulate=examples/topologies/h100x8.yaml -o "$work/report.html"
echo "The plan as a page: $(pwd)/$work/report.html"
