#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every test of these folders in full, one after the other, with the frameworks of scripts/frameworks.sh, and for tests/engines
# also of scripts/trainers_env.sh. A test with skipped cases, or with none, fails, because these frameworks lack nothing.
#   scripts/test_frameworks.sh BUILD tests/frameworks|tests/engines...
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '5s/^# *//p' "$0" >&2; exit 2; }
. "$1/tests/env.sh"
export RESHARD_FULL=1 OMP_NUM_THREADS=1
shift
scripts/frameworks.sh
if [[ " $* " == *engines* ]]; then
  scripts/trainers_env.sh || echo "test_frameworks.sh: the tests of verl, NeMo-RL and SGLang will fail" >&2
fi
. build/frameworks/env.sh
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 cases=0 failed=""
for folder in "$@"; do
  for test in "$folder"/*_test.py; do
    echo "$test"
    status=0
    timeout -k 30 7200 "$RESHARD_FRAMEWORKS_PYTHON" -W ignore "$test" 2>&1 | tee "$log" || status=1
    ran=$(sed -n 's/^Ran \([0-9]*\) tests\{0,1\} in .*/\1/p' "$log" | tail -1)
    cases=$((cases + ${ran:-0}))
    if [ "$status" = 0 ] && [ "${ran:-0}" -gt 0 ] && ! grep -q '(.*skipped=' "$log"; then
      passed=$((passed + 1))
    else
      failed+=" $(basename "$test")"
    fi
  done
done
echo "$passed tests passed, $cases cases, failed:${failed:- none}"
[ -z "$failed" ]
