#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# verl, NeMo-RL and the sources of SGLang for tests/engines, in build/trainers (0.4 GB), beside build/frameworks. Does nothing
# if it is complete. PyPI has no release of NeMo-RL: RESHARD_NEMO_RL names a clone, default the one that Git makes here.
set -eu
cd "$(dirname "$0")/.."
scripts/frameworks.sh
requirements=tests/engines/trainers.txt
revision=7ea279abf
mkdir -p build/trainers
home=$(cd build/trainers && pwd -P)
stamp=$home/READY
if cat "$requirements" scripts/trainers_env.sh | cmp -s - "$stamp"; then exit 0; fi
echo "reshard: trainers in $home"
rm -f "$stamp"
python=$(cd build/frameworks && pwd -P)/venv/bin
"$python/uv" pip install -q --python "$python/python" --no-deps --target "$home" -r "$requirements"
nemo=${RESHARD_NEMO_RL:-$home/.nemo-rl}
[ -e "$nemo" ] || git clone -q --filter=blob:none --no-checkout https://github.com/NVIDIA-NeMo/RL "$nemo"
git -C "$nemo" archive "$revision" nemo_rl | tar x -C "$home"
cat "$requirements" scripts/trainers_env.sh >"$stamp"
