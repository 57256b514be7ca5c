#!/usr/bin/env bash
# All suites of one build tree: test.sh BUILD. Ends with `N passed, M failed`; a run without tests fails.
set -u
build=$1
log=$(mktemp)
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
# ctest says: 95% tests passed, 1 tests failed out of 20
read -r failed total < <(sed -n 's/.* tests passed, \([0-9]*\) tests failed out of \([0-9]*\).*/\1 \2/p' "$log")
rm -f "$log"
echo "$((${total:-0} - ${failed:-0})) passed, ${failed:-0} failed"
[ "${total:-0}" -gt 0 ] || exit 1
exit "$status"
