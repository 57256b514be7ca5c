#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The lines of C++ that the suites of `make test` run: `make coverage`. Prints a table by folder and ends with the total; fails
# if it is below 90 % or a suite fails. build/coverage.html shows each file. Counters lie in mapped files, so that processes that
# a test kills count too. Code of GPUs is not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
least=90
profiles=$PWD/build/coverage/profiles
cmake --preset coverage >build/configure.log
cmake --build --preset coverage -j "$(nproc)" >build/coverage.log
rm -rf "$profiles"
status=0
# With counters the suites are slower: cut-down models and no time limits, as under the sanitizers. %m: a file for each
# program or library, which its processes share; %c: mapped.
LLVM_PROFILE_FILE=$profiles/%m%c.profraw RESHARD_SMALL=1 ctest --test-dir build/coverage --output-on-failure --no-tests=error \
  --timeout 3600 -j "$(nproc)" || status=1
llvm-profdata-19 merge --sparse --failure-mode=all "$profiles"/*.profraw -o build/coverage/all.profdata
programs=()
while IFS= read -r file; do
  readelf --section-headers --wide "$file" 2>/dev/null | grep __llvm_covmap >/dev/null && programs+=(-object "$file")
done < <(find build/coverage -type f -executable)
folders=(base checkpoints command compiler executor include ir kernels report schema tools verify)
llvm-cov-19 export -summary-only -instr-profile=build/coverage/all.profdata "${programs[@]:1}" "${folders[@]}" >build/coverage.json
llvm-cov-19 show -format=html -output-dir=build/coverage.html -instr-profile=build/coverage/all.profdata "${programs[@]:1}" \
  "${folders[@]}" >/dev/null
python3 - "${folders[@]}" "$least" <<'PYTHON' || status=1
import json
import os
import sys

*folders, least = sys.argv[1:]
files = json.load(open("build/coverage.json"))["data"][0]["files"]
print("| folder | lines | run by the suites |\n|---|---:|---:|")
total = run = 0
for folder in folders:
    own = [file["summary"]["lines"] for file in files if os.path.relpath(file["filename"]).startswith(folder + "/")]
    lines, covered = sum(each["count"] for each in own), sum(each["covered"] for each in own)
    if lines:
        print(f"| `{folder}` | {lines} | {100 * covered / lines:.1f} % |")
    total, run = total + lines, run + covered
print(f"| all | {total} | {100 * run / total:.1f} % |")
sys.exit(100 * run < float(least) * total)
PYTHON
exit "$status"
