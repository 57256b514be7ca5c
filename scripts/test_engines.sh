#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every test of tests/engines with the frameworks of scripts/frameworks.sh and scripts/trainers_env.sh, one after
# the other. A test with skipped cases fails, because these frameworks lack nothing.
#   scripts/test_engines.sh BUILD
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/frameworks.sh
scripts/trainers_env.sh || echo "test_engines.sh: the tests of verl, NeMo-RL and SGLang will fail" >&2
. build/frameworks/env.sh
export RESHARD_BIN=$1 OMP_NUM_THREADS=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=""
for test in tests/engines/*_test.py; do
  echo "$test"
  if timeout -k 30 7200 "$RESHARD_FRAMEWORKS_PYTHON" -W ignore "$test" 2>&1 | tee "$log" && ! grep -q '(.*skipped=' "$log"; then
    passed=$((passed + 1))
  else
    failed+=" $(basename "$test")"
  fi
done
echo "$passed tests passed, failed:${failed:- none}"
[ -z "$failed" ]
