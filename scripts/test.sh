#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All suites of one build tree: test.sh BUILD. Lists the skipped cases with their reasons and ends with
# `N passed, M failed, K skipped`: suites that passed and failed, and single cases that were skipped. A run without tests fails.
set -u
build=$1
log=$(mktemp)
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$((2 * $(nproc) + 1))" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
# ctest says: 95% tests passed, 1 tests failed out of 20
read -r failed total < <(sed -n 's/.* tests passed, \([0-9]*\) tests failed out of \([0-9]*\).*/\1 \2/p' "$log")
rm -f "$log"
skips=$(python3 "$(dirname "$0")/skips.py" "$build")
sed '$d' <<<"$skips"
echo "$((${total:-0} - ${failed:-0})) passed, ${failed:-0} failed, $(tail -1 <<<"$skips") skipped"
[ "${total:-0}" -gt 0 ] || exit 1
exit "$status"
