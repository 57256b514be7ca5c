# SPDX-License-Identifier: Apache-2.0
"""reshard-convert: converts a checkpoint, with the compiler and the executor."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from ._library import PREFIX
from .compiler import run_compiler
from .errors import CompileError, Error
from .executor import check_rendezvous, transports
from .job_text import JobText
from .names import Renames, matching, patterns, printable, shown
from .plan import Plan
from .recognition import (
    MASTER,
    NO_MASTER,
    Model,
    Shapes,
    Source,
    UnknownModel,
    as_option,
    brief,
    declared,
    elements,
    model_named,
    models_of,
    read_config,
    recognize,
    repeats,
    state_names,
    states_of,
    text_of,
)

#: What a framework reads: the format of its checkpoints and their layouts, of which the first that
#: the model has is taken.
_FRAMEWORKS = {
    "hf": ("safetensors", ("hf",)),
    "fsdp2": ("dcp", ("fsdp2-checkpoint",)),
    "megatron": ("torch_dist", ("megatron-checkpoint", "megatron-checkpoint-layers")),
}
#: The layouts of frameworks whose ranks have a file each (--mesh).
_RANKS = ("fsdp2", "megatron", "vllm", "sglang")
#: The keys of a job's target, and the options that make them; of several that are given, the last is named.
_MADE = (
    ("layout", "to"),
    ("layout", "target-layout"),
    ("switches", "switch"),
    ("storage", "chunk"),
    ("mesh", "mesh"),
    ("dtype", "dtype"),
    ("convert", "dtype"),
    ("convert", "convert"),
    ("quantize", "quantize"),
    ("only", "only"),
    ("ignore", "ignore"),
)
#: The options of reshard-exec that a user may give, and what its help does not say about them.
_PASSED: dict[str, dict[str, Any]] = {
    "--leave": {"action": "append", "default": []},
    "--rank": {"type": int},
    **dict.fromkeys(("--copy", "--memory", "--max-shard-size", "--resume", "--no-sync", "--timeout", "--report"), {}),
    **dict.fromkeys(("--rendezvous", "--job", "--insecure"), {}),
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert, in a name
#: Dtypes of floats, and their names in a config.json.
_FLOATS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _inspect(*arguments: str) -> Any:
    """What reshard-inspect prints as JSON."""
    command = [str(PREFIX / "bin" / "reshard-inspect"), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="backslashreplace")
    if done.returncode:
        raise Error(
            done.stderr.strip().removeprefix("reshard-inspect: error: ")
            or f"'{arguments[0]}': reshard-inspect ended with code {done.returncode} and printed no error"
        )
    return json.loads(done.stdout)


@cache
def _formats() -> dict[str, dict[str, Any]]:
    """The formats of checkpoints: in a job `name`, in text `title`, and whether a target may have chunks and several
    files. `megatron` is a framework here, its format is torch_dist."""
    return {{"megatron": "torch_dist"}.get(each["name"], each["name"]): each for each in _inspect("--list-formats")}


def _format(to: str) -> dict[str, Any]:
    """The format of a target of --to, if that is a checkpoint."""
    return _formats()[_FRAMEWORKS[to][0] if to in _FRAMEWORKS else to]


def _flags(command: str) -> dict[str, tuple[str, str]]:
    """The options that a command lists, each with the name of its value, "" for a switch, and its help."""
    text = subprocess.run(
        [PREFIX / "bin" / command, "--help"], check=True, capture_output=True, encoding="utf-8"
    ).stdout
    found = re.findall(r"^  (--[a-z-]+)=?(\S*) +(.*(?:\n {9,}.*)*)", text, re.MULTILINE)
    return {name: (value, " ".join(about.split())) for name, value, about in found}


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    """Those of these options that are given, as they were: one with several values several times."""
    found = []
    for name in names:
        value = getattr(options, name.removeprefix("--").replace("-", "_"))
        if value is True:
            found.append(name)
        elif value is not None and value is not False:
            found += [f"{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reshard-convert",
        description="Converts a checkpoint: recognizes it, compiles a job for it, runs the job, and compares every "
        "byte that was written.",
        epilog="exit codes: 0 success; 1 a check failed; 2 wrong usage or input; 3 a failure at run time",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="the checkpoint, which is a folder or a file; reshard-inspect --list-formats prints its formats",
    )
    add("target", metavar="TARGET", help="the folder to create; it appears only when it is complete")
    add(
        "--to",
        choices=(*_FRAMEWORKS, "vllm", "sglang", *_formats()),
        help="hf, fsdp2, megatron: what this framework reads, its format and its names; vllm, sglang: with --mesh; "
        "the others: this format, with the names of SOURCE "
        "(default: hf if a model is known, else with --rename safetensors)",
    )
    add("--model", metavar="NAME", help="a model of the library, or a model file (default: that of the config)")
    add(
        "--config",
        metavar="FILE",
        help="the config.json with the model's architecture and numbers (default: that in SOURCE, or beside it)",
    )
    add("--source-layout", metavar="NAME", help="the layout of SOURCE (default: recognized by its names and shapes)")
    add("--target-layout", metavar="NAME", help="the layout of TARGET (default: that of --to)")
    add(
        "--switch",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a switch of the layout of TARGET, for example padded=256; may be given several times",
    )
    add(
        "--mesh",
        metavar="AXIS=N,...",
        help="write a file for each rank of this mesh of --to=fsdp2, megatron, vllm or sglang, for example tp=2,pp=2",
    )
    add("--optimizer", action="store_true", help="convert the optimizer's state too")
    add(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="names of SOURCE that begin with OLD begin with NEW, before anything else looks at them: 'model.=' "
        "removes a prefix, '=model.' adds one; with * in OLD "
        "it is a glob of whole names: '*._orig_mod.*=*.*' removes a wrapper; may be given several times",
    )
    add(
        "--dtype",
        metavar="DTYPE",
        help="the dtype of floats in TARGET, not of the optimizer's state; values are rounded to the nearest "
        "(default: that of SOURCE)",
    )
    add(
        "--convert",
        choices=("rne", "saturate", "inf"),
        help="what becomes of values beyond the range of --dtype: an error (rne, the default), the largest value, or "
        "infinite",
    )
    add("--quantize", metavar="FORMAT", help="the quantized format of matrices in TARGET")
    add(
        "--unquantized",
        action="append",
        default=[],
        metavar="GLOB",
        help="with --quantize: matrices that are not quantized",
    )
    add("--only", action="append", default=[], metavar="GLOB", help="convert only these params")
    add("--ignore", action="append", default=[], metavar="GLOB", help="leave these params out of TARGET")
    add(
        "--allow",
        choices=["extra"],
        help="extra: leave out objects that TARGET cannot hold, and tensors, weights too, that the model or the layout "
        "of TARGET does not have; a line for each kind says which",
    )
    add(
        "--chunk",
        metavar="SIZE",
        help="the largest chunk of a tensor, in a TARGET of a format with chunks (default: 64MiB)",
    )
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="this command is started N times, by a launcher or with --rank: the processes share out the work",
    )
    add("--transport", choices=transports(), help="how the processes communicate, as for reshard-exec")
    for name, (value, about) in _flags("reshard-exec").items():
        if name in _PASSED:
            form = {"metavar": value} if value else {"action": "store_true"}
            add(name, help=about.replace("%", "%%"), **form | _PASSED[name])
    add("--plan", action="store_true", help="print the job, also if it has errors, and do nothing")
    return parser


#: The tensors that reshard-inspect lists, by name: dtype, shape and chunks.
_Tensors = dict[str, dict[str, Any]]
#: What it lists: format, tensors and objects.
_Contents = dict[str, Any]


def _contents(source: str) -> _Contents:
    """What the files of a checkpoint contain."""
    found: _Contents = _inspect(source, "--format=json")
    for name in (*found["tensors"], *found["objects"]):
        if "\ufffd" in name:  # in place of bytes that are no UTF-8
            raise Error(f"'{source}': the name {name!r} is not UTF-8")
    return found


@dataclass
class _Conversion:
    """What is converted into what."""

    job: JobText
    said: list[str]  #: what the command says about it
    converted: set[str]  #: tensors of SOURCE
    config: dict[str, Any] | None = None  #: the config.json of TARGET
    hint: str = ""  #: what a user may do if the job is not valid


def _job(options: argparse.Namespace, model: list[str], source: dict[str, Any], target: dict[str, Any]) -> JobText:
    """The job of a conversion. model: its lines."""
    job = JobText(*model)
    job.section("source", source, {"storage": "SOURCE"})
    made = {
        key: f"--{option}={value}"
        if isinstance(value := getattr(options, option.replace("-", "_")), str)
        else f"--{option}"
        for key, option in _MADE
        if getattr(options, option.replace("-", "_"))
    }
    job.section("target", target, {"storage": "TARGET"} | made)
    if staging := _staging(options):
        job.section("options", {"staging": staging}, {"staging": f"--memory={options.memory}"})
    if options.processes > 1:
        job.line(f"world: {options.processes}", f"--processes={options.processes}")
    return job


def _numbers(words: Sequence[str], option: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        name, equals, number = word.partition("=")
        if not (name and equals and number.isdigit()) or name in found:
            raise Error(f"invalid {option} {word!r}: expected NAME=N, each name once, with a non-negative integer")
        found[name] = int(number)
    return found


def _mesh(options: argparse.Namespace) -> dict[str, Any]:
    """The mesh of a target with a file for each rank."""
    axes = _numbers(options.mesh.split(","), "--mesh")
    if options.to == "megatron":
        return {"megatron": axes}
    if options.to == "fsdp2":
        return axes
    # Engines: whole experts on the ranks of ep, or, without it, every expert cut over those of tp.
    expert = {"ep": axes.pop("ep")} if "ep" in axes else {"etp": axes.get("tp", 1)}
    return axes | {"views": [expert | {name: size for name, size in axes.items() if name == "pp"}]}


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    """What the options say about the params of the target."""
    found: dict[str, Any] = {}
    if options.dtype:
        found |= {"dtype": options.dtype, "convert": options.convert or "rne"}
    if options.quantize:
        found["quantize"] = (
            {"format": options.quantize, "ignore": options.unquantized} if options.unquantized else options.quantize
        )
    for key in ("only", "ignore"):
        if getattr(options, key):
            found[key] = list(getattr(options, key))
    return found


def _check_convert(options: argparse.Namespace, target: dict[str, Any]) -> None:
    """Raises Error if --convert has no effect on a target. Elements of a quantized source are cast without --dtype
    too."""
    if options.convert and "convert" not in target:
        raise Error("unexpected --convert without --dtype: TARGET has the dtypes of SOURCE")


def _staging(options: argparse.Namespace) -> int:
    """The staging limit for --memory: a quarter of it, since the pages of mapped files are released at half. 0: none is
    needed, because elements that wait to be quantized take at most 256 MiB without one."""
    size = re.fullmatch(r"(\d+) *([KMG]i?B)?", options.memory or "")
    if not size:
        return 0
    unit = size[2] or ""
    quarter = int(size[1]) * (1024 if "i" in unit else 1000) ** " KMG".find(unit[:1] or " ") // 4
    return quarter if quarter < 256 << 20 else 0


def _absolute(path: str | Path) -> Path:
    """The path without links, as a job states it. Raises Error if it is no UTF-8, which YAML needs."""
    found = os.path.realpath(path)
    if found.encode("utf-8", "replace").decode() != found:
        raise Error(
            f"{found.encode('utf-8', 'backslashreplace').decode()!r} is not UTF-8, expected a path that a job "
            "can state: rename it or its folder, or link to it"
        )
    return Path(found)


def _config(options: argparse.Namespace) -> Path | None:
    """The config.json of the source."""
    source = Path(options.source)
    places = (
        [Path(options.config)] if options.config else [source / "config.json", _absolute(source).parent / "config.json"]
    )
    if options.config and not os.path.lexists(options.config):
        raise Error(f"--config={options.config}: no such file")
    found = next((place for place in places if os.path.lexists(place)), None)
    return found and _absolute(found)


def _same_names(options: argparse.Namespace, source: str, contents: _Contents) -> _Conversion:
    """A conversion without a model: the tensors are those of the source."""
    try:
        described = run_compiler([f"--describe={source}", *_given(options, "--rename")]).removesuffix("\n").split("\n")
    except CompileError as error:
        raise Error(str(error).removeprefix("reshard-compile: error: ")) from None
    layouts = json.dumps({"same": {"params": "same"}})
    target = {"layout": "same"} | _storage(options) | _changes(options)
    _check_convert(options, target)
    braced = [name for name in contents["tensors"] if "{" in name or "}" in name]
    if braced and not options.allow:
        raise Error(
            f"'{options.source}' has {len(braced)} tensors with braces in their names: {patterns(braced)}; in the "
            "names of a model braces are index variables: --rename=OLD=NEW gives others, --allow=extra leaves them out"
        )
    said = ["model: none; the tensors keep their names" + (", renamed" if options.rename else "")]
    if contents["format"] == "DCP safetensors":
        said.append(_shards(contents["tensors"]))
    model = ["model:", *(f"  {line}" for line in described), f"  layouts: {layouts}"]
    job = _job(options, model, {"storage": source, "layout": "same"}, target)
    return _Conversion(job, said, set(contents["tensors"]) - set(braced))


def _shards(tensors: _Tensors) -> str:
    """What is said about the files of DCP safetensors. A rank without data has none, so that a gap in their
    numbers may be right."""
    files = {chunk["file"] for tensor in tensors.values() for chunk in tensor["chunks"]}
    numbers = {int(found[1]) for file in files if (found := re.match(r"shard-(\d{5})-", file))}
    gaps = sorted(set(range(1, max(numbers, default=0))) - numbers)
    return (
        f"shards: {len(files)} files"
        + (f", none with the number {shown(map(str, gaps))}" if gaps else "")
        + "; the format does not state how many there were: --model or --config would show by the shapes that one is "
        "lost"
    )


def _storage(options: argparse.Namespace) -> dict[str, Any]:
    """Where and how the target is written."""
    folder = str(_absolute(options.target))
    if options.mesh:
        return {"storage": folder, "mesh": _mesh(options)}
    chunk = {"chunk": options.chunk} if options.chunk else {}
    return {"storage": {"folder": folder, "format": _format(options.to)["name"]} | chunk}


def _target_layout(
    options: argparse.Namespace, model: Model, switches: dict[str, int]
) -> tuple[str, dict[str, tuple[int, ...]]]:
    """The layout of the target, and the names and shapes of whole tensors in it."""
    names = (
        (options.target_layout,)
        if options.target_layout
        else (options.to,)
        if options.mesh
        else _FRAMEWORKS[options.to][1]
    )
    errors = []
    for name in names:
        try:
            return name, model.holds(name, switches)
        except CompileError as error:
            errors.append(f"\n  {name}: {brief(error)}")
    chosen = "".join(f" with --switch={each}" for each in options.switch)
    raise Error(
        f"model {model.name} cannot be converted to {options.target_layout or options.to}{chosen}:{''.join(errors)}"
    )


@dataclass
class _States:
    """The states of the optimizer that are converted."""

    names: dict[str, set[str]] = field(default_factory=dict)  #: in the source, by state
    tied: bool = False  #: one side has master weights, the other has weights only: they are the same elements
    #: weights of the source of which it has master weights, which are converted instead
    replaced: set[str] = field(default_factory=set)


def _states(
    options: argparse.Namespace, source: Source, shapes: Shapes, layout: str, switches: dict[str, int]
) -> _States:
    """Decides about the states of the optimizer. Raises Error if the layout of TARGET has no names for one."""
    found = states_of(source, shapes)
    if not found:
        raise Error(
            f"--optimizer: '{options.source}' has no optimizer's state with the names of layout {source.layout}"
        )
    named = {state for state, names in state_names(source.model, layout, switches).items() if names}
    if not named & found.keys():
        raise Error(
            f"--optimizer: layout {layout} has no names for the optimizer's state; "
            "the layouts of --to=fsdp2 and --to=megatron have, without --mesh"
        )
    unnamed = sorted(found.keys() - named - {MASTER})
    if unnamed and not options.allow:
        raise Error(
            f"--optimizer: layout {layout} has no names for the state {shown(unnamed)}; --allow=extra leaves it out"
        )
    masters = found.get(MASTER, set()) if MASTER not in named else set()
    return _States(
        {state: names for state, names in found.items() if state in named or state == MASTER},
        (MASTER in named) != (MASTER in found),
        {name for name in source.held if any(master.endswith(f".{name}") for master in masters)},
    )


def _extra(
    options: argparse.Namespace, source: Source, shapes: Shapes, converted: set[str], replaced: set[str]
) -> list[str]:
    """What is said about the tensors of the source that are left out. replaced: those of which others have the
    elements. Raises Error where that is not allowed."""
    extra = sorted(shapes.keys() - converted - replaced)
    if replaced and not options.allow:
        raise Error(
            f"--optimizer: the optimizer of TARGET has no master weights, so that those of '{options.source}' become "
            f"its weights; --allow=extra leaves out the weights {patterns(replaced)}"
        )
    numbers = f" with the numbers of {source.model.config}" if source.model.config else ""
    where = f"that layout {source.layout} of model {source.model.name}{numbers} does not have"
    if further := repeats(extra, source.held):
        raise Error(
            f"'{options.source}' has {len(further)} tensors {where}, but it has others of the same kind: "
            f"{patterns(further)}; is it another model's config?"
        )
    if extra and not options.allow:
        hint = (
            "" if options.optimizer or not states_of(source, shapes) else "--optimizer converts the optimizer's state; "
        )
        raise Error(
            f"'{options.source}' has {len(extra)} tensors {where}: {patterns(extra)}; {hint}--allow=extra "
            "leaves them out"
        )
    known = state_names(source.model, source.layout, source.switches) if extra else {}
    states = {name: state for state, names in known.items() for name in names}
    # the names of states that are known are enough
    state = [states.get(name, name) for name in extra if name in states or name.startswith("optimizer.")]
    weights = [name for name in extra if name not in states and not name.startswith("optimizer.")]
    left = (
        (weights, f"that are weights {where}"),
        (replaced, "that are weights of which the optimizer has master weights"),
        (state, "of the optimizer's state"),
    )
    return [f"left out: {len(names)} tensors {what}: {patterns(names)}" for names, what in left if names]


def _dtype_of(tensors: _Tensors, names: Iterable[str]) -> str | None:
    """The dtype of most elements of those tensors that are floats."""
    sizes: dict[str, int] = {}
    for tensor in (tensors[name] for name in sorted(names)):  # if two have equally many, each process takes the same
        if tensor["dtype"] in _FLOATS:
            sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + elements([tensor["shape"]])
    return max(sizes, key=lambda name: sizes[name], default=None)


def _of_models(options: argparse.Namespace, folder: str, tensors: _Tensors, models: list[Model]) -> _Conversion:
    """A conversion from one layout of a model to another."""
    switches = _numbers(options.switch, "--switch")
    wanted: dict[str, Any] = (
        {"layout": "target"} | ({"switches": switches} if switches else {}) | _storage(options) | _changes(options)
    )

    tried: list[JobText] = []

    def resolved(source: Source) -> str:
        """The compiler's text of both layouts."""
        layout, _ = _target_layout(options, source.model, switches)
        side = {key: value for key, value in source.endpoint().items() if key != "dtype"} | {"mesh": {}}
        tried.append(
            _job(
                options, [f"model: {json.dumps(source.model.yaml(source=source.layout, target=layout))}"], side, wanted
            )
        )
        with tempfile.TemporaryDirectory(prefix="reshard-") as scratch:
            return tried[-1].compile(Path(scratch), "--emit=layout")

    shapes = {name: tensor["shape"] for name, tensor in tensors.items()}
    try:
        source = recognize(models, options.source_layout, shapes, resolved)
    except Error as error:
        if options.plan and tried:
            _print(tried[-1].text.removesuffix("\n"))
        if "'layer' over pp" not in str(error):
            raise
        raise Error(
            f"{error}\nnote: --mesh divides the layers evenly over pp; without pp, --plan prints the job: add pp to "
            "the mesh of its target, and 'place: {layer: {axis: pp, first: N}}' beside it for N layers in the first "
            "stage, and compile it with reshard-compile"
        ) from None
    layout, names = _target_layout(options, source.model, switches)
    states = _states(options, source, shapes, layout, switches) if options.optimizer else _States()
    converted = set(source.held).union(*states.names.values()) - states.replaced
    left = _extra(options, source, shapes, converted, states.replaced)
    weights = set(source.held if source.plain is None else source.plain) - states.replaced | (
        states.names[MASTER] if states.replaced else set()
    )
    if coded := sorted(name for name in weights & tensors.keys() if tensors[name]["dtype"].startswith("fp8")):
        raise Error(
            f"'{options.source}' has {tensors[coded[0]]['dtype']} without scales of a known form: "
            f"{patterns(coded)}; known: block_fp8 (128 x 128, {coded[0]}_scale_inv)"
        )
    dtype = _dtype_of(tensors, weights & tensors.keys())
    optimizer = {
        state: declared(state, tensors[min(each)]["dtype"], states.tied and state == MASTER)
        for state, each in states.names.items()
    }
    if states.tied and not states.replaced:
        optimizer[MASTER] = declared(MASTER, "fp32", True)
    model = replace(source.model, dtype=dtype, optimizer=optimizer)
    if model.tied and layout.startswith("hf"):  # as in Hugging Face's checkpoints
        wanted["ignore"] = [*wanted.get("ignore", []), *(name for name in names if name.endswith("lm_head.weight"))]
    numbers = (f", with the numbers of {model.config}" if model.config else "") + (
        ", without multi-token prediction" if model.let else ""
    )
    said = [
        f"model: as {model.name}{numbers}",
        f"layouts: {source.layout} to {layout}{', with ' + shown(optimizer) if optimizer else ''}",
    ]
    if states.tied:
        said.append(
            "weights: of TARGET, the master weights of SOURCE"
            if states.replaced
            else "master weights: of TARGET, the weights of SOURCE"
        )
    if source.format:
        wanted.setdefault("convert", options.convert or "rne")
        said.append(
            f"quantized: in {source.format}, except for "
            f"{patterns(name for name, shape in (source.plain or {}).items() if len(shape) > 1) or 'nothing'}"
        )
    said += left
    endpoint = source.endpoint() | {"storage": folder}
    if states.replaced:  # `ignore` is compared with names as they are declared, with {layer} in place of a number
        endpoint["ignore"] = [
            *endpoint.get("ignore", []),
            *sorted({_NUMBER.sub("*", name) for name in states.replaced}),
        ]
    if source.layout != layout and all(name.startswith("megatron-checkpoint") for name in (source.layout, layout)):
        said.append(
            "common.pt: names the layout of SOURCE, and a trainer may read TARGET by it; "
            "--leave=common.pt leaves it out"
        )
    if states.tied and layout in NO_MASTER:
        wanted["ignore"] = [*wanted.get("ignore", []), NO_MASTER[layout]]
    _check_convert(options, wanted)
    result = _Conversion(
        _job(options, [f"model: {json.dumps(model.yaml(source=source.layout, target=layout))}"], endpoint, wanted),
        said,
        converted,
    )
    floats = sorted({tensors[name]["dtype"] for name in weights & tensors.keys()} & _FLOATS.keys())
    if len(floats) > 1 and not options.dtype:
        result.hint = (
            f"\nnote: the floats of '{options.source}' are {' and '.join(floats)}: --dtype=DTYPE rounds them to one "
            "dtype"
        )
    if options.to == "hf" and model.config:
        result.config = _config_of_target(options, model, dtype, names, said)
    return result


