"""Assertions about error messages that leave their wording open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest


def missing(words: str, text: str | Iterable[str]) -> list[str]:
    """Return the words, separated by spaces, that the text does not contain, in any order.

    A word counts only if no letter or digit follows or precedes it: "1" is not in "10".
    """
    text = text if isinstance(text, str) else "\n".join(text)
    return [word for word in words.split() if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)]


@contextmanager
def refuses(
    error: type[Exception] | tuple[type[Exception], ...], words: str
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose message contains the words: its field, file, row or column, and the
    values.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert not missing(words, str(caught.value)), str(caught.value)


def check_refusal(words: str, text: str) -> None:
    """Check that the command line wrote one line to stderr that contains the words."""
    assert text.startswith("stratarec: "), text
    assert text.count("\n") == 1, text
    assert not missing(words, text), text
