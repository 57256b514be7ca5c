# SPDX-License-Identifier: Apache-2.0
"""Prints the test cases that the last ctest run of a build tree skipped, with their reasons: skips.py BUILD. The
last line is their number.

ctest counts suites; a suite passes when its cases pass or are skipped. The cases are found in the output of GoogleTest
(file:line: Skipped, then the reason) and of unittest -v (name ... skipped 'reason')."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

SUITE = re.compile(r"^\d+/\d+ Test: (\S+)$")
GTEST = re.compile(r"^\S+:\d+: Skipped$")
UNITTEST = re.compile(r" \.\.\. skipped ('.*'|\".*\")$")


def skips(log: str) -> Counter[tuple[str, str]]:
    """(suite, reason) of each skipped case of a LastTest.log."""
    found: Counter[tuple[str, str]] = Counter()
    suite, lines = "", iter(log.splitlines())
    for line in lines:
        if match := SUITE.match(line):
            suite = match[1]
        elif GTEST.match(line):
            found[suite, next(lines, "").strip()] += 1
        elif match := UNITTEST.search(line):
            found[suite, " ".join(ast.literal_eval(match[1]).split())] += 1
    return found


if __name__ == "__main__":
    log = Path(sys.argv[1]) / "Testing" / "Temporary" / "LastTest.log"
    found = skips(log.read_text(errors="replace")) if log.exists() else Counter()
    for (suite, reason), count in sorted(found.items()):
        print(f"  skipped in {suite}: {count} {'case' if count == 1 else 'cases'} ({reason})")
    print(sum(found.values()))
