"""Conversion of names that users choose to text for file names, terminals, shell commands and
HTML.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable

import xxhash

_MAX_SLUG = 40
_OTHERS = re.compile(r"[^A-Za-z0-9_]+")
# Unicode categories of hidden characters: control characters, marks of text direction, surrogates,
# and line ends.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def file_name(name: str, number: int | None = None) -> str:
    """Return a file name for `name`: ASCII letters, digits, ``-`` and ``_``, at most 60 characters.

    Parameters
    ----------
    number : int
        Index that makes the file name unique. Without it, a hash is appended if the name had to be
        changed.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    slug = _OTHERS.sub("-", plain).strip("-")[:_MAX_SLUG]
    if number is not None:
        return f"{number:04d}-{slug}".rstrip("-")
    if slug and slug == name:
        return slug
    return f"{slug}-{xxhash.xxh3_64_hexdigest(name.encode(errors='surrogatepass'))[:8]}".lstrip("-")


def visible(text: str) -> str:
    """Return `text` with control and hidden characters escaped as in Python, so that it is safe on
    a terminal.
    """
    return "".join(map(_shown, text)) if not text.isprintable() else text


def shell_word(text: str | os.PathLike[str]) -> str:
    """Quote a path for a printed shell command. Hidden characters become escape sequences of
    bash.
    """
    text = os.fspath(text)
    text = f"./{text}" if text.startswith("-") else text  # an option otherwise
    if visible(text) == text:
        return shlex.quote(text)
    escaped = "".join(f"\\{mark}" if mark in "\\'" else _escaped_bytes(mark) for mark in text)
    return f"$'{escaped}'"


STEP_NAME = r"step-\d{8,12}"
"""Pattern of the name of a checkpoint."""


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step of the checkpoint with this name."""
    return int(name.removeprefix("step-"))


def as_html(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return the HTML that notebooks show for an object: a title, and a table of names and
    values.
    """
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows
    )
    return f"<b>{html.escape(title)}</b><table>{cells}</table>"


def _is_hidden(mark: str) -> bool:
    return unicodedata.category(mark) in _HIDDEN


def _shown(mark: str) -> str:
    return mark.encode("unicode_escape", "surrogatepass").decode() if _is_hidden(mark) else mark


def _escaped_bytes(mark: str) -> str:
    # Escapes are of bytes and not of code points: a path may have bytes that are not UTF-8, and the
    # shell may have any locale.
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(mark)) if _is_hidden(mark) else mark
