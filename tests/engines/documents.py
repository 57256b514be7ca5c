# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/integrations.md."""

import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text()


def example(heading, language):
    """The only block of a language under a heading."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return block
