# SPDX-License-Identifier: Apache-2.0
"""Finds the model and the layout of a checkpoint: the model by a config.json, the layout by names
and shapes of tensors."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import LIBRARY
from .errors import CompileError, Error
from .job_text import JobText
from .names import Renames, common_beginning, patterns, printable, rules_for, shown
from .plan import Plan

MODELS = LIBRARY / "models"
#: Layouts of published quantized checkpoints: the format, and the layout with the same names of what is not quantized.
#: They are sources only.
_QUANTIZED = {"hf-mxfp4": ("mxfp4", "hf"), "hf-int4": ("int4", "hf"), "hf-int4-multimodal": ("int4", "hf-multimodal")}
_NUMBERS = re.compile(r"\d+")
_SCALE = "_scale_inv"  # ends the name of the scales of a matrix of block FP8
#: Layouts of checkpoints in which a source is looked for, with values of their switches.
_SOURCES: tuple[tuple[str, dict[str, int]], ...] = (
    ("hf", {}),
    ("hf-multimodal", {}),
    *((layout, {}) for layout in _QUANTIZED),
    ("fsdp2-checkpoint", {}),
    ("fsdp2-checkpoint", {"transformers": 4}),
    ("megatron-checkpoint", {}),
    ("megatron-checkpoint-layers", {}),
    ("megatron-checkpoint-singleton", {}),
    ("fsdp2", {}),
    ("fsdp2", {"transformers": 4}),
)
#: States of optimizers: PyTorch's Adam, and the master weights of Megatron-Core.
_STATES = ("param", "exp_avg", "exp_avg_sq", "step")
MASTER = "param"  #: the state of master weights
#: Layouts without master weights, since their optimizers update the weights, and the name that such a state would get.
NO_MASTER = {"fsdp2-checkpoint": "optimizer.state.*.param"}
_EMBEDDING = "embedding.word_embeddings.weight"  # Megatron-Core's, which is padded
_TIED = 8  # names that a source may lack because they are tied; more are not looked at

_CONFIG_BYTES = 16 << 20  # of a config.json, at most
_CONFIG_DEPTH = 64  # lists and maps in each other

Shapes = Mapping[str, Sequence[int]]


def brief(error: CompileError) -> str:
    """The first message of JobText.compile."""
    return str(error).partition("\n")[0].replace(" error: ", " ", 1)


@cache
def _compiled(*job: str) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the params of a job's source, a rank. Raises CompileError."""
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        plan = Path(folder) / "p.rplan"
        JobText(*job).compile(Path(folder), "-o", str(plan), "--omit-job", "--no-verify")  # it is not run
        return {name: param.shape for name, param in Plan.open(plan).params(0, "source").items()}


@dataclass(frozen=True)
class Model:
    """A model file with the numbers of a config, as a job states it."""

    name: str
    path: Path
    config: Path | None = None  #: None: the config that the file names
    tied: bool = False  #: the head has the elements of the embedding
    tie: bool = False  #: the file does not declare this, so that the job does
    text: str | None = None  #: the architecture of the model, if the config is that of a multimodal model around it
    let: Mapping[str, int] = field(default_factory=dict)
    dtype: str | None = None  #: of tensors that state none; None: that of the file
    optimizer: Mapping[str, Any] = field(default_factory=dict)  #: the declarations of states

    def yaml(self, **layouts: str) -> dict[str, Any]:
        """The map of the job. layouts: layouts of the job that extend those of the model."""
        found: dict[str, Any] = {
            "extend": str(self.path),
            "name": self.name,
            "layouts": {name: {"extend": layout} for name, layout in layouts.items()},
        }
        for key, value in (
            ("config", self.config and str(self.config)),
            ("let", dict(self.let)),
            ("dtype", self.dtype),
            ("optimizer", dict(self.optimizer)),
        ):
            if value:
                found[key] = value
        if self.tie:
            found["tensors"] = {"lm_head.weight": {"tied": "model.embed_tokens.weight"}}
        return found

    def holds(self, layout: str, switches: Mapping[str, int], **endpoint: Any) -> dict[str, tuple[int, ...]]:
        """The names and shapes of a checkpoint in a layout. endpoint: further keys of the
        source. Raises CompileError."""
        side = {"layout": "side", "mesh": {}} | ({"switches": dict(switches)} if switches else {})
        target = side | {"layout": "plain", "convert": "rne"}
        model = self.yaml(side=layout, plain=_QUANTIZED.get(layout, ("", layout))[1])
        try:
            return _compiled(
                f"model: {json.dumps(model)}", f"source: {json.dumps(side | endpoint)}", f"target: {json.dumps(target)}"
            )
        except CompileError as error:
            raise CompileError(str(error).replace("layout 'side'", f"layout '{layout}'")) from None


