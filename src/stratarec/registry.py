"""Registries of the choices that recipes name, such as losses and codecs. Any package can add an
entry.

A registry is the only list of its choices: recipes, the planner, help texts and reference pages
read it. An entry is registered before the recipe that names it is read, in every process that reads
the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from stratarec.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, T]):
    """Implementations of one kind, by the names that recipes use, in the order of texts.

    Parameters
    ----------
    what : str
        Kind of the entries, for messages, such as ``loss``.
    entries : mapping
        Name -> implementation.
    """

    def __init__(self, what: str, entries: Mapping[str, T] = MappingProxyType({})) -> None:
        super().__init__(entries)
        self._what = what
        self._own = len(entries)
        self._is_closed = False

    def register(self, name: str, entry: T) -> T:
        """Add an entry, and return it; `ConfigError` if the name is taken."""
        if name in self:
            raise ConfigError(f"{self._what} {name!r} is already registered: choose another name")
        if self._is_closed:
            raise ConfigError(
                f"{self._what} {name!r}: register it before kernels, which contain "
                "all entries, are imported"
            )
        self[name] = entry
        return entry

    def close(self) -> bool:
        """Refuse later entries, because compiled code contains all present ones. Return whether
        none was added.

        Code with an added entry is not cached on disk, because Numba's cache does not notice what a
        kernel contains.
        """
        self._is_closed = True
        return len(self) == self._own
