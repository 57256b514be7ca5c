#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The frameworks that tests/frameworks runs, in build/frameworks (2.8 GB; `make test` does not need them): Python >= 3.11 with PyTorch, vLLM for
# CPUs, transformers 5, Megatron-Core, Megatron-Bridge, Ray, and in separate folders transformers 4 and a UCX. Does nothing if it is complete. PYTHON: the interpreter.
# `. build/frameworks/env.sh` sets the environment of the tests; PYTHONPATH=$RESHARD_TRANSFORMERS4 chooses transformers 4.
set -eu
cd "$(dirname "$0")/.."
requirements=tests/frameworks/requirements.txt
transformers4="transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2"
mkdir -p build/frameworks
home=$(cd build/frameworks && pwd -P)
stamp=$home/READY
sources="$requirements scripts/frameworks.sh scripts/nvidia_stubs.py"
# shellcheck disable=SC2086
if cat $sources | cmp -s - "$stamp"; then exit 0; fi

python=${PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3)}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "reshard: $python is older than 3.11; set PYTHON" >&2; exit 2; }
echo "reshard: frameworks in $home"
rm -f "$stamp"
[ -x "$home/venv/bin/python" ] || "$python" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install -q --disable-pip-version-check uv==0.9.9
install() { "$home/venv/bin/uv" pip install -q --python "$home/venv/bin/python" --no-deps "$@"; }
install -r "$requirements"
rm -rf "$home/transformers4" "$home/ucx"
# shellcheck disable=SC2086
install --target "$home/transformers4" $transformers4
install --target "$home/ucx" libucx-cu12==1.22.0

rm -rf "$home/stubs"
mkdir "$home/stubs"
torch=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch
"$home/venv/bin/python" scripts/nvidia_stubs.py "$torch" "$home/stubs"

cat >"$home/env.sh" <<EOF
export RESHARD_FRAMEWORKS_PYTHON=$home/venv/bin/python RESHARD_TRANSFORMERS4=$home/transformers4 RESHARD_UCX_WHEEL=$home/ucx/libucx
export LD_LIBRARY_PATH=$home/stubs\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_CI_ENV=1
EOF
. "$home/env.sh"
"$RESHARD_FRAMEWORKS_PYTHON" -W ignore -c 'import torch, transformers, vllm, megatron.core'
# shellcheck disable=SC2086
cat $sources >"$stamp"
