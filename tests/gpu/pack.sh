#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fills build/gpu with the headers and plans that tests/gpu/run.sh needs, so that it can run on a machine with only
# CUDA, NCCL and g++.
# Usage: pack.sh [BUILD]. BUILD (default: build/release) is a build tree with tests;
# PYTHON (default: build/venv/bin/python) has the packages of the tests.
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
  "$build/reshard-compile" "$@" -o "$out/plans/$plan.rplan" >/dev/null 2>"$out/compiler.txt" || { cat "$out/compiler.txt" >&2; return 1; }
}
compile small/quickstart examples/quickstart.yaml --set model.let.hidden=64 --set model.let.ffn=96
compile small/odd tests/gpu/jobs/odd.yaml
compile small/relay tests/gpu/jobs/relay.yaml
compile small/refresh tests/gpu/jobs/refresh.yaml
compile small/convert tests/gpu/jobs/convert.yaml
for format in mxfp8 block_fp8 nvfp4; do
  compile small/from-$format tests/gpu/jobs/back.yaml --set source.quantize.format=$format
  compile self/to-$format tests/gpu/jobs/alone.yaml --set target.quantize.format=$format
done
compile small/from-swizzled tests/gpu/jobs/back.yaml --set source.quantize.scale_layout=swizzled
compile self/to-swizzled tests/gpu/jobs/alone.yaml --set target.quantize.scale_layout=swizzled
compile check/quickstart examples/quickstart.yaml
compile check/qwen3-0.6b examples/qwen3-0.6b-8-to-4.yaml
compile check/qwen3-30b-a3b examples/qwen3-30b-a3b-32-to-16.yaml --set model.let.layers=2 --set model.let.vocab=4096
compile self/several-groups tests/gpu/jobs/self.yaml --set model.let.layers=6 --set model.let.vocab=4096
compile self/qwen3-0.6b tests/gpu/jobs/self.yaml
compile llama3-8b-8-to-4 tests/gpu/jobs/llama3-8b-8-to-4.yaml
# The plans of the conformance suite: the rows of the semantics table, and random jobs of every world size.
python=${PYTHON:-build/venv/bin/python}
. "$build/tests/env.sh"
"$python" - "$out/plans/check" <<'PYTHON'
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import conformance_test

with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
    plans = conformance_test.Plans(folder)
    plans.add_rows(pool)
    plans.add_random_jobs(pool)
    for path in sorted(Path(folder).glob("*/*/*.rplan")):
        shutil.move(path, Path(sys.argv[1]) / path.name)
PYTHON
du -sh "$out" | sed 's/^/packed: /'
ls "$out"/plans/* | grep -c rplan | sed 's/$/ plans/'
