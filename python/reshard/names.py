# SPDX-License-Identifier: Apache-2.0
"""Names of tensors: their patterns in messages, globs, and the rules OLD=NEW of --rename."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import TypeVar

from .errors import Error

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots
_SHOWN = 8  # names or patterns that a message lists
_LOOKED = 20_000  # names that are looked at to find what was changed in them
_BEGINNING = 4  # components of a beginning that was changed, at most
_WRAPPER = 3  # components of a wrapper, at most
_RULES = 4  # rules that are proposed, at most
T = TypeVar("T")


def printable(text: str) -> str:
    """A text without control characters, which files may have in names: they are escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(names: Iterable[str]) -> str:
    """The first names of a list, for a message."""
    names = list(names)
    return ", ".join(map(printable, names[:_SHOWN])) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )


def patterns(names: Iterable[str]) -> str:
    """The first patterns of names, for a message: `*` in place of a number between dots, and how many names have it."""
    counts = sorted(Counter(_NUMBER.sub("*", name) for name in names).items())
    more = len(counts) - _SHOWN
    return ", ".join(printable(name) + (f" ({count})" if count > 1 else "") for name, count in counts[:_SHOWN]) + (
        f" and {more} pattern{'s' if more > 1 else ''} more" if more > 0 else ""
    )


@cache
def _glob(glob: str) -> re.Pattern[str]:
    return re.compile("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in glob), re.DOTALL)


def matching(globs: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that match one of these globs, which have `*` and `?` (docs/yaml.md, section 1)."""
    rules = [_glob(glob) for glob in globs]
    return [name for name in names if any(rule.fullmatch(name) for rule in rules)]


class Renames:
    """Rules that change names, as base/renames.h has them. Without `*`, OLD is a beginning of names. With `*`, it is
    a glob of whole names, and each `*` of NEW stands for the text of the one in its place. To each name all globs
    apply, in their order, and then the longest beginning that fits."""

    def __init__(self, rules: Sequence[str]) -> None:
        """Raises Error if a rule is not valid."""
        self.rules = list(rules)
        self._globs: list[tuple[str, re.Pattern[str], list[str]]] = []
        self._beginnings: dict[str, str] = {}
        for rule in rules:
            old, equals, new = rule.partition("=")
            if not equals:
                raise Error(f"invalid --rename={rule!r}: expected OLD=NEW")
            if old.count("*") != new.count("*"):
                raise Error(f"invalid --rename={rule!r}: expected as many '*' in NEW as in OLD")
            if "*" in old:
                texts = [re.escape(text) for text in old.split("*")]
                self._globs.append((rule, re.compile("(.*?)".join(texts), re.DOTALL), new.split("*")))
            elif self._beginnings.setdefault(old, new) != new or self.rules.count(rule) > 1:
                raise Error(f"--rename is given twice for {old!r}, expected once")

    def _rename(self, name: str, used: set[str]) -> str:
        for rule, glob, texts in self._globs:
            if found := glob.fullmatch(name):
                used.add(rule)
                name = texts[0] + "".join(star + text for star, text in zip(found.groups(), texts[1:]))
        beginning = max((old for old in self._beginnings if name.startswith(old)), key=len, default=None)
        if beginning is None:
            return name
        used.add(f"{beginning}={self._beginnings[beginning]}")
        return self._beginnings[beginning] + name.removeprefix(beginning)

    def apply(self, named: Mapping[str, T], where: str) -> dict[str, T]:
        """Renames the keys of a map. Raises Error for two that would get one name, and for a rule that applies to none.
        where: the checkpoint, for errors."""
        if not self.rules:
            return dict(named)
        changed: dict[str, T] = {}
        origins: dict[str, str] = {}
        used: set[str] = set()
        for name, value in named.items():
            new = self._rename(name, used)
            if not new:
                raise Error(f"--rename leaves nothing of the name {name!r} of a tensor of {where!r}")
            if new in changed:
                raise Error(f"--rename gives the tensors {origins[new]!r} and {name!r} of {where!r} the name {new!r}")
            changed[new], origins[new] = value, name
        if unused := next((rule for rule in self.rules if rule not in used), None):
            old = unused.partition("=")[0]
            raise Error(
                f"--rename={unused}: {old!r} {'matches' if '*' in old else 'begins'} no name of the tensors of "
                f"{where!r}: {patterns(named)}"
            )
        return changed


def common_beginning(names: Iterable[str]) -> str:
    """The longest beginning of all names that ends with a dot."""
    names = list(names)
    first, last = min(names, default=""), max(names, default="")
    length = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[: first.rfind(".", 0, length) + 1]


def _change(name: str, missing: set[str], heads: Mapping[str, set[str]]) -> str | None:
    """The rule that makes a name one of those that are missing: it removes a wrapper or a beginning, or gives it
    another beginning. heads: what stands before the ends of the missing names."""
    parts = name.split(".")
    for length in range(1, _WRAPPER + 1):
        for at in range(len(parts) - length):
            if ".".join(parts[:at] + parts[at + length :]) in missing:
                wrapper = ".".join(parts[at : at + length]) + "."
                return f"*.{wrapper}*=*.*" if at else f"{wrapper}="
    for at in range(min(_BEGINNING, len(parts) - 1) + 1):
        found = heads.get(".".join(parts[at:]), set())
        if len(found) == 1:
            return f"{''.join(f'{part}.' for part in parts[:at])}={next(iter(found))}"
    return None


def rules_for(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Rules of --rename with which more of the names are wanted ones: without a wrapper (`_orig_mod.`), with another
    beginning. Empty if there are none."""
    original, expected = list(names), set(wanted)
    found: list[str] = original
    rules: list[str] = []
    for _ in range(_RULES):
        missing = expected.difference(found)
        heads: dict[str, set[str]] = {}
        for name in islice(sorted(missing), _LOOKED):
            parts = name.split(".")
            for at in range(1, min(_BEGINNING, len(parts) - 1) + 1):
                heads.setdefault(".".join(parts[at:]), set()).add("".join(f"{part}." for part in parts[:at]))
        changes = Counter(
            rule for name in islice(sorted(set(found) - expected), _LOOKED) if (rule := _change(name, missing, heads))
        )
        best = min(changes, key=lambda rule: (-changes[rule], len(rule), rule), default=None)
        if best is None or best in rules:
            break
        more = [best]
        if best.startswith("="):  # beginnings that a rule for all names must not change
            kept = {name.split(".")[0] for name in found if name in expected}
            more += sorted(f"{each}.={each}." for each in kept)[:_RULES]
        try:
            found = list(Renames([*rules, *more]).apply(dict.fromkeys(original), ""))
        except Error:
            break
        if len(expected.difference(found)) >= len(missing):
            break
        rules += more
    return rules
