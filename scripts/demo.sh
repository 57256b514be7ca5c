#!/usr/bin/env bash
# The main job: Qwen3-0.6B from a Megatron trainer (TP2·PP2·DP2, ranks 0-7) to a vLLM engine (TP4, ranks 8-11), real sizes.
set -eu
bin=$1
work=build/demo
rm -rf "$work"
mkdir -p "$work"

echo "== compile: examples/qwen3-0.6b-8-to-4.yaml -> one plan for 12 ranks"
"$bin/reshard-compile" examples/qwen3-0.6b-8-to-4.yaml -o "$work/refit.rplan" --report="$work/compile.json"
echo
echo "== run: all 12 ranks in memory, every target byte checked against the layouts, two seeds"
"$bin/reshard-exec" "$work/refit.rplan" --synthesize --check --repeat=3 --report="$work/exec.json"
echo
echo "== run again from files: 8 safetensors files in, 4 out, read back and checked"
"$bin/reshard-exec" "$work/refit.rplan" --synthesize --source="$work/trainer"
"$bin/reshard-exec" "$work/refit.rplan" --source="$work/trainer" --target="$work/engine" --check --report="$work/files.json"
rm -rf "$work/trainer"
echo
/usr/bin/python3 scripts/demo_table.py "$work"
