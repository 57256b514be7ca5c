# SPDX-License-Identifier: Apache-2.0
"""Finds expressions of the numbers of several config.json that have given values, one for each config."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, permutations
from pathlib import Path
from typing import Any

from reshard.errors import Error

#: Factors and divisors that an expression may have.
_FACTORS = (2, 3, 4, 6, 8)
#: Words of the grammar, which no `let` name may be.
_RESERVED = ("or", "and", "not", "ceil", "true", "false", "null")

Config = Mapping[str, Any] | str | os.PathLike[str]
Values = tuple[int | None, ...]  #: of a number at each size; None where it is not known


def config_of(config: Config) -> dict[str, Any]:
    """A config.json, given as a map, a file or its folder."""
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Error(f"{path}: no config.json: {error}") from error
    if not isinstance(found, dict):
        raise Error(f"{path}: JSON of type {type(found).__name__}, expected an object")
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _expressions(keys: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """(level, expression, values) of all expressions: the higher the level, the less simple; in a
    level the likelier first."""

    def exact(numerator: Sequence[int], divisor: Sequence[int]) -> tuple[int, ...] | None:
        fits = all(b and a % b == 0 for a, b in zip(numerator, divisor))
        return tuple(a // b for a, b in zip(numerator, divisor)) if fits else None

    def times(*factors: Sequence[int]) -> tuple[int, ...]:
        result = (1,) * len(factors[0])
        for each in factors:
            result = tuple(a * b for a, b in zip(result, each))
        return result

    yield from ((1, key, values) for key, values in keys.items())
    useful = {key: values for key, values in keys.items() if set(values) not in ({0}, {1})}
    count = len(next(iter(keys.values()), ()))
    products = {f"{a} * {b}": times(useful[a], useful[b]) for a, b in combinations_with_replacement(useful, 2)}
    yield from ((2, text, values) for text, values in products.items())
    quotients = {f"{a} / {b}": exact(useful[a], useful[b]) for a, b in permutations(useful, 2)}
    yield from ((2, text, values) for text, values in quotients.items() if values)
    sums = {f"{a} + {b}": tuple(map(sum, zip(useful[a], useful[b]))) for a, b in combinations(useful, 2)}
    for factor in _FACTORS:
        for level, terms in ((2, useful), (3, products)):
            for text, values in terms.items():
                yield level, f"{factor} * {text}", times((factor,) * count, values)
                if (divided := exact(values, (factor,) * count)) is not None:
                    yield level, f"{text} / {factor}", divided
    yield from ((2, text, values) for text, values in sums.items())
    for text, values in sums.items():
        yield from ((3, f"{key} * ({text})", times(useful[key], values)) for key in useful)
    for text, values in products.items():
        for key in useful:
            if key not in text.split(" * ") and (divided := exact(values, useful[key])) is not None:
                yield 3, f"{text} / {key}", divided


class Keys:
    """The keys that all configs have, as names for expressions."""

    def __init__(self, configs: Sequence[Mapping[str, Any]], taken: Sequence[str]):
        """taken: names that have another meaning in the model."""
        flat = [dict(_flat(config)) for config in configs]
        self.keys: dict[str, str] = {}  #: {name: key of the config}
        self.integers: dict[str, tuple[int, ...]] = {}
        self.conditions: dict[str, tuple[bool, ...]] = {}
        self.patterns: dict[str, list[Sequence[str]]] = {}  #: {key: a kind for each value, of each config}
        self._used: set[str] = set()
        for key in flat[0]:
            values: list[Any] = [each.get(key) for each in flat]
            if all(isinstance(each, bool) for each in values):
                self.conditions[self._name(key, taken)] = tuple(bool(each) for each in values)
            elif all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in values):
                if not key.endswith("_token_id"):
                    self.integers[self._name(key, taken)] = tuple(map(int, values))
            elif all(
                isinstance(each, str) or isinstance(each, list) and all(isinstance(one, str) for one in each)
                for each in values
            ):
                self.patterns[key] = [
                    each.partition("/")[0].replace("|", "") if isinstance(each, str) else each for each in values
                ]
        self._table: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
        for level, text, found in _expressions(self.integers):
            self._table[found].append((level, text))

    def _name(self, key: str, taken: Sequence[str]) -> str:
        name = key.rpartition(".")[2]
        while name in self.keys or name in taken or name in _RESERVED:
            name += "_"
        self.keys[name] = key
        return name

    def fits(self, values: Values) -> list[str]:
        """The expressions with these values, the simplest first: those of the lowest level that has some and, beside
        single keys, those of the next one. Where a value is not known: single keys alone."""
        if None in values:
            return [key for key, each in self.integers.items() if all(b in (None, a) for a, b in zip(each, values))]
        found = sorted(
            self._table.get(tuple(each for each in values if each is not None), ()), key=lambda each: each[0]
        )
        return [text for level, text in found if level <= max(2, found[0][0])]

    def use(self, expression: str) -> str:
        """An expression that the model then has."""
        self._used.update(name for name in self.keys if name in expression.replace("(", " ").replace(")", " ").split())
        return expression

    def let(self) -> dict[str, str]:
        """The names of all expressions that were used, as `let` of the model."""
        return {name: f"${key}" for name, key in self.keys.items() if name in self._used}
