#!/usr/bin/env bash
# Installs what the build needs on Debian 12; does nothing where all is there. --tests: also the Python environment of the tests;
# --all: also what `make test-all` needs.
set -eu
cd "$(dirname "$0")/.."

packages="g++ cmake ninja-build ccache llvm-19-dev llvm-19-tools zlib1g-dev libzstd-dev libflatbuffers-dev flatbuffers-compiler
  libyaml-cpp-dev nlohmann-json3-dev libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev binutils pkg-config dpkg-dev openmpi-bin libopenmpi-dev iproute2 file
  python3 python3-venv ca-certificates"
[ "${1:-}" = --all ] && packages="$packages clang-19 libclang-rt-19-dev libfuzzer-19-dev"

missing=""
for package in $packages; do
  dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ]; then
    as_root=""
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null || { command -v sudo >/dev/null && [ -t 0 ]; }; then
    as_root="sudo"
  else
    echo "reshard: these packages are missing:$missing" >&2
    echo "reshard: run this as root, or with sudo, or install them first: apt-get install --no-install-recommends$missing" >&2
    exit 2
  fi
  echo "reshard: installing$missing"
  $as_root apt-get update -qq
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

mkdir -p build
if [ -n "${1:-}" ] && ! cmp -s tests/requirements.txt build/venv/requirements.txt; then
  echo "reshard: Python environment of the tests in build/venv"
  rm -rf build/venv
  /usr/bin/python3 -m venv build/venv
  build/venv/bin/python -m pip install -q --disable-pip-version-check -r tests/requirements.txt
  cp tests/requirements.txt build/venv/requirements.txt
fi
