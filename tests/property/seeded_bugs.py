# SPDX-License-Identifier: Apache-2.0
"""Inserts bugs into a copy of the compiler, one at a time; the property test must find each. seeded_bugs.py [--bin
DIR] [--only N...] [--places]

bugs.json lists {file, old, new, why}. The file must contain `old` exactly once; white space is ignored. The copy is
built once, so that each bug costs the compilation of one file and a link; without optimization, because the jobs are
small. Prints `N bugs, M found`. --places only
checks that each file contains its `old` exactly once."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# NDEBUG as in a release: the property test must find the bugs, not an assertion.
BUILD_TYPE = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0 -DNDEBUG")


def old_pattern(bug: dict[str, str]) -> re.Pattern[str]:
    """Matches a bug's `old` with any white space between its tokens, because a formatter may break its lines."""
    return re.compile(r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", bug["old"])))


def sh(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default=str(ROOT / "build" / "release"))
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--places", action="store_true")
    options = parser.parse_args()
    bugs = json.loads((Path(__file__).parent / "bugs.json").read_text())
    if options.only is not None:
        bugs = [bugs[number] for number in options.only]
    missing = [f"bug {number}: '{bug['old']}' must be in {bug['file']} exactly once" for number, bug in enumerate(bugs)
               if len(old_pattern(bug).findall((ROOT / bug["file"]).read_text())) != 1]
    if options.places or missing:
        print("\n".join(missing) or f"all {len(bugs)} bugs match their files")
        return 1 if missing else 0
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "source"
        os.environ["CCACHE_BASEDIR"] = str(copy)  # the folder has another name in each run
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", ".git"))
        configured = sh("cmake", "-G", "Ninja", "-S", copy, "-B", copy / "build", *BUILD_TYPE)
        built = sh("cmake", "--build", copy / "build", "--target", "reshard-compile")
        if configured.returncode or built.returncode:
            print(configured.stderr + built.stdout[-3000:])
            return 1
        for number, bug in enumerate(bugs):
            path = copy / bug["file"]
            good = path.read_text()
            path.write_text(old_pattern(bug).sub(lambda _: bug["new"], good))
            built = sh("cmake", "--build", copy / "build", "--target", "reshard-compile")
            if built.returncode:
                print(f"bug {number}: does not build: {built.stdout[-600:]}")
            else:
                ran = sh(sys.executable, ROOT / "tests/property/run.py", "--bin", options.bin, "--compiler", copy / "build", "--jobs", options.jobs,
                         "--seed", 11, "--until-failure")
                lines = ran.stdout.splitlines()
                failed = ran.returncode != 0 and lines and not lines[-1].endswith(" 0 mismatches")
                found += bool(failed)
                print(f"bug {number} {'found' if failed else 'NOT FOUND'} ({lines[-1] if lines else ran.stderr[-300:]}): {bug['why']}", flush=True)
            path.write_text(good)
            os.utime(path)
    print(f"{len(bugs)} bugs, {found} found")
    return 0 if found == len(bugs) and (len(bugs) >= 20 or options.only is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
