"""YAML of a recipe's size: whatever else a text says is refused before it takes time or memory.

A text of a kilobyte can stand for 10^9 values by aliases of aliases, and a number of 10^6 digits takes minutes.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError

LARGEST = 1 << 20
"""Bytes of a text."""
_MOST_VALUES = 100_000
_DEEPEST = 50
_MOST_DIGITS = 100


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, where YAML would quietly keep the last, and what is too large."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values, self._depth = 0, 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._values
        # An alias stands for as many values as what it names, and is not complete inside of that.
        alias = isinstance(event, yaml.AliasEvent)
        if alias and event.anchor in self.anchors and event.anchor not in self._sizes:
            raise ConstructorError(None, None, f"{event.anchor} stands for a section that it lies in", event.start_mark)
        self._values += self._sizes.get(event.anchor, 1) if alias else 1
        self._depth += 1
        if self._values > _MOST_VALUES:
            raise ConstructorError(None, None, f"more than {_MOST_VALUES:,} values", event.start_mark)
        if self._depth > _DEEPEST:
            raise ConstructorError(None, None, f"sections in more than {_DEEPEST} sections", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not alias and event.anchor is not None:
            self._sizes[event.anchor] = self._values - before
        return node


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for name, _ in node.value:
        if name.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(name, deep=True)
        try:
            twice = key in seen
            seen.add(key)
        except TypeError as error:
            raise ConstructorError(None, None, "a list or section is no key", name.start_mark) from error
        if twice:
            raise ConstructorError(None, None, f"key {key!r} stands twice", name.start_mark)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    if len(node.value) > _MOST_DIGITS:
        raise ConstructorError(None, None, f"a number of {len(node.value):,} digits", node.start_mark)
    kind = node.tag.rpartition(":")[2]
    found: int | float = getattr(loader, f"construct_yaml_{kind}")(node)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)


def load(text: str) -> Any:
    """The value of a YAML text.

    Raises
    ------
    ValueError
        For what is no YAML or too large, in one line with the place.
    """
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text):,} characters, expected at most {LARGEST:,}")
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of numbers and dates, and of long merges
        raise ValueError(_problem(error)) from error


def _problem(error: Exception) -> str:
    """What is wrong with a text and where, in one line."""
    if isinstance(error, RecursionError):
        return "sections are nested too deeply"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    hint = "; indent with spaces" if "'\\t'" in error.problem else ""
    return f"{place}{' '.join(error.problem.split())}{hint}"