def _config_of_target(
    options: argparse.Namespace, model: Model, dtype: str | None, names: dict[str, tuple[int, ...]], said: list[str]
) -> dict[str, Any]:
    """The config.json of the target: that of the source, or its part for the language model, with the dtype and the
    quantization of the target."""
    assert model.config
    config = read_config(model.config)
    if model.text and options.target_layout in (None, "hf"):  # the names of the language model alone
        outer = {name: config[name] for name in ("dtype", "torch_dtype") if name in config}
        config = {"architectures": [model.text]} | outer | dict(text_of(config))
        said.append("config.json: the 'text_config' of SOURCE's")
    config.pop("quantization_config", None)
    if written := _FLOATS.get(options.dtype or dtype or ""):
        config["dtype" if "dtype" in config else "torch_dtype"] = written
    if options.quantize == "block_fp8":  # what transformers and vLLM read
        matrices = [name for name, shape in names.items() if len(shape) > 1]
        kept = [name.removesuffix(".weight") for name in matching(options.unquantized, matrices)]
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": kept,
        }
    elif options.quantize:
        said.append(f"config.json does not say that matrices are {options.quantize}: add what your engine expects")
    return config


def _needs_model(options: argparse.Namespace) -> bool:
    """Whether a model gives TARGET its names. Without --to it does, if there is one."""
    return not options.to or options.to in _FRAMEWORKS or bool(options.mesh or options.target_layout)


