"""Errors say in one line of bounded length what a file may have said in any."""

from __future__ import annotations

import pickle

import pytest

from stratarec.errors import ConfigError, DatasetError, StorageError, StrataError


@pytest.mark.parametrize("kind", [ConfigError, DatasetError, StorageError])
def test_a_message_is_one_line_and_ends_with_its_advice(kind: type[StrataError]) -> None:
    error = kind(f"field is {'x' * 100_000}\nof a file; prepare the data again")
    assert len(str(error)) < 1500
    assert str(error).startswith("field is xxx")
    assert str(error).endswith("x\\nof a file; prepare the data again")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind("as it is")) == "as it is"
