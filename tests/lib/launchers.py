# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/api.md that run in several processes, and the reshard module of this tree for them."""

import os
import re
import socket
from pathlib import Path

from commands import ROOT
from module import install

PROGRAM = re.compile(r"```python\n# FILE (\S+)\n(.*?)```", re.DOTALL)
JOB = ROOT / "examples" / "refit.yaml"
OUTPUT = [f"rank {rank} ({'source' if rank < 2 else 'target'}): version 1" for rank in range(4)]


def programs(folder: Path) -> dict[str, str]:
    """Writes the programs into a folder. Returns their texts by name."""
    found = dict(PROGRAM.findall((ROOT / "docs" / "api.md").read_text()))
    for name, text in found.items():
        (folder / name).write_text(text)
    return found


def environment(folder: Path) -> dict[str, str]:
    """The environment of programs that import reshard: the module of this tree, with the commands and libraries of the
    build tree."""
    launcher = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "OMPI_", "PMI", "RESHARD_PORT", "RESHARD_SECRET")
    return {name: value for name, value in os.environ.items() if not name.startswith(launcher)} | {
        "PYTHONPATH": str(install(folder))
    }


def lines(output: str) -> list[str]:
    """The lines of all ranks, sorted. Processes of one launch may print their line breaks later."""
    return sorted(re.findall(r"rank \d \(\w+\): version \d", output))


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
