"""YAML for recipes, with limits that keep a hostile or broken file from taking time or memory.

A kilobyte of nested aliases can expand to 10^9 values, and a number of 10^6 digits takes minutes to
parse.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError

LARGEST = 1 << 20
"""Largest number of characters of a text."""
_MAX_VALUES = 100_000
_MAX_DEPTH = 50
_MAX_DIGITS = 100


class _Loader(yaml.SafeLoader):
    """Loader that refuses too many values, too deep nesting, and duplicate keys (else the last one
    would win).
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._depth = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._values
        # An alias counts as many values as the section of its anchor, and must not occur inside
        # that section.
        alias = isinstance(event, yaml.AliasEvent)
        if alias and event.anchor in self.anchors and event.anchor not in self._sizes:
            raise ConstructorError(
                None, None, f"alias {event.anchor} refers to its own section", event.start_mark
            )
        self._values += self._sizes.get(event.anchor, 1) if alias else 1
        self._depth += 1
        if self._values > _MAX_VALUES:
            raise ConstructorError(None, None, f"more than {_MAX_VALUES:,} values", event.start_mark)
        if self._depth > _MAX_DEPTH:
            raise ConstructorError(None, None, f"more than {_MAX_DEPTH} nested sections", event.start_mark)
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
            is_duplicate = key in seen
            seen.add(key)
        except TypeError as error:
            raise ConstructorError(
                None, None, "a list or section cannot be a key", name.start_mark
            ) from error
        if is_duplicate:
            raise ConstructorError(None, None, f"duplicate key {key!r}", name.start_mark)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    if len(node.value) > _MAX_DIGITS:
        raise ConstructorError(None, None, f"a number with {len(node.value):,} digits", node.start_mark)
    kind = node.tag.rpartition(":")[2]
    number: int | float = getattr(loader, f"construct_yaml_{kind}")(node)
    return number


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)


def load(text: str) -> Any:
    """Return the value of a YAML text.

    Raises
    ------
    ValueError
        If the text is not YAML or too large; the message is one line with the position.
    """
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text):,} characters, expected at most {LARGEST:,}")
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # invalid numbers or dates; long merges
        raise ValueError(_problem(error)) from error


def _problem(error: Exception) -> str:
    """Describe the problem of a text and its position, in one line."""
    if isinstance(error, RecursionError):
        return "sections are nested too deeply"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    hint = "; indent with spaces" if "'\\t'" in error.problem else ""
    return f"{place}{' '.join(error.problem.split())}{hint}"
