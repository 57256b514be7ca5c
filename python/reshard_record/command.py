# SPDX-License-Identifier: Apache-2.0
"""reshard-record: writes the layout of an engine from its own loader, and checks layouts against it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from reshard.errors import Error
from reshard.flow import ENDPOINT, endpoint_of

from . import sglang, transformers, vllm
from .checkpoint import Tensors
from .compiled import Compiled, compare, compile_layout
from .engine import Engine
from .generalize import generalize
from .infer import Layout, merge, mesh_text
from .processing import UNCHANGED
from .recording import Recording, mesh_size

_HEADER = "# reshard-record "
_ENGINES = {"vllm": vllm, "sglang": sglang}
_RECORDED = (*_ENGINES, "transformers")  # sources that are recorded from an installed release
_REFUSED = "# not stated: "
_SHOWN = 20  # differences that are printed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reshard-record",
        description="Writes a model YAML whose layout puts every element where the loader of an "
        "engine puts it, or checks one.",
        epilog="exit codes: 0 success; 1 the layout differs from the loader, or cannot state some params; "
        "2 wrong usage or input",
    )
    parser.add_argument(
        "source",
        nargs="?",
        choices=[*_RECORDED, "merge", "generalize"],
        help="vllm, sglang, transformers: record the installed release; merge: join recordings that each rank saved; "
        "generalize: make one model of recorded layouts of several sizes",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="with merge: the recordings of all mesh ranks; with generalize: the layouts of all sizes, "
        "as reshard-record writes them",
    )
    parser.add_argument(
        "--config",
        nargs="+",
        metavar="JSON",
        help="with generalize: the config.json of each layout, in "
        "the same order (default: that of the folder --model with which it was recorded)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="the folder of config.json and of the checkpoint, of which only the headers are read",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks (default: 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument(
        "--expert-parallel", action="store_true", help="whole experts on each rank: view {ep: TP} of the mesh"
    )
    parser.add_argument(
        "--processed",
        action="store_true",
        help="with vllm: print which params process_weights_after_loading permutes, computes, empties or removes. "
        "They are in memory: use a config with few layers",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the params (default: bfloat16)")
    parser.add_argument("-o", dest="output", metavar="FILE", help="the YAML file to write (default: standard output)")
    parser.add_argument(
        "--layout", default="recorded", metavar="NAME", help="the name of the layout (default: recorded)"
    )
    parser.add_argument(
        "--mesh",
        metavar="YAML",
        help="with --check: the mesh of the layout, if its axes are others than "
        "tp, pp, ep: '{tp: 4, views: [{etp: 4}]}'",
    )
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="record again and compare with the layout of this model file. Its first line, if reshard-record wrote "
        "it, has the options",
    )
    return parser


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; with --check those of the file's first line, unless they are given."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.check:
        path = Path(options.check)
        if not path.is_file():
            raise Error(f"--check={path}: no such file")
        first = path.read_text().split("\n", 1)[0]
        if first.startswith(_HEADER):
            model = options.model
            options = parser.parse_args([*shlex.split(first[len(_HEADER) :]), *arguments])
            options.model = model or str(path.parent / options.model)
    if options.check and options.source == "generalize":
        raise Error(
            "unexpected --check: the model of several sizes has no one config to check it with; "
            "check a model that extends it"
        )
    if options.source is None:
        raise Error(
            "expected vllm, sglang, transformers, merge or generalize, or --check of a file that reshard-record wrote"
        )
    if options.source in _RECORDED and not options.model:
        raise Error("expected --model=DIR, the folder of config.json")
    if options.processed and (options.source != "vllm" or options.check):
        raise Error("unexpected --processed, expected it with vllm and without --check")
    if options.files and options.source in _RECORDED:
        raise Error(f"unexpected argument {options.files[0]!r}")
    return options


def _record(options: argparse.Namespace, checkpoint: Tensors | None) -> list[Recording]:
    if options.source == "merge":
        return [Recording.open(path) for path in options.files]
    if options.source == "transformers":
        return [transformers.recording(options.model, options.dtype, checkpoint)]
    return list(_ENGINES[options.source].recordings(options.model, _engine(options), checkpoint))


def _engine(options: argparse.Namespace) -> Engine:
    return Engine(options.tp, options.pp, options.expert_parallel, options.dtype)


def _header(options: argparse.Namespace) -> str:
    """The first line of a file: the options with which it was recorded; the model's path is relative to the file."""
    if options.source == "merge":
        return "# Made from recordings by reshard-record merge\n"
    model = os.path.relpath(options.model, Path(options.output).parent if options.output else ".")
    words = [options.source, "--model", model]
    if options.source in _ENGINES:
        words += ["--tp", str(options.tp), "--pp", str(options.pp), *["--expert-parallel"] * options.expert_parallel]
    return _HEADER + shlex.join([*words, "--dtype", options.dtype, "--layout", options.layout]) + "\n"


def _comments(layout: Layout) -> str:
    lines = [f"{ENDPOINT}{{layout: {layout.name}, mesh: {mesh_text(layout.mesh)}}}"]
    lines += [
        f"# left: {name}: the loader puts nothing of the checkpoint here on ranks {', '.join(map(str, ranks))}"
        for name, ranks in sorted(layout.left.items())
    ]
    lines += [f"# pieces: {name}: {why}" for name, why in sorted(layout.explicit.items())]
    lines += [f"{_REFUSED}{name}: {why}" for name, why in sorted(layout.refused.items())]
    return "\n".join(lines) + "\n"


