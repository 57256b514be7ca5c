"""The commands of the installation beside this file, as entry points of a Python environment."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from ._library import PREFIX
from .description import describe as describe_module
from .errors import Error


def _run(command: str) -> None:
    path = PREFIX / "bin" / command
    os.execv(path, [str(path), *sys.argv[1:]])


def compile() -> None:
    _run("reshard-compile")


def exec() -> None:
    _run("reshard-exec")


def inspect() -> None:
    _run("reshard-inspect")


def diff() -> None:
    _run("reshard-diff")


def describe() -> None:
    """reshard-describe: the YAML of what a function of a Python module makes."""
    parser = argparse.ArgumentParser(prog="reshard-describe", description="Writes the model and layout YAML of a live module.")
    parser.add_argument("factory", metavar="MODULE:FUNCTION", help="a function without arguments that returns a module, or a mapping from names to tensors")
    parser.add_argument("-o", dest="output", metavar="FILE", help="the YAML (default: standard output)")
    parser.add_argument("--layout", default="live", metavar="NAME", help="the name of the layout (default: live)")
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=SIZE", help="the size of one of Megatron's axes: tp, etp; may be repeated")
    options = parser.parse_args()
    sys.path.insert(0, "")  # modules beside the caller
    module, colon, function = options.factory.partition(":")
    if not colon:
        parser.error(f"found {options.factory!r}, expected MODULE:FUNCTION")
    axes = {}
    for text in options.axis:
        name, _, size = text.partition("=")
        if not size.isdigit():
            parser.error(f"found --axis={text!r}, expected NAME=SIZE")
        axes[name] = int(size)
    try:
        text = describe_module(getattr(importlib.import_module(module), function)(), layout=options.layout, axes=axes)
    except Error as error:
        sys.exit(f"reshard-describe: error: {error}")
    if options.output:
        with open(options.output, "w") as file:
            file.write(text)
    else:
        sys.stdout.write(text)
