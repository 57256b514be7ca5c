# SPDX-License-Identifier: Apache-2.0
"""The reshard module of this tree, with the commands and libraries of the build tree and the models of examples/."""

import os
import shutil
import sys
from pathlib import Path

import tomllib

from commands import BIN, ROOT


def install(folder: Path) -> Path:
    """Installs the reshard module in folder/module, unless it is there. Returns that path."""
    prefix = Path(folder) / "module"
    if prefix.exists():
        return prefix
    shutil.copytree(ROOT / "python", prefix, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("bin", "lib"):
        (prefix / "reshard" / name).symlink_to(BIN)
    (prefix / "reshard" / "share").mkdir()
    (prefix / "reshard" / "share" / "reshard").symlink_to(ROOT / "examples")
    # vLLM finds plug-ins by the entry points of installed packages.
    installed = prefix / "reshard-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: reshard\nVersion: 0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return prefix


def importable(folder: Path) -> Path:
    """Installs the reshard module, and makes it importable in this process and in those of multiprocessing."""
    prefix = install(folder)
    sys.path.insert(0, str(prefix))
    return prefix


def python_path(*folders: Path) -> str:
    """PYTHONPATH of another process: these folders, then the folders of the tests."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
