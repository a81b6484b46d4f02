"""Names that users chose, as file names (`file_name`), on terminals (`visible`) and in commands (`shell_word`)."""

from __future__ import annotations

import html
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable

import xxhash

_LONGEST = 40
_OTHERS = re.compile(r"[^A-Za-z0-9_]+")
# Control characters, what changes the direction of text, halves of characters, and ends of lines.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def file_name(name: str, number: int | None = None) -> str:
    """A part of a path for something that is called `name`: ASCII letters, digits, ``-`` and ``_``, at most 60.

    Parameters
    ----------
    number : int
        Of the thing among its like, which keeps apart names that look the same. Without one a name that cannot stand
        as it is is told from others by its hash.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    slug = _OTHERS.sub("-", plain).strip("-")[:_LONGEST]
    if number is not None:
        return f"{number:04d}-{slug}".rstrip("-")
    if slug and slug == name:
        return slug
    return f"{slug}-{xxhash.xxh3_64_hexdigest(name.encode(errors='surrogatepass'))[:8]}".lstrip("-")


def visible(text: str) -> str:
    """`text` for a terminal: characters that would act on it, or hide, are shown as Python writes them."""
    return "".join(map(_shown, text)) if not text.isprintable() else text


def shell_word(text: str | os.PathLike[str]) -> str:
    """Quote a path so that a printed command can be pasted into a shell; hidden characters become escapes of bash."""
    text = os.fspath(text)
    text = f"./{text}" if text.startswith("-") else text  # an option otherwise
    if visible(text) == text:
        return shlex.quote(text)
    escaped = "".join(f"\\{mark}" if mark in "\\'" else _escaped_bytes(mark) for mark in text)
    return f"$'{escaped}'"


def as_html(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """What a notebook shows of an object: a title over names and values, escaped."""
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows)
    return f"<b>{html.escape(title)}</b><table>{cells}</table>"


def _is_hidden(mark: str) -> bool:
    return unicodedata.category(mark) in _HIDDEN


def _shown(mark: str) -> str:
    return mark.encode("unicode_escape", "surrogatepass").decode() if _is_hidden(mark) else mark


def _escaped_bytes(mark: str) -> str:
    # Bytes, not code points: a path may hold bytes that are not UTF-8, and the shell's locale does not matter.
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(mark)) if _is_hidden(mark) else mark
