# SPDX-License-Identifier: Apache-2.0
"""Runs a document: saves its files, runs its `sh` blocks in order, and compares what they print with what the document
shows.

A block whose first line is `# FILE name` is saved as that file. A `text` block belongs to the `sh` block above it;
without one, the commands must print nothing. In a `text` block `…` matches any characters of a line, and alone on a
line any lines."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# FILE (\S+)\n")


@dataclass
class Block:
    kind: str
    text: str
    begin: int  # first line of the text in the document
    end: int

    @property
    def name(self):
        """The file's name, or None."""
        found = FILE.match(self.text)
        return found[1] if found else None


def blocks(document):
    return [Block(found[1], found[2], *found.span(2)) for found in BLOCK.finditer(document)]


def unused(document):
    """The blocks that are neither saved, nor run, nor compared."""
    found = blocks(document)
    return [
        block.text
        for before, block in zip([None, *found], found)
        if not block.name and block.kind != "sh" and not (block.kind == "text" and before and before.kind == "sh")
    ]


def pattern(expected):
    """What a `text` block matches; spaces at the ends of lines do not count."""
    lines = (line.rstrip() for line in expected.splitlines())
    return "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r" *\n" for line in lines)


@dataclass
class Outcome:
    commands: Block
    shown: Block | None  # the output shown in the document
    printed: str
    status: int

    @property
    def matches(self):
        return re.fullmatch(pattern(self.shown.text if self.shown else ""), self.printed) is not None


def run(document, folder, environment, skip=lambda commands, files: False):
    """The outcome of each `sh` block, run in `folder`. `skip` gets a block's commands and the files so far."""
    files = {}
    found = blocks(document)
    for block, after in zip(found, [*found[1:], None]):
        if block.name:
            files[block.name] = block.text
            (Path(folder) / block.name).write_text(block.text)
        elif block.kind == "sh" and not skip(block.text, files):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=folder,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
            )
            yield Outcome(block, after if after and after.kind == "text" else None, done.stdout, done.returncode)


def updated(document, outcomes):
    """The document with the printed output in place of different shown output. Lines with `…` that still match are
    kept."""
    for outcome in reversed(list(outcomes)):
        if outcome.matches or not outcome.shown:
            continue
        elided = [line for line in outcome.shown.text.splitlines() if "…" in line and line != "…"]
        lines = [
            next((old for old in elided if re.fullmatch(pattern(old), new + "\n")), new.rstrip())
            for new in outcome.printed.splitlines()
        ]
        document = (
            document[: outcome.shown.begin] + "".join(line + "\n" for line in lines) + document[outcome.shown.end :]
        )
    return document
