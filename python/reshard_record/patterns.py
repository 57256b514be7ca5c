# SPDX-License-Identifier: Apache-2.0
"""Index variables: `model.layers.3.mlp.experts.5.up_proj.weight` is {layer} 3 and {expert} 5 of a tensor pattern."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from reshard.errors import Error

from .checkpoint import Tensors
from .elements import joined, product

_NUMBER = re.compile(r"0|[1-9]\d*")


@dataclass(frozen=True)
class Pattern:
    """A tensor pattern of the YAML."""

    name: str  #: with {variable} placeholders
    variables: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """A tensor as a member of a pattern: the value of each variable."""

    pattern: Pattern
    values: tuple[int, ...]

    def value(self, variable: str) -> int:
        return self.values[self.pattern.variables.index(variable)]


def variable_of(component: str) -> str:
    """The name of the variable of a number after this component of a name: layers -> layer, h -> layer."""
    word = re.sub(r"\W", "_", component)
    return {"h": "layer", "layers": "layer", "blocks": "block", "experts": "expert"}.get(
        word, word[:-1] if word.endswith("s") and len(word) > 2 else f"{word}_index"
    )


def split_name(name: str) -> tuple[list[str], list[tuple[int, str]]]:
    """The components of a name, and (position, variable) of each number in it."""
    if "{" in name or "}" in name:
        raise Error(f"tensor {name!r}: a brace in a name is not supported")
    components = name.split(".")
    numbers: list[tuple[int, str]] = []
    for position, component in enumerate(components):
        if _NUMBER.fullmatch(component):
            variable = variable_of(components[position - 1]) if position else "module"
            while variable in [each for _, each in numbers]:
                variable += "_2"
            numbers.append((position, variable))
    return components, numbers


class Patterns:
    """The tensors of a checkpoint as patterns. A value that no recorded param uses, of a variable of which some use
    others, stays a number: a layer that the loader leaves out, as for multi-token prediction, is no value of the
    variable. Tensors that are `alone` keep their names."""

    def __init__(self, tensors: Tensors, used: Iterable[str], alone: Collection[str] = ()):
        values: dict[str, set[int]] = defaultdict(set)
        for name in used:
            components, numbers = split_name(name)
            for position, variable in numbers:
                values[variable].add(int(components[position]))
        groups: dict[tuple[str, tuple[str, ...]], dict[str, tuple[int, ...]]] = defaultdict(dict)
        for name in tensors:
            components, numbers = split_name(name)
            chosen = [
                (position, variable)
                for position, variable in numbers
                if name not in alone and (not values[variable] or int(components[position]) in values[variable])
            ]
            number = tuple(int(components[position]) for position, _ in chosen)
            for position, variable in chosen:
                components[position] = "{%s}" % variable
            groups[".".join(components), tuple(variable for _, variable in chosen)][name] = number
        self.members: dict[str, Member] = {}
        for (pattern, variables), found in groups.items():
            self._add(pattern, variables, found, tensors)
        #: {variable: number of values}, in the order of the names
        self.sizes = {
            variable: max(
                member.value(variable) for member in self.members.values() if variable in member.pattern.variables
            )
            + 1
            for variable in dict.fromkeys(each for member in self.members.values() for each in member.pattern.variables)
        }

    def _add(
        self, pattern: str, variables: tuple[str, ...], found: Mapping[str, tuple[int, ...]], tensors: Tensors
    ) -> None:
        """One pattern; tensors that one declaration cannot state (other shapes, missing
        combinations) keep their names."""
        kinds = {tensors[name] for name in found}
        combinations = product([len({number[i] for number in found.values()}) for i in range(len(variables))])
        for name, number in found.items():
            dtype, shape = tensors[name]
            one = len(kinds) == 1 and combinations == len(found)
            self.members[name] = (
                Member(Pattern(pattern, variables, dtype, shape), number)
                if one
                else Member(Pattern(name, (), dtype, shape), ())
            )

    def patterns(self) -> list[Pattern]:
        """All patterns, in the order of their first tensors."""
        return list(dict.fromkeys(member.pattern for member in self.members.values()))

    def values(self, pattern: Pattern, variable: str) -> list[int]:
        """The values of a variable for which the pattern's tensors exist."""
        return sorted({member.value(variable) for member in self.members.values() if member.pattern == pattern})


def ranges(values: Iterable[int]) -> str:
    """Values as YAML of `where`: `0..2`, or `[0, 3..4]`."""
    runs = joined([(value, 1) for value in sorted(values)])
    texts = [str(first) if count == 1 else f"{first}..{first + count - 1}" for first, count in runs]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
