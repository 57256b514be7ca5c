#!/usr/bin/env bash
# All benchmarks of one build tree, one after the other: bench.sh BUILD.
set -eu
for bench in "$1"/tests/bench-* "$1"/bench-*; do
  [ -x "$bench" ] && [ -f "$bench" ] && "$bench"
done