def read_config(path: Path) -> dict[str, Any]:
    """A config.json. Raises Error if it is none."""
    try:
        if not path.is_file():
            what = "missing" if not os.path.lexists(path) else "a folder" if path.is_dir() else "no regular file"
            raise Error(f"'{path}' is {what}, expected a config.json")
        if (size := path.stat().st_size) > _CONFIG_BYTES:
            raise Error(f"'{path}' has {size} bytes, expected a config.json of at most {_CONFIG_BYTES}")
        found = json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise Error(f"'{path}': lists and objects are nested more than {_CONFIG_DEPTH} deep") from None
    except (OSError, ValueError) as error:
        raise Error(f"'{path}': {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict):
        raise Error(f"'{path}': expected a JSON object")
    level: list[Any] = [found]
    for _ in range(_CONFIG_DEPTH):
        level = [
            each
            for outer in level
            for each in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(each, (dict, list))
        ]
    if level:
        raise Error(f"'{path}': lists and objects are nested more than {_CONFIG_DEPTH} deep")
    return found


def _architectures(path: Path, config: Mapping[str, Any]) -> list[str]:
    """What a config says about the kind of model."""
    names, kind = config.get("architectures") or [], config.get("model_type")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Error(f"'{path}': 'architectures' is {printable(json.dumps(names)[:40])}, expected a list of names")
    if kind is not None and not isinstance(kind, str):
        raise Error(f"'{path}': 'model_type' is {printable(json.dumps(kind)[:40])}, expected a name")
    return [*names, *([kind] if kind else [])]


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal model's config that is its language model's; the compiler reads keys from it that the
    config lacks. Empty if there is none."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def _tied(path: Path, config: Mapping[str, Any]) -> bool | None:
    """Whether a config says that the head has the elements of the embedding; None if it says nothing."""
    found = config.get("tie_word_embeddings", text_of(config).get("tie_word_embeddings"))
    if found is not None and not isinstance(found, bool):
        raise Error(f"'{path}': 'tie_word_embeddings' is {printable(json.dumps(found)[:40])}, expected true or false")
    return found


def _library() -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """The models of the library that have a config: name, file, config."""
    for config in sorted(MODELS.glob("*.config.json")):
        name = config.name.removesuffix(".config.json")
        if (path := MODELS / f"{name}.yaml").exists():
            yield name, path, read_config(config)


def _declarations(path: Path) -> str:
    """The text of a model file without its comments, its name and its config."""
    return "\n".join(
        line for line in path.read_text().splitlines() if line and not line.startswith(("#", "name:", "config:"))
    )


class UnknownModel(Error):
    """The library has no model of that architecture."""


def models_of(config: Path) -> list[Model]:
    """The models of the library for the architecture of a config.json, with its numbers. At least one, or Error."""
    stated = read_config(config)
    kinds, says, library = _architectures(config, stated), _tied(config, stated), list(_library())
    known: dict[str, None] = {}
    found = []
    # Of a multimodal model that is unknown: its language model.
    for every in (kinds, inner := _architectures(config, text_of(stated))):
        for name, path, own in library:
            names = _architectures(path, own)
            known |= dict.fromkeys(names[:1])
            if set(every) & set(names):
                found.append((name, path, bool(_tied(path, own)), names))
        if found:
            break
    language, kinds = bool(found) and every is inner, [*kinds, *inner]
    # By the architecture; by model_type where the config names no architecture that is known.
    found = [each for each in found if set(kinds) & set(each[3][:1])] or found
    if not found:
        raise UnknownModel(
            f"'{config}': the library has no model for "
            f"{' or '.join(map(repr, kinds)) or 'a config without architectures and model_type'}; "
            f"known: {', '.join(known)}; --model=FILE names a model file"
        )
    tied = all(each[2] for each in found) if says is None else says  # Gemma's config says nothing
    # A file that ties the head fits no model whose head is not tied; one that does not is given the tie.
    alike = [each for each in found if each[2] == tied] or [each for each in found if tied]
    if not alike:
        raise Error(
            f"'{config}': 'tie_word_embeddings' is false or missing, but the library's models for {kinds[0]!r} are "
            f"tied: {', '.join(name for name, *_ in found)}"
        )
    # Files that differ in the release alone are one model.
    different = {
        _declarations(path): Model(name, path, config, tied, tied and not own, text=names[0] if language else None)
        for name, path, own, names in reversed(alike)
    }
    return list(reversed(different.values()))


def model_named(name: str, config: Path | None) -> Model:
    """The model of the library with this name, or of this file. config: its numbers; None:
    those that the file names."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = MODELS / f"{name}.yaml"
        if not path.exists() or "/" in name:
            raise Error(
                f"--model={name}: expected the path of a YAML file, "
                f"or one of {', '.join(each for each, *_ in _library())}"
            )
    elif not path.exists():
        raise Error(f"--model={name}: no such file")
    own = path.with_name(f"{path.stem}.config.json")
    stated = read_config(config or own) if config or own.exists() else {}
    tied, declared = _tied(config or own, stated), own.exists() and bool(_tied(own, read_config(own)))
    tied = declared if tied is None else tied
    if declared and not tied:
        raise Error(f"'{config}': 'tie_word_embeddings' is false or missing, but model '{name}' is tied")
    names = _architectures(own, read_config(own)) if own.exists() else []
    language = set(names) & set(_architectures(config or own, text_of(stated))) and not set(names) & set(
        _architectures(config or own, stated)
    )
    tie, text = tied and own.exists() and not declared, names[0] if language else None
    return Model(path.stem, path.resolve(), config, tied, tie, text)


@dataclass(frozen=True)
class Source:
    """A checkpoint, recognized."""

    model: Model
    layout: str
    switches: Mapping[str, int]
    held: Shapes  #: the tensors that are converted, without the optimizer's state
    lacks: tuple[str, ...] = ()  #: names of the layout that the files lack, because they are tied to others
    format: str = ""  #: in which matrices are quantized
    #: of the source of a job, where the layout does not state it
    quantize: Mapping[str, Any] = field(default_factory=dict)
    plain: Shapes | None = None  #: the tensors that are not quantized; None: all

    def endpoint(self) -> dict[str, Any]:
        """The source of a job, without its storage."""
        found: dict[str, Any] = {"layout": "source", "dtype": "stored"} | (
            {"quantize": dict(self.quantize)} if self.quantize else {}
        )
        return (
            found
            | ({"switches": dict(self.switches)} if self.switches else {})
            | ({"ignore": list(self.lacks)} if self.lacks else {})
        )


@dataclass(frozen=True)
class Misfit:
    """Why a checkpoint is in another layout."""

    count: int  #: the tensors that fit; -1: the model has no such layout
    reason: str
    model: Model
    layout: str
    switches: Mapping[str, int]
    expected: Shapes = field(default_factory=dict)

    def rules(self, tensors: Shapes) -> list[str]:
        """Rules of --rename with which the checkpoint is in the layout. Empty if there are none."""
        if not (rules := rules_for(tensors, self.expected)):
            return []
        renamed = Renames(rules).apply(tensors, "")
        return rules if isinstance(_fit(self.model, self.layout, self.switches, renamed), Source) else []


def _fit(model: Model, layout: str, switches: Mapping[str, int], tensors: Shapes) -> Source | Misfit:
    """The checkpoint in this layout, or why it is another one."""

    def misfit(count: int, reason: str) -> Misfit:
        return Misfit(count, reason, model, layout, switches, expected)

    if layout.startswith("megatron-checkpoint") and (embedding := tensors.get(_EMBEDDING)):
        switches = {"padded": embedding[0]}  # the padded vocabulary is a multiple of itself
    rule: dict[str, Any] = {}
    quantization = _QUANTIZED.get(layout, ("", layout))[0]
    plain: Shapes | None = None
    expected: Shapes = {}
    try:
        expected = model.holds(layout, switches)
        if quantization:
            plain = {
                name: shape for name, shape in model.holds(_QUANTIZED[layout][1], switches).items() if name in expected
            }
        elif any(name + _SCALE in tensors for name in expected):
            quantization = "block_fp8"
            rule = _block_fp8(expected, tensors)
            plain = {name: shape for name, shape in expected.items() if name + _SCALE not in tensors}
            expected = model.holds(layout, switches, quantize=rule)
    except CompileError as error:
        return misfit(len(expected) if expected else -1, brief(error))
    missing = [name for name in expected if name not in tensors]
    wrong = [name for name in expected if name in tensors and tuple(tensors[name]) != expected[name]]
    if wrong:
        name = wrong[0]
        return misfit(
            len(expected) - len(missing) - len(wrong),
            f"{name!r} is {list(tensors[name])}, expected {list(expected[name])}"
            + (f", and {len(wrong) - 1} more" if wrong[1:] else ""),
        )
    held = {name: shape for name, shape in expected.items() if name in tensors}
    if missing:
        try:
            if len(missing) > _TIED:
                raise CompileError("")
            # an error unless other params have their elements
            model.holds(layout, switches, ignore=missing, **({"quantize": rule} if rule else {}))
        except CompileError:
            return misfit(len(held), f"{len(missing)} of {len(expected)} names are missing: {shown(missing[:2])}")
    return Source(model, layout, switches, held, tuple(missing), quantization, rule, plain)


def _block_fp8(expected: Shapes, tensors: Shapes) -> dict[str, Any]:
    """The rule that matrices with scales are quantized in block FP8, as DeepSeek-V3 is. Raises CompileError if only
    some layers have scales."""
    # of matrices without scales: a name of each; params of all layers and experts match one glob
    globs: dict[str, str] = {}
    for name, shape in expected.items():
        if len(shape) > 1 and name + _SCALE not in tensors:
            globs.setdefault(_NUMBERS.sub("*", name), name)
    for name in expected:
        if name + _SCALE in tensors and (kept := globs.get(_NUMBERS.sub("*", name))):
            raise CompileError(f"{name!r} has scales, but {kept!r} has none")
    return {"format": "block_fp8"} | ({"ignore": list(globs)} if globs else {})


def meaning(text: str) -> frozenset[str]:
    """What the compiler's text of layouts (--emit=layout) says about params that hold elements, without numbers of
    declarations and places in files. Layouts of equal meaning are converted in the same way."""
    found, role = set(), ""
    shardings: dict[str, str] = {}
    for part in re.split(r"^(?=endpoint |  param )", text, flags=re.MULTILINE)[1:]:
        if part.startswith("endpoint "):
            role = part.split()[1]
            shardings.clear()
            shardings.update(re.findall(r"^  sharding (#\d+) (.*)$", part, re.MULTILINE))
            continue
        param = re.sub(r' from "[^"]*"$| \$\d+|%\d+', "", part, flags=re.MULTILINE)
        shape = re.search(r'" \w+ \[([\d, ]*)\]', param)
        param = re.sub(r"#\d+", lambda number: shardings.get(number[0], number[0]), param)
        if "| none" not in param and not (shape and "0" in shape[1].split(", ")):
            found.add(f"{role} {param.strip()}")
    return frozenset(found)


def recognize(models: Sequence[Model], layout: str | None, tensors: Shapes, convert: Callable[[Source], str]) -> Source:
    """The model and the layout of a checkpoint: those that hold most of its tensors. Raises Error if none fits, or
    several that are converted differently.

    layout: the only one to look for, or None. tensors: the names and shapes of the checkpoint.
    convert: returns the compiler's text of the layouts of a conversion. Raises CompileError if there is none.
    """
    tried = [each for each in _SOURCES if layout in (None, each[0])] or [(str(layout), {})]
    reasons: dict[str, Misfit] = {}
    refused: dict[str, str] = {}  # of what is recognized, by reason
    # What transformers and Megatron-Core save may have no multi-token prediction, whatever the config says.
    for let in ({}, {"mtp": 0}):
        found: list[Source] = []
        candidates = [(replace(model, let=let), name, switches) for model in models for name, switches in tried]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process of the compiler
            results = list(pool.map(lambda each: _fit(each[0], each[1], each[2], tensors), candidates))
        for (_, name, _), result in zip(candidates, results):
            if isinstance(result, Source):
                found.append(result)
            elif name not in reasons or result.count > reasons[name].count:
                reasons[name] = result
        different: dict[frozenset[str], Source] = {}
        for source in found:
            if len(source.held) == max(len(each.held) for each in found):
                try:
                    different.setdefault(meaning(convert(source)), source)
                except CompileError as error:
                    refused.setdefault(
                        brief(error),
                        f"the tensors are those of model {source.model.name} in "
                        f"layout {source.layout}, but the job is not valid: {brief(error)}",
                    )
        if len(different) > 1:
            raise Error(
                "the tensors fit several models or layouts, which differ: "
                + ", ".join(f"{each.model.name} in layout {each.layout}" for each in different.values())
                + "; --model=NAME or --source-layout=NAME chooses one"
            )
        if different:
            return next(iter(different.values()))
    if refused:
        raise Error("\n  ".join(refused.values()))
    raise Error(_no_layout(models, reasons, tensors))


def _no_layout(models: Sequence[Model], reasons: Mapping[str, Misfit], tensors: Shapes) -> str:
    """The error that no layout fits: what each lacks, what the files have, and the option that mends it."""
    # Layouts that the model does not have are listed only if there is no other.
    closest = [each for each in reasons.values() if each.count >= 0] or list(reasons.values())
    closest.sort(key=lambda each: -each.count)
    lines = [
        f"the tensors are not those of model {', '.join(model.name for model in models)} in a known layout:",
        *(f"{each.layout}: {each.reason}" for each in closest),
    ]
    expected = set().union(*(each.expected for each in closest))
    if other := [name for name in tensors if name not in expected] if expected else []:
        beginning = common_beginning(tensors)
        lines.append(
            f"the files have {len(tensors)} "
            f"tensors{f', whose names all begin with {beginning!r}' if beginning else ''}; {len(other)} of them are in "
            f"none of these layouts: {patterns(other)}"
        )
        if mended := [(rules, each.layout) for each in closest if (rules := each.rules(tensors))]:
            rules, layout = min(mended, key=lambda each: len(each[0]))  # of several, the first
            lines.append(
                f"{' '.join(map(as_option, rules))} makes "
                f"{'them' if len(other) == len(tensors) else 'the names'} those of layout {layout}"
            )
    return "\n  ".join(lines)


def as_option(rule: str) -> str:
    """A rule of --rename as a shell reads it."""
    return shlex.quote(f"--rename={rule}")


def declared(state: str, dtype: str, tied: bool = False) -> Any:
    """The declaration of a state in a model. tied: it has the elements of the weight."""
    return {"dtype": dtype, "shape": []} if state == "step" else {"dtype": dtype, "tied": True} if tied else dtype


def state_names(model: Model, layout: str, switches: Mapping[str, int]) -> dict[str, set[str]]:
    """The names that a layout has for the states of an optimizer, by state: none if it has no names."""
    weights = set(model.holds(layout, switches))
    states = [state for state in _STATES if state != MASTER or layout not in NO_MASTER]
    return {
        state: set(replace(model, optimizer={state: declared(state, "fp32")}).holds(layout, switches)) - weights
        for state in states
    }


def states_of(source: Source, tensors: Shapes) -> dict[str, set[str]]:
    """The names of the states of the optimizer that a checkpoint has, by state. Raises Error if one is not complete."""
    found = {}
    for state, names in state_names(source.model, source.layout, source.switches).items():
        missing = sorted(name for name in names if name not in tensors)
        if len(missing) == len(names):
            continue
        if missing:
            raise Error(
                f"the optimizer's state {state!r} is not complete, {len(missing)} of {len(names)} tensors are "
                f"missing: {shown(missing)}"
            )
        found[state] = names
    return found


def repeats(names: Iterable[str], held: Iterable[str]) -> list[str]:
    """The names that differ from held ones in numbers only: further layers or experts than a model has."""
    known = {_NUMBERS.sub("#", name) for name in held}
    return sorted(name for name in names if _NUMBERS.sub("#", name) in known)


def elements(shapes: Iterable[Sequence[int]]) -> int:
    """The number of elements of tensors."""
    return sum(map(math.prod, shapes))
