# SPDX-License-Identifier: Apache-2.0
"""The examples of documents, and the packages of scripts/trainers_env.sh."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def trainers():
    """Makes the packages of scripts/trainers_env.sh importable, also in processes of multiprocessing."""
    folder = ROOT / "build" / "trainers"
    if not (folder / "READY").exists():
        sys.exit(f"{folder} is missing or incomplete: run scripts/trainers_env.sh")
    sys.path.append(str(folder))


def examples(heading, language, document="integrations"):
    """The blocks of a language under a heading."""
    text = (ROOT / "docs" / f"{document}.md").read_text()
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def example(heading, language, document="integrations"):
    """The only block of a language under a heading."""
    (block,) = examples(heading, language, document)
    return block