def _recorded_layout(path: str) -> tuple[Layout, str | None]:
    """(layout, folder of the model if it is known) of a file that reshard-record wrote."""
    text = Path(path).read_text()
    lines, found, model = text.split("\n"), endpoint_of(text, path), None
    if found is None or "mesh" not in found:
        raise Error(
            f"{path}: no line that begins with {ENDPOINT!r} and states a mesh: not a layout that reshard-record wrote "
            "for one size"
        )
    if lines[0].startswith(_HEADER):
        model = str(Path(path).parent / _parser().parse_args(shlex.split(lines[0][len(_HEADER) :])).model)
    refused = dict(line[len(_REFUSED) :].split(": ", 1) for line in lines if line.startswith(_REFUSED))
    return Layout(text, str(found["layout"]), found["mesh"], refused=refused), model


def _generalize(options: argparse.Namespace) -> int:
    """Writes one model of the layouts of several sizes."""
    layouts = [_recorded_layout(path) for path in options.files]
    configs = options.config or [model for _, model in layouts]
    if len(configs) != len(layouts) or None in configs:
        raise Error(
            f"found {len(configs) - configs.count(None)} configs for {len(layouts)} layouts, expected one --config "
            "for each"
        )
    general = generalize([(layout, config) for (layout, _), config in zip(layouts, configs)])
    lines = [
        f"# Made from {', '.join(options.files)} by reshard-record generalize",
        "# The model of one size has {extend: this file, config: its config.json}",
        f"{ENDPOINT}{{layout: {layouts[0][0].name}}}",
    ]
    lines += [f"# ambiguous: {taken}, or {', '.join(others)}" for taken, others in general.ambiguous.items()]
    lines += [f"{_REFUSED}{each}" for each in general.refused]
    lines += [f"# not general: {place}: {why}" for place, why in general.kept.items()]
    _written(options, "\n".join(lines) + "\n" + general.yaml)
    _report(general.refused, "params that a layout cannot state")
    _report([f"{place}: {why}" for place, why in general.kept.items()], "values that stay those of the first layout")
    _report(general.differences, "differences between the model and the layouts")
    return 0 if general.exact else 1


def _written(options: argparse.Namespace, text: str) -> None:
    """Writes the file, or to standard output."""
    if options.output:
        Path(options.output).write_text(text)
    else:
        sys.stdout.write(text)


def _report(lines: Sequence[str], what: str) -> None:
    for line in lines[:_SHOWN]:
        print(f"reshard-record: {line}", file=sys.stderr)
    if lines:
        print(f"reshard-record: {len(lines)} {what}", file=sys.stderr)


def _summary(layout: Layout, recordings: Sequence[Recording]) -> str:
    """What the command has found, in a line: "8 params, exact"."""
    filled = {name for recording in recordings for name, param in recording.params.items() if param.tensors}
    stated = len(filled - {*layout.refused})
    words = [
        f"{stated} params" if stated == len(filled) else f"{stated} of {len(filled)} params",
        *([f"{len(layout.left)} left"] if layout.left else []),
        "exact" if layout.exact else "not exact",
    ]
    return ", ".join(words)


def _processed(options: argparse.Namespace) -> int:
    """Writes what becomes of the params of each mesh rank after loading."""
    lines = []
    for rank in range(mesh_size(_engine(options).mesh)):
        found = vllm.processed(options.model, _engine(options), rank)
        lines += [
            f"rank {rank}: {name}: {change.kind}{'' if change.of in ((), (name,)) else ', of ' + ', '.join(change.of)}"
            for name, change in sorted(found.items())
            if change.kind != UNCHANGED
        ]
        counts = Counter(change.kind for change in found.values())
        lines.append(f"rank {rank}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}")
    _written(options, "\n".join(lines) + "\n")
    return 0


def _check(options: argparse.Namespace) -> int:
    """Compares the loader with the layout of a file."""
    mesh = options.mesh or ("{}" if options.source == "transformers" else mesh_text(_engine(options).mesh))
    compiled: Compiled = compile_layout(str(Path(options.check).resolve()), options.layout, mesh)
    found = _record(options, compiled.tensors)
    differences = compare(compiled, found)
    _report(differences, "differences between the loader and the layout")
    if not differences:
        print(
            f"{options.check}: layout {options.layout} is that of the loader: {sum(len(one.params) for one in found)} "
            f"params on {len(found)} ranks"
        )
    return 1 if differences else 0


def run(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its log hides what this command says
    try:
        options = _options(arguments)
        if options.check:
            return _check(options)
        if options.processed:
            return _processed(options)
        if options.source == "generalize":
            return _generalize(options)
        found = _record(options, None)
        layout = merge(found, options.layout)
        _written(options, _header(options) + _comments(layout) + layout.yaml)
        _report(
            [f"{name}: {why}" for name, why in sorted(layout.explicit.items())],
            "params that the layout states by pieces, since no scheme fits",
        )
        _report(
            [f"{name}: {why}" for name, why in sorted(layout.refused.items())], "params that the layout cannot state"
        )
        _report(layout.differences, "differences between the loader and the compiled layout")
        print(f"reshard-record: {_summary(layout, found)}", file=sys.stderr)
        return 0 if layout.exact else 1
    except (Error, OSError) as error:
        print(f"reshard-record: error: {error}", file=sys.stderr)
        return 2


def main() -> None:
    """The entry point of reshard-record."""
    sys.exit(run(sys.argv[1:]))
