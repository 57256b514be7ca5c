# SPDX-License-Identifier: Apache-2.0
"""Infers a layout of the YAML grammar from the recordings of all mesh ranks, compiles it, and compares the result with
the recordings."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import Error
from reshard.flow import Name, Word, flow, write

from .compiled import compare, compile_layout
from .elements import Constant, Runs, Tensor, joined
from .patterns import Member, Patterns, ranges
from .pieces import pieces
from .recording import Axes, RecordedParam, Recording, in_order
from .schemes import find_rule
from .structure import Refused, Structure, shown, structure

#: The operations of transform neg_exp (docs/yaml.md).
_NEG_EXP = "aten.neg of aten.exp"


@dataclass
class Layout:
    """A layout that was inferred from recordings. Of the recorded params, those in `left` and
    `refused` are not in it."""

    yaml: str  #: a model file: tensors, index variables, and the layouts `hf` and `name`
    name: str
    mesh: dict[str, Any]
    #: params in which the loader puts nothing of the checkpoint: {name: mesh ranks}
    left: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  #: params that it cannot state: {name: reason}
    #: params that it states by `pieces`, since no scheme fits: {name: reason}
    explicit: dict[str, str] = field(default_factory=dict)
    #: between the compiled layout and the recordings; empty if it is right
    differences: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the compiled layout gives exactly the recorded elements, for every param that holds some."""
        return not self.refused and not self.differences


@dataclass
class _Instance:
    """One param of one mesh rank."""

    rank: int
    name: str
    param: RecordedParam
    values: dict[str, set[int]]  #: of each index variable of its tensors


@dataclass
class _Declared:
    """A param of the layout."""

    name: str
    keys: dict[str, str]


@dataclass
class _Stack:
    """A param that stacks a variable."""

    declared: _Declared
    placeholders: Mapping[str, str]
    group: Sequence[_Instance]
    found: Structure