def _without_model(options: argparse.Namespace, contents: _Contents) -> str:
    """What an error says about the way without a model, with the options for the names of SOURCE."""
    names = [*contents["tensors"], *contents["objects"]]

    def begins(*beginnings: str) -> list[str]:
        return [name for name in contents["tensors"] if name.startswith(beginnings)]

    # by dcp.save({"model": ...})
    saved = begins("optimizer.", "model.model.", "model.lm_head.") and begins("model.", "optimizer.") == list(
        contents["tensors"]
    )
    further = [as_option("model.=")] if saved else []
    further += ["--ignore='optimizer*'"] if begins("optimizer.") else []
    further += ["--allow=extra"] if contents["objects"] and not options.allow else []
    way = " ".join(["--to=safetensors", *further, "--copy=DIR"])
    return (
        f"; --to=safetensors keeps the names, here {patterns(names)}, and renames them by --rename; without a model, "
        f"{way} writes the weights, with config.json and the tokenizer of DIR"
    )


def _leaves(options: argparse.Namespace, contents: _Contents, converted: set[str]) -> None:
    """Refuses --leave for names of tensors, which stay."""
    for glob in options.leave:
        tensors = matching([glob], contents["tensors"])
        stay = converted.intersection(tensors).difference(matching(options.ignore, tensors))
        if stay or (tensors and not matching([glob], contents["objects"])):
            raise Error(
                f"--leave={glob} matches {len(tensors)} tensors: {patterns(tensors)}; it leaves out objects "
                f"only, --ignore={glob} leaves out tensors"
            )
        if not matching([glob], contents["objects"]):
            raise Error(
                f"--leave={glob} matches no object of '{options.source}', which has {len(contents['objects'])}"
                + (f": {patterns(contents['objects'])}" if contents["objects"] else "")
            )


