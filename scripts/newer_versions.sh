#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests of frameworks with other versions of packages than scripts/frameworks.sh installs, which stays as it is: the packages
# alone, without dependencies, lie in build/newer and come before it. Prints a row for each test; exit code 1 if one fails or has
# skipped cases. What a test printed is beside the packages, in TEST.log.
#   scripts/newer_versions.sh PACKAGE[==VERSION][,…] TEST...      default: the newest version; RESHARD_BIN: default build/release
#   scripts/newer_versions.sh megatron-core==0.19.2,triton tests/engines/megatron_checkpoint_test.py tests/engines/megatron_families_test.py
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '6,7s/^# *//p' "$0" >&2; exit 2; }
package=$1
shift
for test in "$@"; do
  [ -f "$test" ] || { echo "newer_versions.sh: '$test': no such test" >&2; exit 2; }
done
scripts/frameworks.sh
. build/frameworks/env.sh
. "${RESHARD_BIN:-build/release}/tests/env.sh"
export OMP_NUM_THREADS=1
folder=$PWD/build/newer/$package
if [ ! -f "$folder/READY" ]; then
  rm -rf "$folder"
  mkdir -p "$folder"
  # A package that asks for a newer Python is tried with this one: its tests tell whether it works.
  # shellcheck disable=SC2086
  "$RESHARD_FRAMEWORKS_PYTHON" -m pip install -q --disable-pip-version-check --no-deps --ignore-requires-python --target "$folder" ${package//,/ }
  if [ -d "$folder/torch" ]; then # another PyTorch is linked against other functions
    mkdir "$folder/stubs"
    "$RESHARD_FRAMEWORKS_PYTHON" scripts/nvidia_stubs.py "$folder/torch" "$folder/stubs"
  fi
  touch "$folder/READY"
fi
if [ -d "$folder/stubs" ]; then export LD_LIBRARY_PATH=$folder/stubs:$LD_LIBRARY_PATH; fi
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
versions=$("$RESHARD_FRAMEWORKS_PYTHON" -c 'import importlib.metadata, sys
print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in (each.split("=")[0] for each in sys.argv[1].split(","))))' "$package")
echo "| $versions | result |"
echo "|---|---|"
failed=0
for test in "$@"; do
  name=$(basename "$test" .py)
  log=$folder/$name.log
  if timeout -k 30 7200 "$RESHARD_FRAMEWORKS_PYTHON" -W ignore "$test" -v >"$log" 2>&1 && ! grep -q '(.*skipped=' "$log"; then
    result=passes
  else
    failed=1
    result="fails: $(grep -m 1 -oE "skipped '.*|skipped=.*" "$log" || grep -E '^(\w|\.)*(Error|Exception|Warning)\b' "$log" | tail -1 | cut -c1-160 || true)"
  fi
  echo "| $name | $result |"
done
exit "$failed"
