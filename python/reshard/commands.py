# SPDX-License-Identifier: Apache-2.0
"""Entry points of a Python environment that run the installed commands. A compiled one starts a few milliseconds after
Python does: this module imports nothing that Python has not."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def _command(name: str) -> Callable[[], None]:
    def run() -> None:
        path = os.path.join(os.path.dirname(os.path.realpath(__file__)), "bin", f"reshard-{name}")
        os.execv(path, [path, *sys.argv[1:]])

    return run


compile, exec, inspect, diff, digest = map(_command, ("compile", "exec", "inspect", "diff", "digest"))


def describe() -> None:
    """reshard-describe: writes the YAML of the module that a Python function returns."""
    import argparse
    import importlib

    from .description import describe as describe_module
    from .errors import Error

    parser = argparse.ArgumentParser(
        prog="reshard-describe", description="Writes the model and layout YAML of a live module."
    )
    parser.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a module, or a mapping from names to tensors",
    )
    parser.add_argument("-o", dest="output", metavar="FILE", help="the YAML file to write (default: standard output)")
    parser.add_argument(
        "--layout", default="live", metavar="NAME", help="the name of the layout in the YAML (default: live)"
    )
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="the size of a Megatron axis (tp, etp); may be given several times",
    )
    options = parser.parse_args()
    sys.path.insert(0, "")  # import modules from the current folder
    module, colon, function = options.factory.partition(":")
    if not colon:
        parser.error(f"invalid argument {options.factory!r}: expected MODULE:FUNCTION")
    axes = {}
    for text in options.axis:
        name, _, size = text.partition("=")
        if not size.isdigit():
            parser.error(f"invalid --axis={text!r}: expected NAME=SIZE with a non-negative integer")
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


def convert() -> None:
    """reshard-convert: converts a checkpoint into another format."""
    from .convert import run

    sys.exit(run(sys.argv[1:]))
