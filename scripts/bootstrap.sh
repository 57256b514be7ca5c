#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs missing Debian 12 packages.
#   bootstrap.sh            packages that build the commands and the library
#   bootstrap.sh --full     also MPI and UCX, for transports `mpi` and `ucx`, and venv, for the Python module: `make setup`
#   bootstrap.sh --tests    also those, packages of `make test`, and the Python environment of the tests in build/venv
#   bootstrap.sh --all      also packages of `make test-all`
#   bootstrap.sh --format   only packages of `make format`, and ruff and mypy in build/tools
#   bootstrap.sh --tidy     packages of `make tidy`, and the same
set -eu -o pipefail
cd "$(dirname "$0")/.."

# LLVM's CMake package requires zlib and zstd.
build="g++ cmake ninja-build llvm-19-dev zlib1g-dev libzstd-dev libflatbuffers-dev flatbuffers-compiler libyaml-cpp-dev
  nlohmann-json3-dev libcli11-dev libxxhash-dev python3"
full="openmpi-bin libopenmpi-dev libucx-dev python3-venv ca-certificates"
tests="ccache llvm-19-tools libgtest-dev libgmock-dev libbenchmark-dev binutils pkg-config dpkg-dev iproute2 file"
all="clang-19 libclang-rt-19-dev libfuzzer-19-dev btrfs-progs xfsprogs"
format="clang-format-19 python3-venv ca-certificates"
tidy="clang-19 clang-tidy-19 libgtest-dev libgmock-dev libbenchmark-dev"
python_tools="ruff==0.17.6 mypy==2.4.1"
case "${1:-}" in
"") packages="$build" ;;
--full) packages="$build $full" ;;
--tests) packages="$build $full $tests" ;;
--all) packages="$build $full $tests $all" ;;
--format) packages="$format" ;;
--tidy) packages="$build $full $tidy" ;;
*) echo "bootstrap.sh: unknown option '$1', expected --full, --tests, --all, --format or --tidy" >&2; exit 2 ;;
esac

# Prints one line for every 20 packages that apt-get installs.
progress() {
  awk '/^Fetched/ { print "reshard: " tolower(substr($0, 1, 1)) substr($0, 2); fflush() }
       /^Unpacking/ && ++unpacked % 20 == 0 { print "reshard: " unpacked " packages unpacked"; fflush() }
       /^Setting up/ && ++ready % 20 == 0 { print "reshard: " ready " of " unpacked " packages set up"; fflush() }'
}

missing=""
for package in $packages; do
  dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ]; then
    as_root=""
  elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root="sudo"
  else
    echo "reshard: these packages are missing:$missing" >&2
    echo "reshard: run this as root, or with sudo, or install them first: apt-get install --no-install-recommends$missing" >&2
    exit 2
  fi
  echo "reshard: installing$missing"
  $as_root apt-get update -qq
  # shellcheck disable=SC2086
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing | progress
fi

mkdir -p build
case "${1:-}" in
--tests | --all)
  if ! cmp -s tests/requirements.txt build/venv/requirements.txt; then
    echo "reshard: Python environment of the tests in build/venv"
    rm -rf build/venv
    /usr/bin/python3 -m venv build/venv
    build/venv/bin/python -m pip install -q --disable-pip-version-check -r tests/requirements.txt
    cp tests/requirements.txt build/venv/requirements.txt
  fi
  ;;
--format | --tidy)
  if [ "$(cat build/tools/versions 2>/dev/null)" != "$python_tools" ]; then
    echo "reshard: $python_tools in build/tools"
    rm -rf build/tools
    /usr/bin/python3 -m venv build/tools
    # shellcheck disable=SC2086
    build/tools/bin/python -m pip install -q --disable-pip-version-check $python_tools
    echo "$python_tools" >build/tools/versions
  fi
  ;;
esac
