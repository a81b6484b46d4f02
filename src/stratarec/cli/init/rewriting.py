"""A recipe with another tower plan in it; comments, order and everything else stay as they were written.

YAML is not parsed and written anew, which would lose comments: the parser says where in the text a value stands, and
that piece of it is replaced. The new text must then say what the old one said but for the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stratarec import limited_yaml
from stratarec.errors import ConfigError
from stratarec.files import write_atomic
from stratarec.models import DLRMConfig
from stratarec.opening import open_regular

Towers = Sequence[Sequence[str]]

_PATH = ("model", "towers", "plan")


def write_towers(path: Path, plan: Towers) -> None:
    """Set ``model.towers.plan`` in the recipe `path`, atomically; a link stays one.

    Raises
    ------
    ConfigError
        When the file is written such that the plan cannot be put into it, as behind an alias; says what to add by hand.
    """
    target = path.resolve()
    with open_regular(target) as file:
        before = file.read().decode("utf-8")
    after = with_towers(before, plan, str(path))
    mode = target.stat().st_mode & 0o7777
    write_atomic(target, lambda file: file.write(after.encode()))
    target.chmod(mode)


def with_towers(text: str, plan: Towers, origin: str = "recipe") -> str:
    """The text of a recipe whose ``model.towers.plan`` is `plan`.

    Raises
    ------
    ConfigError
        As `write_towers`.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    bare, line_end = text[len(mark) :], "\r\n" if "\r\n" in text else "\n"
    if "model" not in limited_yaml.load(bare):
        bare += ("" if bare.endswith("\n") else line_end) + f"model:{line_end}  kind: {DLRMConfig.kind}{line_end}"
    try:
        wanted = _wanted(limited_yaml.load(bare), plan)
        made = _replaced(bare, plan, line_end)
        fits = limited_yaml.load(made) == wanted
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(
            f"{origin}: cannot tell where model.towers.plan belongs in the way that this file is written; add it by "
            f"hand: {_flow(plan)}"
        )
    return mark + made


def _wanted(content: Mapping[str, Any], plan: Towers) -> dict[str, Any]:
    """What the text is to say. Sections on the way are copies: behind an alias they are others', too."""
    wanted = dict(content)
    section = wanted
    for name in _PATH[:-1]:
        section[name] = dict(section.get(name) or {})
        section = section[name]
    section[_PATH[-1]] = [list(features) for features in plan]
    return wanted


def _replaced(text: str, plan: Towers, line_end: str) -> str:
    """The plan put where it belongs, at the deepest section of its path that the text has."""
    section = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(section, yaml.MappingNode)
    for depth, name in enumerate(_PATH):
        found = next(((key, value) for key, value in section.value if key.value == name), None)
        if found is None:
            return _inserted(text, section, _PATH[depth:], plan, line_end)
        key, value = found
        if depth == len(_PATH) - 1 or not isinstance(value, yaml.MappingNode):
            return _instead(text, section, key, value, _PATH[depth:], plan, line_end)
        section = value
    raise AssertionError("a path ends")


def _inserted(text: str, section: yaml.MappingNode, path: Sequence[str], plan: Towers, line_end: str) -> str:
    """A new first field of a section."""
    start = section.start_mark
    if section.flow_style:
        comma = ", " if section.value else ""
        return f"{text[: start.index + 1]}{_flow_field(path, plan)}{comma}{text[start.index + 1 :]}"
    block = line_end.join(_block(path, plan, start.column))
    if start.column == 0:  # the recipe itself: a new section comes last
        gap = "" if text.endswith("\n") else line_end
        return f"{text}{gap}{block}{line_end}"
    return f"{text[: start.index]}{block.lstrip()}{line_end}{' ' * start.column}{text[start.index :]}"


def _instead(
    text: str, section: yaml.MappingNode, key: yaml.Node, value: yaml.Node, path: Sequence[str], plan: Towers,
    line_end: str,
) -> str:  # fmt: skip
    """A field with another value."""
    first, end = key.start_mark, _end(value)
    if section.flow_style:
        return text[: first.index] + _flow_field(path, plan) + text[end:]
    block = line_end.join(_block(path, plan, first.column)).lstrip()
    return text[: first.index] + block + text[end:]


def _end(node: yaml.Node) -> int:
    """Where a value ends; the parser has a block end where the next thing begins, behind blank lines and comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _block(path: Sequence[str], plan: Towers, column: int) -> list[str]:
    """Lines of a field in block style, a tower a line."""
    heads = [f"{' ' * (column + 2 * depth)}{name}:" for depth, name in enumerate(path)]
    indent = " " * (column + 2 * len(path))
    return [*heads, *(f"{indent}- {_list(features)}" for features in plan)]


def _flow_field(path: Sequence[str], plan: Towers) -> str:
    inner = f"{path[-1]}: {_flow(plan)}"
    for name in reversed(path[:-1]):
        inner = f"{name}: {{{inner}}}"
    return inner


def _flow(plan: Towers) -> str:
    return f"[{', '.join(map(_list, plan))}]"


def _list(features: Sequence[str]) -> str:
    text: str = yaml.safe_dump(list(features), default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.strip()