class _Inference:
    def __init__(self, recordings: Sequence[Recording], alone: frozenset[str] = frozenset()):
        """alone: tensors that keep their own names, as those of params that differ between the values of a variable."""
        self.recordings = recordings
        self.axes = Axes.of(recordings[0].mesh)
        used = {name for recording in recordings for param in recording.params.values() for name in param.tensors}
        self.patterns = Patterns(recordings[0].tensors, used, alone)
        self.left: dict[str, list[int]] = defaultdict(list)
        self.refused: dict[str, str] = {}
        self.explicit: dict[str, str] = {}
        # tensors of params that differ between the values of a variable in their names
        self.differing: set[str] = set()
        self.declared: list[_Declared] = []
        # {mesh rank: {variable: values}}
        self.held: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.stacks: dict[str, list[_Stack]] = defaultdict(list)
        self.place: dict[str, str] = {}

    # --- instances

    def instances(self) -> list[_Instance]:
        """All params that the grammar may state."""
        found: dict[str, list[_Instance]] = defaultdict(list)
        padding: list[tuple[int, str, RecordedParam]] = []
        for recording in self.recordings:
            for name, param in recording.params.items():
                members = [
                    self.patterns.members[box.origin.name] for box in param.boxes if isinstance(box.origin, Tensor)
                ]
                sources = [*members, *(self.patterns.members[each] for one in param.computed for each in one.tensors)]
                for member in sources:
                    for variable, value in zip(member.pattern.variables, member.values):
                        self.held[recording.rank][variable].add(value)
                if param.computed:
                    self.refused[name] = f"rank {recording.rank}: computed by " + "; ".join(
                        f"{each.op} of {', '.join(each.tensors) or 'no tensor'}" for each in param.computed
                    )
                    self.refused[name] += self._by_hand(name, param)
                elif not members and param.unwritten == 0 and all(box.origin == Constant(0.0) for box in param.boxes):
                    padding.append((recording.rank, name, param))
                elif not members:
                    self.left[name].append(recording.rank)
                else:
                    values: dict[str, set[int]] = defaultdict(set)
                    for member in members:
                        for variable, value in zip(member.pattern.variables, member.values):
                            values[variable].add(value)
                    found[name].append(_Instance(recording.rank, name, param, dict(values)))
        for rank, name, param in padding:  # of a tensor whose elements are all on other ranks
            others = found.get(name, [])
            if not others:
                self.left[name].append(rank)
            elif any(each.values != others[0].values for each in others):
                self.refused[name] = f"rank {rank}: zeros, where other ranks have elements of different tensors"
            else:
                found[name].append(_Instance(rank, name, param, others[0].values))
        return [each for name, instances in found.items() if name not in self.refused for each in instances]

    def _by_hand(self, name: str, param: RecordedParam) -> str:
        """How to state a computed param by a transform that every process knows, or ""."""
        computed, *others = param.computed
        if others or computed.op != _NEG_EXP or len(computed.tensors) != 1 or param.dtype != "fp32":
            return ""
        member, parts = self.patterns.members[computed.tensors[0]], re.split(r"(\d+)", name)
        for variable, value in zip(member.pattern.variables, member.values):
            places = [i for i in range(1, len(parts), 2) if parts[i] == str(value)]
            if len(places) != 1:
                return ""
            parts[places[0]] = "{%s}" % variable
        shape, shard = tuple(member.pattern.shape), ""
        if param.shape != shape:
            rows = param.shape[0] if param.shape and shape else 0
            axis = next((axis for axis, (size, _) in self.axes.axes.items() if rows and rows * size == shape[0]), "")
            if not axis or param.shape[1:] != shape[1:]:
                return ""
            shard = f", shard: {{0: {axis}}}"
        holds = f"{{holds: {flow(Name(member.pattern.name))}{shard}, transform: neg_exp}}"
        return f"; add it to the layout by hand: {flow(Name(''.join(parts)))}: {holds}"

    def groups(self, instances: Iterable[_Instance]) -> list[tuple[str, dict[str, str], list[_Instance]]]:
        """(declared name, {variable: placeholder}, instances) of each param of the layout."""
        by_skeleton: dict[str, list[_Instance]] = defaultdict(list)
        for each in instances:
            by_skeleton[re.sub(r"\d+", "#", each.name)].append(each)
        return [group for found in by_skeleton.values() for group in self._named(found, frozenset())]

    def _named(
        self, group: Sequence[_Instance], literal: frozenset[int]
    ) -> list[tuple[str, dict[str, str], list[_Instance]]]:
        """Finds the variable of each number in the names of a group. Numbers at `literal` positions stay, and numbers
        inside a word that are the same in all names: `w13_weight`."""
        texts = [re.split(r"(\d+)", each.name) for each in group]  # the numbers are at odd positions
        single = [
            variable for variable in group[0].values if all(len(each.values.get(variable, ())) == 1 for each in group)
        ]
        placeholders: dict[str, str] = {}
        result = list(texts[0])
        for position in range(1, len(result), 2):
            numbers = {text[position] for text in texts}
            alone = result[position - 1][-1:] in ("", ".") and result[position + 1][:1] in ("", ".")
            if position in literal or (len(numbers) == 1 and not alone):
                continue
            found = next(
                (
                    (variable, suffix)
                    for suffix in ("", ".local")
                    for variable in single
                    if variable not in placeholders
                    and all(
                        str(self._number(each, variable, suffix)) == text[position] for each, text in zip(group, texts)
                    )
                ),
                None,
            )
            if found is None:
                split: dict[str, list[_Instance]] = defaultdict(list)
                for each, text in zip(group, texts):
                    split[text[position]].append(each)
                return [one for part in split.values() for one in self._named(part, literal | {position})]
            placeholders[found[0]] = result[position] = "{%s%s}" % found
        return [("".join(result), placeholders, list(group))]

    def _number(self, instance: _Instance, variable: str, suffix: str) -> int:
        """The number that a placeholder prints for an instance."""
        value = next(iter(instance.values[variable]))
        return sorted(self.held[instance.rank][variable]).index(value) if suffix else value

    # --- params

    def run(self) -> None:
        """Finds all params and the placement of all variables."""
        for name, placeholders, group in self.groups(self.instances()):
            try:
                self.declared.append(self.param(name, placeholders, group))
            except Refused as why:
                self._by_pieces(_Declared(name, {}), placeholders, group, str(why))
        self.placement()

    def _by_pieces(
        self, declared: _Declared, placeholders: Mapping[str, str], group: Sequence[_Instance], why: str
    ) -> None:
        """States a param by its pieces, or refuses it. why: the reason why its grammar is not another one."""
        self.declared = [each for each in self.declared if each is not declared]
        try:
            others, chosen = self._instances_by_rank(placeholders, group)
            keys = pieces(chosen, self.patterns.members, self.patterns.sizes, others[0] if others else None)
            declared.keys = keys | self._where(placeholders, group) | self._presence(placeholders, group)
        except Refused as refused:
            self.refused.update({each.name: f"{why}; {refused}" if "pieces" in str(refused) else why for each in group})
            return
        self.declared.append(declared)
        self.explicit.update({each.name: why for each in group})

    def _instances_by_rank(
        self, placeholders: Mapping[str, str], group: Sequence[_Instance]
    ) -> tuple[list[str], dict[int, RecordedParam]]:
        """(variables that are not in the name, the param of one instance on each rank). Raises Refused where these do
        not stand for all instances."""
        others = sorted({variable for each in group for variable in each.values} - {*placeholders})
        dimensions = {
            len(self._pattern(box).shape)
            for each in group
            for box in each.param.boxes
            if isinstance(box.origin, Tensor)
        }
        if len(others) > 1 or len(dimensions) != 1:
            raise Refused(
                f"its tensors differ in {', '.join(others)}"
                if len(others) > 1
                else "its tensors have different numbers of dimensions"
            )
        if others and len(group[0].param.shape) != dimensions.pop() + 1:
            raise Refused(
                f"its tensors have index variable {others[0]}, which is neither in its name nor a dimension of its own"
            )
        chosen: dict[int, _Instance] = {}
        for each in group:
            first = chosen.setdefault(each.rank, each)
            if self._template(each, others) != self._template(first, others):
                self.differing.update(name for one in group for name in one.param.tensors)
                raise Refused(f"rank {each.rank}: its elements differ from those of {first.name}")
        return others, {rank: each.param for rank, each in chosen.items()}

    def param(self, name: str, placeholders: Mapping[str, str], group: Sequence[_Instance]) -> _Declared:
        """One param of the layout. Raises Refused."""
        others, chosen = self._instances_by_rank(placeholders, group)
        found = structure(self.axes, chosen, self.patterns.members, others[0] if others else None)
        declared = _Declared(
            name, dict(found.keys) | self._where(placeholders, group) | self._presence(placeholders, group)
        )
        for variable in others:
            self.stacks[variable].append(_Stack(declared, placeholders, group, found))
        return declared

    def _where(self, placeholders: Mapping[str, str], group: Sequence[_Instance]) -> dict[str, str]:
        """The key `where`, if the param exists for some values of a variable of its name only."""
        keys = {}
        for variable in placeholders:
            values = {value for each in group for value in each.values[variable]}
            patterns = {
                self._pattern(box) for each in group for box in each.param.boxes if isinstance(box.origin, Tensor)
            }
            if any(set(self.patterns.values(pattern, variable)) != values for pattern in patterns):
                keys["where"] = "{" + f"{variable}: {ranges(values)}" + "}"
        return keys

    def _pattern(self, box: Any) -> Any:
        return self.patterns.members[box.origin.name].pattern

    def _template(self, instance: _Instance, stacked: Sequence[str]) -> tuple[Any, ...]:
        """An instance without the values of the variables in its name."""

        def origin(box: Any) -> Any:
            if not isinstance(box.origin, Tensor):
                return box.origin
            member: Member = self.patterns.members[box.origin.name]
            return member.pattern, box.origin.casts, tuple(member.value(variable) for variable in stacked)

        boxes = tuple((box.start, box.size, origin(box), box.offset, box.steps) for box in instance.param.boxes)
        return instance.param.dtype, instance.param.shape, boxes

    def _presence(self, placeholders: Mapping[str, str], group: Sequence[_Instance]) -> dict[str, str]:
        """The key `at`, if not every mesh rank with the values of the name's variables has the param."""
        actual = {each.rank for each in group}
        values = {variable: {value for each in group for value in each.values[variable]} for variable in placeholders}
        expected = {
            recording.rank
            for recording in self.recordings
            if all(self.held[recording.rank][variable] & each for variable, each in values.items())
        }
        if actual == expected:
            return {}
        for axis, (size, _) in self.axes.axes.items():
            coordinates = {self.axes.coordinate((axis,), rank) for rank in actual}
            if {rank for rank in expected if self.axes.coordinate((axis,), rank) in coordinates} == actual:
                words = [
                    "first" if each == 0 else "last" if each == size - 1 else str(each) for each in sorted(coordinates)
                ]
                return {"at": "{" + f"{axis}: {words[0] if len(words) == 1 else '[' + ', '.join(words) + ']'}" + "}"}
        raise Refused(f"ranks {sorted(actual)} of {sorted(expected)} have it, which no axis distinguishes")

    # --- placement

    def placement(self) -> None:
        """The rule of each index variable that ranks have different values of."""
        for variable, n in self.patterns.sizes.items():
            everything = set().union(*(self.held[recording.rank][variable] for recording in self.recordings))
            found: dict[int, Runs] = {
                recording.rank: joined([(value, 1) for value in sorted(self.held[recording.rank][variable])])
                for recording in self.recordings
            }
            self._unordered_stacks(variable)
            if all(runs == joined([(value, 1) for value in sorted(everything)]) for runs in found.values()):
                continue
            rule = find_rule(self.axes, [(n, found)])
            if rule is not None:
                self.place[variable] = rule.yaml()
                continue
            why = f"no scheme gives the ranks these values of {variable}, of {n}: {shown(found)}"
            if any("{%s" % variable in each.name for each in self.declared):
                raise Error(why)
            for each in self.stacks.pop(variable, []):
                self._by_pieces(each.declared, each.placeholders, each.group, why)

    def _unordered_stacks(self, variable: str) -> None:
        """States the stacks of a variable by pieces whose values are not in ascending order on every rank."""
        kept = []
        for each in self.stacks[variable]:
            slots = next(
                ((rank, held.slots) for rank, held in each.found.held.items() if held.slots != sorted(held.slots)), None
            )
            if slots is None:
                kept.append(each)
            else:
                why = f"rank {slots[0]} stacks the values {slots[1]} of {variable}, which are not in ascending order"
                self._by_pieces(each.declared, each.placeholders, each.group, why)
        self.stacks[variable] = kept


