#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzzers of tests/fuzz and runs each: `make fuzz SECONDS=3600`. Prints a line for each, and fails if one found an
# input that fails.
#   scripts/fuzz.sh SECONDS [NAME...]    NAME: of a fuzzer, for example yaml. Default: all of them.
#   scripts/fuzz.sh --keep [NAME...]     puts the least inputs that reach what build/corpus reaches into tests/fuzz/corpus
# Each begins with its inputs in tests/fuzz/corpus, an archive for each fuzzer, puts those that reach more into build/corpus, and
# continues from these.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
cmake --preset fuzz >build/configure.log
cmake --build --preset fuzz -j "$(nproc)" --target fuzzers >build/fuzz.log || { tail -50 build/fuzz.log; exit 1; }
names=("$@")
if [ $# = 0 ]; then
  for source in tests/fuzz/*_fuzz.cpp; do names+=("$(basename "$source" _fuzz.cpp)"); done
fi

kept() { # name: unpacks its archive, and prints the folder
  local folder=$PWD/build/corpus/kept-$1
  rm -rf "$folder"
  mkdir -p "$folder" "build/corpus/fuzz-$1"
  [ ! -f "tests/fuzz/corpus/$1.tar.gz" ] || tar -xzf "tests/fuzz/corpus/$1.tar.gz" -C "$folder"
  echo "$folder"
}

keep() { # name
  local before least
  before=$(kept "$1")
  cp -r "build/corpus/fuzz-$1/." "$before"
  least=$(mktemp -d)
  "build/fuzz/fuzz-$1" -set_cover_merge=1 -max_len=8192 "$least" "$before" 2>"build/fuzz/fuzz-$1.log"
  mkdir -p tests/fuzz/corpus
  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$least" -cf - . | gzip -n9 >"tests/fuzz/corpus/$1.tar.gz"
  echo "$1: $(find "$least" -type f | wc -l) inputs, $(stat -c %s "tests/fuzz/corpus/$1.tar.gz") bytes"
  rm -rf "$least"
}

fuzz() { # name
  local folder
  folder=$(kept "$1")
  if "build/fuzz/fuzz-$1" -max_total_time="$seconds" -rss_limit_mb=4096 -timeout=60 -artifact_prefix="$PWD/build/fuzz/$1-" "$PWD/build/corpus/fuzz-$1" \
    "$folder" >"build/fuzz/fuzz-$1.log" 2>&1; then
    echo "fuzz-$1: $(grep -E '^Done' "build/fuzz/fuzz-$1.log" | tail -1)"
  else
    echo "fuzz-$1: failed, see build/fuzz/fuzz-$1.log"
    return 1
  fi
}

status=0
for name in "${names[@]}"; do
  if [ "$seconds" = --keep ]; then
    keep "$name"
  else
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || status=1; done
    fuzz "$name" &
  fi
done
while [ "$(jobs -rp | wc -l)" -gt 0 ]; do wait -n || status=1; done
exit "$status"
