# SPDX-License-Identifier: Apache-2.0
"""Makes one model of the layouts of several sizes of an architecture: numbers that differ become expressions of the
keys of config.json. The result is compiled with each config and compared with each layout."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from itertools import product as combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reshard.errors import CompileError, Error
from reshard.flow import Name, Word, flow, read, write

from .compiled import as_recordings, compare, compile_layout
from .expressions import Config, Keys, Values, config_of
from .infer import Layout
from .patterns import ranges
from .recording import Recording

_ABSENT = Word("absent")  #: a key that the layout of a size does not have
_UNKNOWN = Word("unknown")  #: inside one of several ways to state a value: of the sizes that state it in another way
#: Keys whose numbers are no sizes.
_NO_SIZES = ("permute", "dim", "at", "map")
_VARIANTS = 64  # combinations of choices that are tried for one param


@dataclass
class General:
    """A model for several sizes of one architecture."""

    yaml: str  #: without the key `config`, which a model that extends it states
    name: str  #: of the layout
    kept: dict[str, str] = field(default_factory=dict)  #: {place: why it has the value of the first size}
    #: {expression: others with the same values at all sizes}
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)  #: between the compiled model and the layouts
    refused: list[str] = field(default_factory=list)  #: params that a layout cannot state, with the size and the reason

    @property
    def exact(self) -> bool:
        """Whether the model gives exactly the recorded elements of each size."""
        return not self.kept and not self.differences and not self.refused


@dataclass
class _Choice:
    """Ways to state a value, of which the compiler shows the right one."""

    options: list[Any]


def _kind(value: Any) -> Any:
    """Values of one kind are joined piece by piece."""
    if isinstance(value, list):
        return "list", len(value)
    if isinstance(value, Name):
        return "name", re.sub(r"\d+", "#", value)
    return type(value) if isinstance(value, (int, dict)) else str(value)


def _values(text: Any) -> set[int]:
    """The values of a range, or of a list of ranges."""
    found: set[int] = set()
    for each in text if isinstance(text, list) else [text]:
        first, _, last = str(each).partition("..")
        found.update(range(int(first), int(last or first) + 1))
    return found


class _Join:
    """Joins the models of all sizes."""

    def __init__(self, models: Sequence[Mapping[str, Any]], keys: Keys):
        self.models, self.keys = models, keys
        self.kept: dict[str, str] = {}
        self.ambiguous: dict[str, list[str]] = {}

    def value(self, values: Sequence[Any], place: str, size: bool = True) -> Any:
        """The value that stands for those of all sizes. size: whether its numbers may be sizes."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, each in enumerate(values):
            if each is not _UNKNOWN:
                groups[_kind(each) if size else flow(each)].append(index)
        options = [
            self._same_kind([each if index in group else _UNKNOWN for index, each in enumerate(values)], place, size)
            for group in groups.values()
        ]
        if len(options) == 1:
            return options[0]
        return _Choice(sorted(options, key=lambda each: 2 if each is _ABSENT else 0 if isinstance(each, dict) else 1))

    def _same_kind(self, values: Sequence[Any], place: str, size: bool) -> Any:
        """Joins values of one kind."""
        first = next(each for each in values if each is not _UNKNOWN)
        if not size or isinstance(first, Word):
            return first
        if isinstance(first, dict):
            result: dict[Any, Any] = {}
            for key in dict.fromkeys(key for each in values if each is not _UNKNOWN for key in each):
                pieces = [each if each is _UNKNOWN else each.get(key, _ABSENT) for each in values]
                joined = (
                    self.where(pieces, f"{place}, where")
                    if key == "where"
                    else self.value(pieces, f"{place}, {key}", key not in _NO_SIZES)
                )
                if joined is not _ABSENT:
                    result[key] = joined
            return result
        if isinstance(first, list):
            return [
                self.value([each if each is _UNKNOWN else each[i] for each in values], f"{place}, {i}")
                for i in range(len(first))
            ]
        if isinstance(first, Name):
            return self.name(values, place)
        return self.number(
            tuple(None if each is _UNKNOWN else each for each in values), place, place.rpartition(", ")[2]
        )

    def number(self, values: Values, place: str, like: str = "") -> Any:
        """A number that is the same at all sizes, or an expression. Where not all sizes have it, a key is preferred,
        except for padding, whose multiples are an engine's own numbers. like: a word of the key that is preferred to
        other keys with these values."""
        known = sorted({each for each in values if each is not None})
        found = self.keys.fits(values)
        if len(known) == 1 and (None not in values or "pad" in place.split(", ")):
            self._taken(str(known[0]), [each for each in found if each in self.keys.integers and known[0] > 1])
            return known[0]
        if not found:
            if len(known) > 1:
                self.kept[place] = f"no expression of the configs has the values {', '.join(map(str, values))}"
            return next(each for each in values if each is not None)
        found.sort(key=lambda each: not (like and each in self.keys.integers and like in each))
        others = [*found[1:], *(map(str, known) if None in values else ())]
        self._taken(found[0], others)
        return Word(self.keys.use(found[0]))

    def _taken(self, expression: str, others: Sequence[str]) -> None:
        """Notes the other expressions that have the values of the one that is taken."""
        noted = self.ambiguous.setdefault(expression, []) if others else []
        noted += [each for each in others if each not in noted]

    def name(self, values: Sequence[Any], place: str) -> Name:
        """A name whose numbers that differ are keys."""
        texts = [re.split(r"(\d+)", each) for each in values if each is not _UNKNOWN]
        result = list(texts[0])
        for position in range(1, len(result), 2):
            numbers = tuple(int(text[position]) for text in texts)
            found = (
                [each for each in self.keys.fits(numbers) if each in self.keys.integers]
                if len(texts) == len(values)
                else []
            )
            if len(set(numbers)) > 1 and found:
                result[position] = "{%s}" % self.keys.use(found[0])
            elif len(set(numbers)) > 1:
                self.kept[place] = f"no key of the configs has the values {', '.join(map(str, numbers))}"
        return Name("".join(result))

    def paired(self, maps: Sequence[Mapping[Name, Any]], place: str) -> Iterator[tuple[Name, list[Any]]]:
        """(name, values) of the entries of all sizes. Names that differ in numbers alone are one, if
        no other is like them."""
        by_kind: list[dict[Any, list[Name]]] = [defaultdict(list) for _ in maps]
        everywhere = set.intersection(*(set(each) for each in maps))
        for kinds, each in zip(by_kind, maps):
            for name in each:
                if name not in everywhere:
                    kinds[_kind(name)].append(name)
        done = set()
        for name in dict.fromkeys(name for each in maps for name in each):
            kind = _kind(name)
            if name in everywhere:
                yield name, [each[name] for each in maps]
            elif all(len(kinds[kind]) == 1 for kinds in by_kind):
                if kind not in done:
                    done.add(kind)
                    names = [kinds[kind][0] for kinds in by_kind]
                    yield self.name(names, f"{place} {name}"), [each[one] for each, one in zip(maps, names)]
            else:
                yield name, [each.get(name, _ABSENT) for each in maps]

    def where(self, values: Sequence[Any], place: str) -> Any:
        """The values of index variables: a range, or the positions of kinds in a list of the config."""
        result: dict[str, Any] = {}
        for variable in dict.fromkeys(name for each in values if isinstance(each, dict) for name in each):
            sizes = [model.get("index", {}).get(variable, 0) for model in self.models]
            sets = [
                None
                if each is _UNKNOWN
                else set(range(n))
                if each is _ABSENT or variable not in each
                else _values(each[variable])
                for each, n in zip(values, sizes)
            ]
            if any(each is not None and each != set(range(n)) for each, n in zip(sets, sizes)):
                result[variable] = (
                    self._range(sets, place, simple=True)
                    or self._pattern(sets, sizes)
                    or self._range(sets, place)
                    or self._first(sets, place)
                )
        return result or _ABSENT

    def _range(self, sets: Sequence[set[int] | None], place: str, simple: bool = False) -> Word | None:
        """The range of contiguous values. simple: between numbers and single keys alone."""
        if any(
            each is not None and each != set(range(min(each, default=0), max(each, default=-1) + 1)) for each in sets
        ):
            return None
        begins: Values = tuple(None if each is None else min(each, default=0) for each in sets)
        ends: Values = tuple(None if each is None else max(each, default=-1) + 1 for each in sets)
        texts = []
        for values in (begins, ends):
            found = self.keys.fits(values)
            if len(set(values)) > 1 and not any(each in self.keys.integers or not simple for each in found):
                return None
            texts.append(self.number(values, place))
        end = texts[1] - 1 if isinstance(texts[1], int) else f"{texts[1]} - 1"
        return Word(f"{texts[0]}..{end}")

    def _pattern(self, sets: Sequence[set[int] | None], sizes: Sequence[int]) -> dict[str, Any] | None:
        for key, patterns in self.keys.patterns.items():
            if [len(each) for each in patterns] != list(sizes):
                continue
            kinds = sorted({pattern[position] for pattern, each in zip(patterns, sets) for position in each or ()})
            if all(
                each is None or each == {i for i, kind in enumerate(pattern) if kind in kinds}
                for pattern, each in zip(patterns, sets)
            ):
                return {"pattern": Word(f"${key}"), "is": [Name(each) for each in kinds]}
        return None

    def _first(self, sets: Sequence[set[int] | None], place: str) -> Word:
        known = [each for each in sets if each is not None]
        self.kept[place] = f"no range and no list of the configs has the values {' and '.join(map(ranges, known))}"
        return Word(ranges(known[0]))

    def tensors(self) -> dict[Name, Any]:
        """The tensors of all sizes. One that some sizes lack depends on a boolean of the config."""
        result = {}
        for name, values in self.paired([model["tensors"] for model in self.models], "tensor"):
            place = f"tensor {name}"
            stated = [{"shape": each} if isinstance(each, list) else each for each in values]
            keys = self._same_kind([_UNKNOWN if each is _ABSENT else each for each in stated], place, True)
            exists = tuple(each is not _ABSENT for each in values)
            if not all(exists):
                when = next(
                    (
                        prefix + key
                        for key, each in self.keys.conditions.items()
                        for prefix, wanted in (("", True), ("not ", False))
                        if tuple(one == wanted for one in each) == exists
                    ),
                    None,
                )
                if when is None:
                    self.kept[place] = (
                        f"it exists at sizes {', '.join(str(i) for i, each in enumerate(exists) if each)} alone, "
                        "and no boolean of the configs says so"
                    )
                else:
                    keys["when"] = Word(self.keys.use(when))
            result[name] = keys["shape"] if len(keys) == 1 else keys
        return result


