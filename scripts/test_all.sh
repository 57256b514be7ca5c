#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every suite in full under release, then with its sample counts and cut-down models under address + undefined-behavior and thread
# sanitizers, then the seeded bugs, each library as one file, 30 seconds of each fuzzer, the lines that the suites run, the tests
# with real frameworks, and the refits of real engines. The summary goes to build/test-all/summary.md.
#   scripts/test_all.sh [PART...]   PART: release asan tsan bugs clang unity fuzzers coverage frameworks engines. Default: all of them.
# The summary also has the last results of the parts that this call does not run, each with its commit: after a failure, mend it
# and repeat that part. The exit code is 0 if the parts of this call have passed.
set -u
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1
results=build/test-all # by part: the rows of the summary, and the exit code
mkdir -p "$results"
rows=""
status=0

note() { # name, result line
  rows+="| $1 | $2 |"$'\n'
  echo "$1: $2"
}

suites() { # preset: builds it and runs all suites
  local preset=$1
  cmake --preset "$preset" >/dev/null && cmake --build --preset "$preset" -j "$(nproc)" >"build/$preset.log" 2>&1 || {
    tail -50 "build/$preset.log"
    note "$preset" "did not build"
    status=1
    return
  }
  ctest --test-dir "build/$preset" --verbose --no-tests=error --timeout 7200 -j "$(nproc)" 2>&1 | tee "build/$preset.tests.log"
  [ "${PIPESTATUS[0]}" = 0 ] || status=1
  skips=$(python3 scripts/skips.py "build/$preset")
  sed '$d' <<<"$skips"
  note "$preset: suites" "$(grep 'tests passed' "build/$preset.tests.log"), $(tail -1 <<<"$skips") cases skipped"
  note "$preset: mutated plans" "$(sed -n 's/^.*: \([0-9]* mutants: .*\)$/\1/p' "build/$preset.tests.log" | tail -1)"
  note "$preset: random jobs against the oracle" "$(sed -n 's/^.*: \([0-9]* jobs, [0-9]* mismatches\)$/\1/p' "build/$preset.tests.log" | tail -1)"
}

release() { RESHARD_FULL=1 suites release; }
asan() { RESHARD_SMALL=1 suites asan; }
tsan() { RESHARD_SMALL=1 suites tsan; }

bugs() {
  RESHARD_SMALL=1 build/venv/bin/python tests/seeded/seeded_bugs.py | tee build/bugs.log
  [ "${PIPESTATUS[0]}" = 0 ] || status=1
  note "seeded bugs" "$(tail -1 build/bugs.log)"
}

# The same input gives the same bytes, built with g++ or with clang++.
clang() {
  local same=0 other=0
  for build in release clang; do
    cmake --preset "$build" >/dev/null && cmake --build --preset "$build" -j "$(nproc)" --target reshard-compile >"build/$build.log" 2>&1 || {
      tail -50 "build/$build.log"
      note "clang" "$build did not build"
      status=1
      return
    }
  done
  for job in examples/*.yaml examples/clusters/*.yaml; do
    for build in release clang; do
      "build/$build/reshard-compile" "$job" -o "build/$build.rplan" >/dev/null 2>&1 || rm -f "build/$build.rplan"
    done
    if cmp build/release.rplan build/clang.rplan; then same=$((same + 1)); else other=$((other + 1)); fi
  done
  rm -f build/release.rplan build/clang.rplan
  note "plans of g++ and clang builds" "$same equal, $other different"
  [ "$other" = 0 ] || status=1
}

# Each library as one file. A fresh build tree compiles 24 files as one, and a new file changes which: if all together compile, no
# batch can have two helpers of one name.
unity() {
  if cmake -S . -B build/unity -G Ninja -DRESHARD_UNITY=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O0 >build/unity.log 2>&1 &&
    cmake --build build/unity -j "$(nproc)" >>build/unity.log 2>&1; then
    note "each library as one file" "built"
  else
    grep -iA5 'error' build/unity.log | head -50
    note "each library as one file" "did not build"
    status=1
  fi
}

fuzzers() {
  scripts/fuzz.sh 30 | tee build/fuzzers.txt
  [ "${PIPESTATUS[0]}" = 0 ] || status=1
  while IFS= read -r line; do note "${line%%: *}" "${line#*: }"; done < <(grep '^fuzz-' build/fuzzers.txt)
}

coverage() {
  scripts/coverage.sh | tee build/coverage.txt
  [ "${PIPESTATUS[0]}" = 0 ] || status=1
  note "lines of C++ that the suites run" "$(sed -n 's/^| all | [0-9]* | \(.*\) |$/\1/p' build/coverage.txt)"
}

real() { # folder of tests
  scripts/test_frameworks.sh build/release "tests/$1" 2>&1 | tee "build/$1.log"
  [ "${PIPESTATUS[0]}" = 0 ] || status=1
  note "$1" "$(tail -1 "build/$1.log")"
}

frameworks() { real frameworks; }
engines() { real engines; }

parts=(release asan tsan bugs clang unity fuzzers coverage frameworks engines)
chosen=("$@")
[ $# -gt 0 ] || chosen=("${parts[@]}")
for part in "${chosen[@]}"; do
  [[ " ${parts[*]} " = *" $part "* ]] || { echo "unknown part '$part', expected one of: ${parts[*]}" >&2; exit 2; }
done
for part in "${chosen[@]}"; do
  rows="" status=0 begin=$SECONDS
  "$part"
  note "$part: time" "$(((SECONDS - begin + 59) / 60)) min, at commit $(git rev-parse --short HEAD), $(date -u +%Y-%m-%d)"
  printf '%s' "$rows" >"$results/$part"
  echo "$status" >"$results/$part.status"
done

summary="$(nproc) cores.

| suite | result |
|---|---|
"
status=0
for part in "${parts[@]}"; do
  summary+=$(cat "$results/$part" 2>/dev/null || echo "| $part | not run |")$'\n'
done
for part in "${chosen[@]}"; do
  [ "$(cat "$results/$part.status")" = 0 ] || status=1
done
printf '%s' "$summary" >"$results/summary.md"
exit $status
