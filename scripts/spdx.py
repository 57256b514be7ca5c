# SPDX-License-Identifier: Apache-2.0
"""Adds the license line to the source files that git has: spdx.py [--check].

The line is the first of a file, or the second after `#!`. --check changes nothing, lists the files without the line and
exits with 1 if there are any. Examples are excluded, because users copy them."""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINE = "SPDX-License-Identifier: Apache-2.0"
# Suffix or name of a file -> the comment.
HASH, SLASHES, STARS = f"# {LINE}\n", f"// {LINE}\n", f"/* {LINE} */\n"
COMMENTS = {
    ".c": SLASHES,
    ".cpp": SLASHES,
    ".cu": SLASHES,
    ".def": SLASHES,
    ".fbs": SLASHES,
    ".h": SLASHES,
    ".hpp": SLASHES,
    ".cmake": HASH,
    ".py": HASH,
    ".sh": HASH,
    "CMakeLists.txt": HASH,
    "Makefile": HASH,
    "reshard.h": STARS,
    "reshard_plan.h": STARS,
}  # C before C99 has no `//`
EXCLUDED = ("examples/", "third_party/", "tests/compiler/errors/", "tests/library/listings/")


def sources() -> list[Path]:
    """Tracked files, and new ones that git does not ignore. In a container the checkout may have another owner."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [Path(name) for name in sorted(set(listed.split("\0")) - {""}) if not name.startswith(EXCLUDED)]
    return [path for path in paths if (path.name in COMMENTS or path.suffix in COMMENTS) and (ROOT / path).is_file()]


def with_line(text: str, comment: str) -> str:
    """The text with the comment as its first line, or as its second after `#!`."""
    interpreter, rest = text.split("\n", 1) if text.startswith("#!") else ("", text)
    return text if rest.startswith(comment) else (interpreter + "\n" if interpreter else "") + comment + rest


def main() -> int:
    parser = argparse.ArgumentParser(description="Adds the license line to the source files that git has.")
    parser.add_argument(
        "--check", action="store_true", help="list the files without the line; exit with 1 if there are any"
    )
    check = parser.parse_args().check
    missing, found = [], sources()
    for path in found:
        text = (ROOT / path).read_text()
        changed = with_line(text, COMMENTS.get(path.name) or COMMENTS[path.suffix])
        if changed != text:
            missing.append(path)
            if not check:
                (ROOT / path).write_text(changed)
    for path in missing:
        print(f"{path}: the line '{LINE}' is missing; run scripts/spdx.py" if check else f"{path}: added")
    print(f"{len(found)} files, {len(missing)} {'without the line' if check else 'changed'}")
    return 1 if check and missing else 0


if __name__ == "__main__":
    sys.exit(main())