def _choices(value: Any) -> Iterator[_Choice]:
    """All choices in a value, outer ones first."""
    if isinstance(value, _Choice):
        yield value
        value = value.options
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _choices(each)


def _chosen(value: Any, of: Mapping[int, Any]) -> Any:
    """A value with the option of each choice, by the choice's id."""
    if isinstance(value, _Choice):
        return _chosen(of[id(value)], of)
    if isinstance(value, dict):
        return {key: found for key, each in value.items() if (found := _chosen(each, of)) is not _ABSENT}
    return [_chosen(each, of) for each in value] if isinstance(value, list) else value


def _variants(value: Any) -> Iterator[Any]:
    """The values of all choices, the first options first."""
    choices = list(_choices(value))
    for options in islice(combinations(*(each.options for each in choices)), _VARIANTS):
        yield _chosen(value, {id(choice): option for choice, option in zip(choices, options)})


class _Check:
    """Compiles a model with the config of each size and compares it with the layout of that size."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        models: Sequence[Mapping[str, Any]],
        configs: Sequence[Mapping[str, Any]],
        folder: Path,
    ):
        self.layouts, self.models = layouts, models
        self.paths = [folder / f"config-{i}.json" for i in range(len(configs))]
        for path, config in zip(self.paths, configs):
            path.write_text(json.dumps(config))

    def _wanted(self, index: int, params: Iterable[Name] | None) -> list[Recording]:
        """The recordings that show the layout of a size: all of it, or some params."""
        layout, model = self.layouts[index], self.models[index]
        text, stated = layout.yaml, model["layouts"][layout.name]["params"]
        if params is not None:
            text = write(_with_params(model, layout.name, {name: stated[name] for name in params}))
        return as_recordings(compile_layout(text, layout.name, flow(layout.mesh)), layout.mesh)

    def differences(self, model: Mapping[str, Any], params: Sequence[Iterable[Name]] | None = None) -> Iterator[str]:
        """Between the model and the layouts. params: those to compare, of each size."""
        for index, layout in enumerate(self.layouts):
            wanted = self._wanted(index, params[index] if params else None)
            text = write({"config": Name(self.paths[index])} | dict(model))
            try:
                compiled = compile_layout(text, layout.name, flow(layout.mesh))
            except CompileError as error:
                yield f"size {index}: {error}"
                continue
            tensors = compiled.tensors
            for name in sorted({*tensors, *wanted[0].tensors}):
                one, other = wanted[0].tensors.get(name), tensors.get(name)
                if one != other:
                    yield (
                        f"size {index}: tensor {name}: the checkpoint has {one or 'no such tensor'}, "
                        f"the model {other or 'no such tensor'}"
                    )
            yield from (f"size {index}: {line}" for line in compare(compiled, wanted))


def _with_params(model: Mapping[str, Any], name: str, params: Mapping[Name, Any]) -> dict[str, Any]:
    layouts = model["layouts"]
    return {**model, "layouts": {**layouts, name: {**layouts[name], "params": params}}}


def generalize(sizes: Sequence[tuple[Layout, Config]]) -> General:
    """Returns one model for the layouts of several sizes of an architecture.

    sizes: for each size its layout, as `merge` returns it, and its config.json: a map, a file, or its folder. The
        layouts have the same name, axes and index variables. Their meshes may have different sizes.

    Numbers that differ between the sizes become the simplest expressions of the configs' keys that have their values.
    Where some sizes state a param in another way (a padded dimension of which the padding is empty at one size), the
    way that the compiler confirms for all is taken. Numbers that are the same everywhere stay numbers. Numbers for
    which no expression fits stay those of the first size, and are in `kept`.

    Raises Error for fewer than two sizes, for layouts of different names or axes, and for layouts that differ from
    their recordings.
    """
    layouts, configs = [layout for layout, _ in sizes], [config_of(config) for _, config in sizes]
    if len(layouts) < 2:
        raise Error(f"{len(layouts)} layouts, expected those of two sizes or more")
    name = layouts[0].name
    models = [read(layout.yaml, f"layout {index}") for index, layout in enumerate(layouts)]
    for index, (layout, model) in enumerate(zip(layouts, models)):
        if layout.differences:
            raise Error(f"layout {index} differs from its recording: {layout.differences[0]}")
        for what, one, other in (
            ("name", layout.name, name),
            ("dtype", model["dtype"], models[0]["dtype"]),
            ("axes", flow(model["layouts"][layout.name]["axes"]), flow(models[0]["layouts"][name]["axes"])),
        ):
            if one != other:
                raise Error(f"layouts 0 and {index} have {what} {other} and {one}, expected the same")
    taken = [
        *(variable for model in models for variable in model.get("index", {})),
        *map(str, models[0]["layouts"][name]["axes"]),
    ]
    keys = Keys(configs, taken)
    join = _Join(models, keys)
    index = join.value([model.get("index", {}) for model in models], "index")
    tensors, each = join.tensors(), [model["layouts"][name] for model in models]
    place = join.value([one.get("place", {}) for one in each], "place")
    params = dict(join.paired([one["params"] for one in each], "param"))
    joined = {
        param: join.value([_UNKNOWN if value is _ABSENT else value for value in values], f"param {param}")
        for param, values in params.items()
    }
    let = keys.let()
    model = {"dtype": models[0]["dtype"]} | ({"let": let} if let else {}) | {"index": index, "tensors": tensors}
    with TemporaryDirectory(prefix="reshard-") as folder:
        check = _Check(layouts, models, configs, Path(folder))
        best: tuple[list[str], dict[str, Any]] | None = None
        for base, placed in combinations(_variants(model), _variants(place)):
            own = {"axes": each[0]["axes"]} | ({"place": placed} if placed else {}) | {"params": {}}
            whole = {**base, "layouts": {"hf": {"params": Word("same")}, name: own}}
            stated = [one["params"] for one in each]
            right = {param: _right(check, whole, name, param, value, stated) for param, value in joined.items()}
            whole = _with_params(whole, name, right)
            differences = list(check.differences(whole))
            if best is None or len(differences) < len(best[0]):
                best = differences, whole
            if not differences:
                break
    assert best
    refused = [f"size {i}: {param}: {why}" for i, layout in enumerate(layouts) for param, why in layout.refused.items()]
    return General(write(best[1]), name, join.kept, join.ambiguous, best[0], refused)


def _right(
    check: _Check, whole: Mapping[str, Any], name: str, param: Name, joined: Any, params: Sequence[Mapping[Name, Any]]
) -> Any:
    """The variant of a param that gives the layout of each size; the first one if none does."""
    variants = list(_variants(joined))
    if len(variants) == 1:
        return variants[0]
    alone = [[one for one in each if one == param] for each in params]
    return next(
        (each for each in variants if not any(check.differences(_with_params(whole, name, {param: each}), alone))),
        variants[0],
    )