def _conversion(options: argparse.Namespace, contents: _Contents) -> _Conversion:
    """Decides what is converted, by the options and the files."""
    folder = str(_absolute(options.source))
    given = bool(options.to)
    names_model = bool(options.model or options.config)
    config = _config(options)
    models: list[Model] = []
    if options.model and _needs_model(options):
        models = [model_named(options.model, _absolute(options.config) if options.config else None)]
    elif config and _needs_model(options):
        try:
            models = models_of(config)
        except UnknownModel as error:
            if options.to or options.config or options.target_layout or not options.rename:
                raise Error(f"{error}{_without_model(options, contents)}") from None
    if not options.to:
        options.to = "safetensors" if options.target_layout or (options.rename and not models) else "hf"
    if options.chunk and (options.mesh or not _format(options.to)["chunks"]):
        *others, last = sorted(to for to in (*_FRAMEWORKS, *_formats()) if _format(to)["chunks"])
        raise Error(f"unexpected --chunk: a TARGET of --to={', '.join(others)} or {last} without --mesh has chunks")
    if options.to in _FRAMEWORKS or options.mesh or options.target_layout:
        if not (names_model or config):
            raise Error(
                f"found no config.json in '{options.source}' or beside it: --config=FILE or --model=NAME states the "
                f"model of --to={options.to}{'' if given else ', the default'}{_without_model(options, contents)}"
            )
        return _of_models(options, folder, contents["tensors"], models)
    for option in ("model", "config", "source_layout", "switch", "optimizer"):
        if getattr(options, option):
            raise Error(
                f"unexpected --{option.replace('_', '-')}: --to={options.to} alone keeps the names of all tensors; "
                "--to=hf, fsdp2, megatron, or --target-layout changes them"
            )
    return _same_names(options, folder, contents)


