# SPDX-License-Identifier: Apache-2.0
"""Writes docs/library-tables.md, compiling every ordered pair of layouts of every model. Usage: table.py BIN"""

import sys
import tempfile
from pathlib import Path

import library

HEAD = """# Every ordered pair

Every ordered pair of layouts of a model of [the library](library.md). This page is made by
`build/venv/bin/python tests/library/table.py build/release`. Meshes: `hf` one mesh rank; `fsdp1`
and `fsdp2` fsdp 8; `megatron` tp 2, pp 2, dp 2, ep 2; engines tp 4, dp 2, ep 8. Source and target
are on the same ranks; targets say `convert: rne`. A target param that the source's layout does not
hold is left out (`--allow=missing`). GiB: all target bytes, replicas included. ms: the whole
compilation, on one core.

"""


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
    (library.ROOT / "docs" / "library-tables.md").write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{len(lines) - 2} pairs")


if __name__ == "__main__":
    main()
