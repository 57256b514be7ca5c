#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The lines of C++ that the suites of `make test` run: `make coverage`. Prints a table by folder and ends with the total; fails
# if it is below 90 %. build/coverage.html shows each file. Processes that a test kills do not report their lines, and code of
# GPUs is not measured.
set -euo pipefail
cd "$(dirname "$0")/.."
least=90
tool=build/gcovr # in an environment of its own: no suite needs it
if [ ! -x "$tool/bin/gcovr" ]; then
  /usr/bin/python3 -m venv "$tool"
  "$tool/bin/python" -m pip install -q --disable-pip-version-check gcovr==8.3
fi
cmake --preset coverage >build/configure.log
cmake --build --preset coverage -j "$(nproc)" >build/coverage.log
find build/coverage -name '*.gcda' -delete
# Without optimization the suites are slower: cut-down models and no time limits, as under the sanitizers.
RESHARD_SMALL=1 ctest --test-dir build/coverage --output-on-failure --no-tests=error --timeout 3600 -j "$(($(nproc) + 1))"
folders="analysis backends compiler executor formats ir kernels rendezvous schema support tools yaml"
filters=""
for folder in $folders; do filters+=" --filter $folder/"; done
# shellcheck disable=SC2086
"$tool/bin/gcovr" --root . $filters --exclude-throw-branches --gcov-ignore-errors=no_working_dir_found -j "$(nproc)" \
  --json-summary build/coverage.json --html-details build/coverage.html build/coverage >/dev/null
python3 - $folders "$least" <<'PYTHON'
import json
import sys

*folders, least = sys.argv[1:]
files = json.load(open("build/coverage.json"))["files"]
print("| folder | lines | run by the suites |\n|---|---:|---:|")
total = run = 0
for folder in folders:
    own = [file for file in files if file["filename"].startswith(folder + "/")]
    lines, covered = sum(file["line_total"] for file in own), sum(file["line_covered"] for file in own)
    if lines:
        print(f"| `{folder}` | {lines} | {100 * covered / lines:.1f} % |")
    total, run = total + lines, run + covered
print(f"| all | {total} | {100 * run / total:.1f} % |")
sys.exit(100 * run < float(least) * total)
PYTHON