def _check_options(options: argparse.Namespace) -> None:
    """Refuses options that contradict each other."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (not text or text.encode("utf-8", "replace").decode() != text):
                what = name.upper() if name in ("source", "target") else f"--{name.replace('_', '-')}"
                raise Error(
                    f"invalid {what}={text.encode('utf-8', 'backslashreplace').decode()!r}: expected "
                    f"{'UTF-8' if text else 'a value'}"
                )
    Renames(options.rename)
    if options.mesh and options.to not in _RANKS:
        raise Error(f"unexpected --mesh: it writes a file for each rank of --to={', '.join(_RANKS)}")
    if options.to in ("vllm", "sglang") and not options.mesh:
        raise Error(f"--to={options.to} needs --mesh: it writes a file for each rank")
    if options.unquantized and not options.quantize:
        raise Error("unexpected --unquantized without --quantize")
    if options.processes < 1:
        raise Error(f"invalid --processes={options.processes}: expected 1 or more")
    if options.processes > 1 and not options.transport and not options.plan:
        raise Error(
            f"--processes={options.processes} needs {' or '.join(f'--transport={name}' for name in transports())}"
        )
    among = _given(options, "--transport", "--rendezvous", "--rank", "--job", "--insecure")
    if among and options.processes == 1:
        raise Error(f"unexpected {among[0].partition('=')[0]} without --processes=N of 2 or more")
    if options.rendezvous and not options.plan:
        check_rendezvous(options.rendezvous, transport=options.transport, insecure=options.insecure)
    if options.rank is not None and not 0 <= options.rank < options.processes:
        raise Error(f"invalid --rank={options.rank}: expected 0 to {options.processes - 1}")
    if options.max_shard_size and (options.mesh or (options.to and not _format(options.to)["split"])):
        writes = "each rank has" if options.mesh else f"{options.to} writes"
        raise Error(f"unexpected --max-shard-size: {writes} one file")


def _check(options: argparse.Namespace) -> _Contents:
    """Checks the options and the files. Returns the contents of the source."""
    _check_options(options)
    if os.path.lexists(options.target):
        raise Error(f"'{options.target}' exists, expected a folder to create")
    if options.report and not Path(options.report).absolute().parent.is_dir():
        raise Error(f"--report={options.report}: found no folder '{Path(options.report).parent}'")
    if options.report and _absolute(options.report).is_relative_to(_absolute(options.source)):
        raise Error(f"--report={options.report} is in '{options.source}', expected a file outside")
    contents = _contents(options.source)
    contents["tensors"] = Renames(options.rename).apply(contents["tensors"], options.source)
    return contents


def _print(*lines: str, file: TextIO | None = None) -> None:
    """Prints lines at once. If nobody reads them any more, as in `reshard-convert … | head -1`,
    the conversion goes on."""
    try:
        print(*lines, sep="\n", file=file, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())
    except OSError as error:
        if file is not sys.stderr:  # else nobody can be told
            raise Error(f"standard output: {error.strerror}") from None


def _say(options: argparse.Namespace, conversion: _Conversion, lines: Sequence[str]) -> None:
    """Prints lines about the conversion. Of several processes one prints all lines at the end (_execute), since until
    then it is not known which one."""
    if options.processes == 1 or options.plan:
        _print(*lines, file=sys.stderr if options.plan else sys.stdout)  # before what the executor prints
    else:
        conversion.said += lines


def _compile(options: argparse.Namespace, conversion: _Conversion, folder: Path) -> tuple[Path, int, bool]:
    """Compiles the job. Returns the plan, its bytes of padding, and whether tensors of the model are left out. A tensor
    of the source that no param of the target holds is an error, unless the options leave it out."""
    plan, report = folder / "convert.rplan", folder / "compiled.json"
    arguments = ["-o", str(plan), f"--report={report}", *_given(options, "--rename")]
    warn = lambda warning: _say(options, conversion, [f"warning: {warning}"])
    try:
        conversion.job.compile(folder, *arguments, warn=warn)
    except CompileError as error:
        staged = (
            f"\nnote: the staging limit is a quarter of --memory={options.memory}"
            if _staging(options) and "staging limit" in str(error)
            else ""
        )
        raise Error(
            f"{error}{staged}{conversion.hint}\nnote: --plan prints the job, in which reshard-compile shows "
            "the place of an error"
        ) from None
    compiled = json.loads(report.read_text())
    if (unused := compiled["unused"]) and not (options.only or options.ignore or options.allow):
        raise Error(
            f"the layout of TARGET has no params for {len(unused)} tensors of the model: {patterns(unused)}; "
            "--allow=extra leaves them out"
        )
    if unused:
        _say(
            options,
            conversion,
            [f"left out: {len(unused)} tensors of the model, which TARGET does not get: {patterns(unused)}"],
        )
    return plan, compiled["bytes"]["padding"], bool(unused)


def _small_files(options: argparse.Namespace, conversion: _Conversion, folder: Path) -> list[str]:
    """The option of reshard-exec that copies small files: those of --copy, with the config.json of the target."""
    if not conversion.config:
        return [f"--copy={options.copy}"] if options.copy else []
    if options.copy and not Path(options.copy).is_dir():
        raise Error(f"--copy={options.copy}: no such folder")
    files = folder / "files"
    files.mkdir()
    for path in Path(os.path.realpath(options.copy)).iterdir() if options.copy else ():
        if not path.is_dir() and path.name != "config.json":
            if not path.exists():
                raise Error(f"--copy={options.copy}: '{path}' is a broken link")
            (files / path.name).symlink_to(path)
    (files / "config.json").write_text(json.dumps(conversion.config, indent=2) + "\n", "utf-8")
    return [f"--copy={files}"]


@contextlib.contextmanager
def _terminating(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While it is entered, SIGTERM and SIGINT end that process, and this one goes on, to copy the report and to remove
    its temporary folder. A launcher sends SIGTERM to all processes when the first one has failed."""
    before = {
        number: signal.signal(number, lambda *_, number=number: process.send_signal(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _execute(options: argparse.Namespace, conversion: _Conversion, folder: Path, tensors: _Tensors) -> int:
    """Compiles, runs and says what was compared."""
    plan, padding, partial = _compile(options, conversion, folder)
    report = folder / "ran.json"
    passed = _given(
        options, "--allow", "--rename", "--transport", *(name for name in _PASSED if name not in ("--copy", "--report"))
    )
    passed += [f"--rename-objects={rule}" for rule in options.rename]
    passed += [f"--report={report}", *_small_files(options, conversion, folder)]
    command: list[str | Path] = [PREFIX / "bin" / "reshard-exec", plan, "--check", "--check-replicas", *passed]
    # As this process, it ignores that nobody reads what it says.
    with subprocess.Popen(command, restore_signals=False) as process, _terminating(process):
        code = process.wait()
        if options.report and report.exists():
            try:
                Path(options.report).write_bytes(report.read_bytes())
            except OSError as error:
                raise Error(
                    f"--report={options.report}: {error.strerror}{'' if code else f'; {options.target!r} is complete'}"
                ) from None
    code = 128 - code if code < 0 else code  # of a signal, as shells have it
    if code or not report.exists():  # another process has the report
        return code
    opened = Plan.open(plan)
    # a chunk or a file is a rank
    params = [param for rank in opened.endpoint("target", 0).ranks for param in opened.params(rank, "target").values()]
    held = (
        f"{len(params)} tensors in {len(opened.endpoint('target', 0).ranks)} files"
        if options.mesh
        else f"{len({param.name for param in params})} tensors"
    )
    _print(
        *conversion.said,
        f"source: {len(conversion.converted)} tensors, "
        f"{elements(tensors[name]['shape'] for name in conversion.converted)} elements"
        + (", with those that are left out" if partial else ""),
        f"target: {held}, {elements(param.shape for param in params)} elements; "
        f"{json.loads(report.read_text())['checked_bytes']} bytes, "
        f"of which {padding} are padding, were compared with the source and are right",
    )
    return 0


def run(arguments: Sequence[str]) -> int:
    """The command. Returns its exit code."""
    for stream in (sys.stdout, sys.stderr):  # names that it cannot encode are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        contents = _check(options)
        conversion = _conversion(options, contents)
        _leaves(options, contents, conversion.converted)
        found = (
            f"{printable(options.source)}: {contents['format']}, {len(contents['tensors'])} tensors, "
            f"{len(contents['objects'])} objects"
        )
        said, conversion.said = [found, *conversion.said], []
        _say(options, conversion, said)
        if options.plan:
            if options.rename:
                conversion.job.comment(
                    [f"reshard-compile and reshard-exec need {' '.join(map(as_option, options.rename))} with this job"]
                )
            _print(conversion.job.text.removesuffix("\n"))
            return 0
        with tempfile.TemporaryDirectory(prefix="reshard-convert-") as folder:
            return _execute(options, conversion, Path(folder), contents["tensors"])
    except Error as error:
        return _failed(str(error), 2)
    except OSError as error:
        return _failed(f"'{error.filename}': {error.strerror}" if error.filename else error.strerror or str(error), 3)
    except MemoryError:
        return _failed("not enough memory", 3)
    except KeyboardInterrupt:
        return 130


def _failed(message: str, code: int) -> int:
    """Prints an error. Returns the exit code."""
    _print(*map(printable, f"reshard-convert: error: {message}".split("\n")), file=sys.stderr)
    return code