def infer(recordings: Sequence[Recording], name: str) -> Layout:
    """The layout of recordings of all mesh ranks, in order. It is not compiled yet."""
    inference = _Inference(recordings)
    inference.run()
    if inference.refused and inference.differing:  # params that differ from layer to layer are stated one by one
        other = _Inference(recordings, frozenset(inference.differing))
        try:
            other.run()
        except Error:
            other.refused = inference.refused
        inference = other if len(other.refused) < len(inference.refused) else inference
    text, left = _yaml(inference, name), dict(inference.left)
    return Layout(text, name, recordings[0].mesh, left, inference.refused, inference.explicit)


def _yaml(inference: _Inference, name: str) -> str:
    patterns = inference.patterns
    common = Counter(pattern.dtype for pattern in patterns.patterns()).most_common(1)[0][0]
    model: dict[str, Any] = {"dtype": common} | ({"index": patterns.sizes} if patterns.sizes else {}) | {"tensors": {}}
    for pattern in patterns.patterns():
        where = {variable: patterns.values(pattern, variable) for variable in pattern.variables}
        some = {
            variable: Word(ranges(values))
            for variable, values in where.items()
            if values != list(range(patterns.sizes[variable]))
        }
        more = ({"dtype": pattern.dtype} if pattern.dtype != common else {}) | ({"where": some} if some else {})
        model["tensors"][Name(pattern.name)] = {"shape": pattern.shape} | more if more else pattern.shape
    layout: dict[str, Any] = {"axes": list(inference.axes.axes)} | (
        {"place": inference.place} if inference.place else {}
    )
    layout["params"] = {Name(each.name): each.keys for each in inference.declared}
    model["layouts"] = {"hf": {"params": "same"}, name: layout}
    return write(model)


def mesh_text(mesh: Mapping[str, Any]) -> str:
    """A mesh as YAML in flow style."""
    return flow(mesh)


def merge(recordings: Iterable[Recording | str | os.PathLike[str]], name: str = "recorded") -> Layout:
    """Returns the layout that the recordings of all mesh ranks show, compiled and compared with them.

    recordings: of every mesh rank one, or the path of its file.
    name: of the layout.

    Raises Error if recordings are missing or contradict each other, or if index variables are distributed in a way that
    no scheme states; CompileError if the compiler refuses the layout.
    """
    if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        raise Error(f"invalid layout name {name!r}: expected letters, digits, _ and -")
    found = in_order(recordings)
    layout = infer(found, name)
    compiled = compile_layout(layout.yaml, name, mesh_text(layout.mesh))
    layout.differences = compare(compiled, found, layout.refused)
    return layout
