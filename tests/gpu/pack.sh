#!/usr/bin/env bash
# Fills build/gpu with what tests/gpu/run.sh needs beside the working tree, so that it can run on a machine that has nothing but CUDA, NCCL and g++:
# pack.sh [BUILD]. BUILD (build/release) has the compiler and the generated header.
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build/release}
out=build/gpu
rm -rf "$out"
mkdir -p "$out/include/schema" "$out/plans/check" "$out/plans/self" "$out/plans/small"
headers=$(dirname "$(echo '#include <flatbuffers/flatbuffers.h>' | g++ -E -x c++ - | sed -n 's|^# 1 "\(.*\)/flatbuffers/flatbuffers.h".*|\1|p' | head -1)/x")
cp -r "$headers/flatbuffers" "$headers/xxhash.h" "$out/include/"
cp "$build/schema/plan_generated.h" "$out/include/schema/"
compile() { # PLAN JOB [OPTION...]
  local plan=$1
  shift
  "$build/reshard-compile" "$@" -o "$out/plans/$plan.rplan" >/dev/null
}
compile small/quickstart examples/quickstart.yaml --set model.let.hidden=64 --set model.let.ffn=96
compile small/odd tests/gpu/jobs/odd.yaml
compile small/relay tests/gpu/jobs/relay.yaml
compile small/refresh tests/gpu/jobs/refresh.yaml
compile check/quickstart examples/quickstart.yaml
compile check/qwen3-0.6b examples/qwen3-0.6b-8-to-4.yaml
compile check/qwen3-30b-a3b examples/qwen3-30b-a3b-32-to-16.yaml --set model.let.layers=2
compile self/qwen3-0.6b tests/gpu/jobs/self.yaml
compile llama3-8b-8-to-4 tests/gpu/jobs/llama3-8b-8-to-4.yaml
# Random jobs, as the property tests make them: each scheme, pack, relation and side once or more.
python3 - "$out" "$build" <<'PYTHON'
import json, random, subprocess, sys
from pathlib import Path

out, build = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.append("tests/property")
import generate

done = seed = 0
while done < 100:
    seed += 1
    node, _, _ = generate.generate(random.Random(seed), generate.CELLS[seed * 37 % len(generate.CELLS)])
    node["options"] = ({}, {"topology": {"ranks_per_node": 2}}, {"staging": 4096})[seed % 3]
    job = out / "job.yaml"
    job.write_text(json.dumps(node))
    plan = out / f"plans/check/random-{seed}.rplan"
    done += subprocess.run([build / "reshard-compile", job, "-o", plan], capture_output=True).returncode == 0
job.unlink()
PYTHON
du -sh "$out" | sed 's/^/packed: /'
ls "$out"/plans/* | grep -c rplan | sed 's/$/ plans/'
