# SPDX-License-Identifier: Apache-2.0
"""Rewrites the table of docs/library.md, compiling every ordered pair of layouts of every model. Usage: table.py BIN"""

import sys
import tempfile
from pathlib import Path

import library

BEGIN, END = "<!-- table -->\n", "<!-- /table -->"


def main():
    binaries = Path(sys.argv[1]).resolve()
    lines = [
        "| model | source | target | GiB | remote GiB | transfers | messages | ms |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for model in library.NAMES:
            known = library.layouts(binaries, model, folder)
            for source in known:
                for target in known:
                    report = library.compile_pair(binaries, model, source, target, folder)
                    lines.append(library.row(model, source, target, report) + f" {report['time_ms']['total']:.0f} |")
    path = library.ROOT / "docs" / "library.md"
    text = path.read_text()
    path.write_text(text[: text.index(BEGIN) + len(BEGIN)] + "\n".join(lines) + "\n" + text[text.index(END) :])
    print(f"{len(lines) - 2} pairs")


if __name__ == "__main__":
    main()
