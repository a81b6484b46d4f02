"""Registry of the homes of rows outside level 0: the store of each, and the memory that it takes.

Stores are imported when one is opened, because recipes and plans are read without Numba.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

from stratarec.config.choices import OneOf
from stratarec.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from stratarec.embedding.slots import Level0
    from stratarec.embedding.stores.base import RecordStore


class NewStore(NamedTuple):
    """Sizes and places of a store to open."""

    rows: int
    record_bytes: int
    path: Path | None
    """Directory of this store in the path of its home; None for a home without files."""
    level0: Level0
    budget_bytes: int = 0
    """Maximum file space of an SSD store; 0 for all free disk space."""
    frequent: Sequence[tuple[int, int]] = ()
    """First row of each table, and how many of its rows' records an SSD store keeps in DRAM."""


class Home(NamedTuple):
    """An entry of `HOMES`."""

    open: Callable[[NewStore], RecordStore]
    """Returns an empty store, whose `kind` is the name of the home."""
    memory: Literal["dram", "mapped", "block", "hbm"]
    """Memory whose budget the records count against."""
    path: Literal["", "mapped_path", "log_path"] = ""
    """Field of `TierConfig` with the directory of its files; empty without files."""
    layout: Literal["rows", "log"] = "rows"
    """Layout of its checkpoints; homes of one layout can restore each other's."""


def _open_dram(new: NewStore) -> RecordStore:
    from stratarec.embedding.stores.arrays import DramRecords

    return DramRecords(rows=new.rows, record_bytes=new.record_bytes)


def _open_mapped(new: NewStore) -> RecordStore:
    from stratarec.embedding.stores.arrays import MappedRecords

    assert new.path is not None
    return MappedRecords(new.path, rows=new.rows, record_bytes=new.record_bytes)


def _open_ssd(new: NewStore) -> RecordStore:
    from stratarec.embedding.stores.ssd import SsdRecords
    from stratarec.embedding.stores.ssd_layout import SsdConfig

    assert new.path is not None
    config = SsdConfig(budget_bytes=new.budget_bytes)
    return SsdRecords(
        new.path, rows=new.rows, record_bytes=new.record_bytes, config=config, frequent=[*new.frequent]
    )


def _open_hbm(new: NewStore) -> RecordStore:
    from stratarec.embedding.stores.device import DeviceRecords

    return DeviceRecords(new.level0, rows=new.rows, record_bytes=new.record_bytes)


HOMES = Registry(
    "home",
    {
        "dram": Home(_open_dram, "dram"),
        "mapped": Home(_open_mapped, "mapped", "mapped_path"),
        "log": Home(_open_ssd, "block", "log_path", "log"),
        "hbm": Home(_open_hbm, "hbm"),
    },
)
HomeKind: TypeAlias = Annotated[str, OneOf(lambda: HOMES)]
"""A key of `HOMES`."""
