# SPDX-License-Identifier: Apache-2.0
"""Inserts bugs into a copy of the project, one at a time; the tests must find each. seeded_bugs.py [--list NAME]
[--only N...] [--places]

compiler.json: bugs of the compiler, which random jobs of the property test must find. execution.json: bugs of
everything else, each with the suites of ctest that must find it ("suites", names between "|"); "large": a test that
RESHARD_SMALL leaves out must find it. Both list {file, old, new, why}. The file must contain `old` exactly once; white
space is ignored. The copy is in build/seeded, always under one path, so that ccache knows its files from earlier runs.
It is built once, so that each bug costs the compilation of one file and a link. The suites must pass in the copy before
the first bug. Prints `N bugs, M found`. --places only checks that each file contains its `old` exactly once."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = ("compiler", "execution")
# A bug may hang a suite, which then has failed. A suite that takes half of that without a bug has twice its own time.
SUITE_SECONDS = 200
LARGE_SECONDS = 1200


def old_pattern(bug: dict[str, str]) -> re.Pattern[str]:
    """Matches a bug's `old` with any white space between its tokens, because a formatter may break its lines."""
    return re.compile(r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", bug["old"])))


def sh(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True)


class CompilerBugs:
    """Random jobs, compiled by the copy and run by the commands of the build tree, against the oracle."""

    # Without optimization, because the jobs are small. NDEBUG as in a release: a test must find the
    # bugs, not an assertion.
    configure = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0 -DNDEBUG")
    build = ("--target", "reshard-compile")

    def __init__(self, options: argparse.Namespace, copy: Path) -> None:
        self.command = (
            sys.executable,
            ROOT / "tests/property/run.py",
            "--bin",
            options.bin,
            "--compiler",
            copy / "build",
            "--jobs",
            options.jobs,
            "--seed",
            11,
            "--until-failure",
        )

    def passes_without(self, bugs: list[dict[str, str]]) -> str:
        return ""  # the property suite runs the same jobs

    def find(self, bug: dict[str, str]) -> tuple[bool, str]:
        ran = sh(*self.command)
        lines = ran.stdout.splitlines()
        failed = ran.returncode != 0 and bool(lines) and not lines[-1].endswith(" 0 mismatches")
        return failed, lines[-1] if lines else ran.stderr[-300:]


class ExecutionBugs:
    """The suites of ctest, in the copy."""

    configure = (
        "-DRESHARD_TESTS=ON",
        "-DRESHARD_CUDA=AUTO",  # as in the presets: gpu_test must find bugs too
        "-DCMAKE_BUILD_TYPE=None",
        "-DCMAKE_CXX_FLAGS=-O1 -DNDEBUG",
        "-DCMAKE_CUDA_FLAGS=-O1",
    )
    build = ()

    def __init__(self, options: argparse.Namespace, copy: Path) -> None:
        (copy / "build").mkdir()
        (copy / "build/venv").symlink_to(ROOT / "build/venv")
        self.copy = copy
        self.seconds: dict[str, float] = {}  # by suite, without a bug

    def suites(self, names: set[str], limit: float, jobs: int, large: bool = False) -> list[str]:
        """Runs suites by ctest. Those that failed, and how; the first failure ends them."""
        environment = {name: value for name, value in os.environ.items() if not large or name != "RESHARD_SMALL"}
        ran = sh(
            "ctest",
            "--test-dir",
            self.copy / "build",
            "--no-tests=error",
            "--stop-on-failure",
            "--timeout",
            limit,
            "-j",
            jobs,
            "-R",
            f"^({'|'.join(sorted(names))})$",
            env=environment | {"GTEST_FAIL_FAST": "1"},
        )
        self.seconds |= {
            name: float(seconds)
            for name, seconds in re.findall(r"Test +#\d+: (\S+) \.+ +Passed +([\d.]+) sec", ran.stdout)
            if name not in self.seconds
        }
        failed = [
            f"{name}: {how}"
            for name, how in re.findall(r"^\s*\d+ - (\S+) \((?!Not Run|Disabled)(.+)\)", ran.stdout, re.M)
        ]
        if ran.returncode and not failed:
            raise SystemExit(f"ctest failed: {ran.stdout[-600:]}{ran.stderr[-600:]}")
        return failed

    def passes_without(self, bugs: list[dict[str, str]]) -> str:
        names = {name for bug in bugs for name in bug["suites"].split("|")}
        failed = self.suites(names, 3 * SUITE_SECONDS, (os.cpu_count() or 1) + 1)
        return f"these suites fail without a bug: {', '.join(failed)}" if failed else ""

    def find(self, bug: dict[str, str]) -> tuple[bool, str]:
        large = "large" in bug
        limit = LARGE_SECONDS if large else SUITE_SECONDS
        for name in bug["suites"].split("|"):  # in this order, so that short suites may be first
            if failed := self.suites({name}, max(limit, 2 * self.seconds[name]), 1, large):
                return True, failed[0]
        return False, bug["suites"]


@contextlib.contextmanager
def copy_folder() -> Iterator[Path]:
    """An empty folder for a copy of the project, which is removed at the end. Of one process at a time."""
    folder = ROOT / "build/seeded"
    folder.mkdir(parents=True, exist_ok=True)
    with open(ROOT / "build/seeded.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{folder} is in use by another run of seeded_bugs.py") from None
        shutil.rmtree(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def missing_places(bugs: dict[int, dict[str, str]]) -> list[str]:
    return [
        f"bug {number}: '{bug['old']}' must be in {bug['file']} exactly once"
        for number, bug in bugs.items()
        if len(old_pattern(bug).findall((ROOT / bug["file"]).read_text())) != 1
    ]


def run_list(name: str, options: argparse.Namespace) -> tuple[int, int]:
    """The number of bugs of a list, and how many were found."""
    every = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    bugs = {number: every[number] for number in (range(len(every)) if options.only is None else options.only)}
    if missing := missing_places(bugs):
        raise SystemExit("\n".join(missing))
    if options.places:
        return len(bugs), len(bugs)
    found = 0
    with copy_folder() as copy:
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", ".git"))
        tests = (CompilerBugs if name == "compiler" else ExecutionBugs)(options, copy)
        build = ("cmake", "--build", copy / "build", *tests.build)
        configured = sh("cmake", "-G", "Ninja", "-S", copy, "-B", copy / "build", *tests.configure)
        built = sh(*build)
        if configured.returncode or built.returncode:
            raise SystemExit(configured.stderr + built.stdout[-3000:])
        if problem := tests.passes_without(list(bugs.values())):
            raise SystemExit(problem)
        for number, bug in bugs.items():
            path = copy / bug["file"]
            good = path.read_text()
            path.write_text(old_pattern(bug).sub(lambda _: bug["new"], good))
            if (built := sh(*build)).returncode:
                print(f"{name} bug {number}: does not build: {built.stdout[-600:]}", flush=True)
            else:
                failed, by = tests.find(bug)
                found += failed
                print(f"{name} bug {number} {'found' if failed else 'NOT FOUND'} ({by}): {bug['why']}", flush=True)
            path.write_text(good)
            os.utime(path)
    return len(bugs), found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", default=str(ROOT / "build" / "release"))
    parser.add_argument("--list", choices=LISTS, action="append", help="default: all")
    parser.add_argument("--only", type=int, nargs="+", help="numbers in the list")
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--places", action="store_true")
    options = parser.parse_args()
    results = [run_list(name, options) for name in options.list or LISTS]
    count, found = sum(each for each, _ in results), sum(each for _, each in results)
    print(f"all {count} bugs match their files" if options.places else f"{count} bugs, {found} found")
    return 0 if found == count else 1


if __name__ == "__main__":
    sys.exit(main())
