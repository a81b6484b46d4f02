"""Plan of all tables (home, codec, cache and predictions of each), and its comparison with the
memory that a run used.

Some predicted parts are upper bounds, which a run need not reach: dead space and buffers of an SSD
store, staging, workspace. The plan has a defect if any other part differs from the used bytes by
more than 5 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

from stratarec.config.units import format_bytes
from stratarec.config.validate import check_ranges
from stratarec.embedding.config import CachePolicy, CodecConfig
from stratarec.embedding.tiers import MEMORY_NAMES, TableTier, TierConfig
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.names import as_html
from stratarec.io.sealed import Count, describe_error, newer_format, read_unvalidated, write_sealed
from stratarec.planning.bytes import (
    LEVEL0,
    MEMORIES,
    RESERVES,
    SHARED_BYTES,
    Home,
    Memory,
    Parts,
    SlotSplit,
    add_parts,
    in_memory,
)
from stratarec.planning.config import MOST_AHEAD, MemoryConfig
from stratarec.planning.step_model import Nonnegative, StepTime, TableSeconds

FORMAT = 1
_Rows = Annotated[int, pydantic.Field(ge=0, lt=1 << 48)]
_ADVICE = "plan again"
# Checkpoints allow at most this many parts of a table.
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SsdStore:
    """A store on the block device. Tables with the same width and codec share it."""

    width: int
    codec: CodecConfig


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Home, codec and cache of one table, and predictions about it."""

    table: str
    rows: _Rows
    width: Count
    tier: Home
    """Home of the rows; ``level0`` means float32 in DRAM or GPU memory, without a cache."""
    codec: CodecConfig
    """Format of the rows in their home."""
    cache_rows: _Rows
    """Number of slots in level 0, including the overflow; the number of rows for ``level0``."""
    ways: Count
    """Slots per set; 0 for ``level0``."""
    bytes: Mapping[Memory, Mapping[str, Count]]
    """``memory -> part -> bytes``; `planning.bytes` describes the parts."""
    lookups: Nonnegative
    """Predicted ids per batch."""
    distinct: Nonnegative
    """Predicted distinct rows per batch."""
    pinned: Count
    """Rows that the batches in flight may pin at once, with a margin."""
    misses: Nonnegative
    """Predicted distinct rows per batch that are not in level 0 when it is staged, and are read
    from their home.
    """
    seconds: TableSeconds
    hot_rows: _Rows = 0
    """Number of hot rows, which are the first rows of the table. They have slots in addition to the
    cache's slots.
    """
    dram_rows: _Rows = 0
    """Number of first rows of a table in an SSD store whose records are in DRAM."""

    def __post_init__(self) -> None:
        cached = self.tier != "level0"
        counts = dict.fromkeys(("rows", "width", "cache_rows"), "[1, inf)")
        check_ranges(self, f"table {self.table!r}: ", **counts, ways=f"[{int(cached)}, inf)")
        # A cache has at least one set and one overflow set. Apart from that, it need not be larger
        # than its table.
        most = 2 * max(self.rows, self.ways)
        if self.cache_rows > most:
            raise ConfigError(
                f"table {self.table!r}: cache_rows is {self.cache_rows:,}, expected at most {most:,} for "
                f"{self.rows:,} rows"
            )
        if self.hot_rows > (self.rows if cached else 0):
            raise ConfigError(
                f"table {self.table!r}: {self.hot_rows:,} hot rows, expected at most the rows of the "
                "table if it is cached, and 0 if it is not"
            )
        if not any("slot weights" in self.bytes.get(memory, {}) for memory in LEVEL0):
            raise ConfigError(f"table {self.table!r}: bytes lack the slot weights in {' or '.join(LEVEL0)}")

    @property
    def ssd(self) -> SsdStore | None:
        """SSD store in which the table is stored together with others of its width and codec; None
        for another home.
        """
        return SsdStore(width=self.width, codec=self.codec) if self.tier == "log" else None

    @property
    def slots(self) -> SlotSplit | None:
        """Sets, ways and overflow of a cached table; None for ``level0``."""
        return SlotSplit.within(self.cache_rows, self.ways) if self.ways else None

    @property
    def all_slots(self) -> int:
        """Number of slots of the cache and of hot rows together."""
        return self.cache_rows + self.hot_rows

    @property
    def hit_rate(self) -> float:
        """Predicted share of a batch's distinct rows that are in level 0 already."""
        return 1 - self.misses / self.distinct if self.distinct else 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of all tables of a model, with predictions."""

    tables: tuple[TablePlacement, ...]
    budgets: Mapping[Memory, Count | None]
    """Budget of each memory that may be used; None for no limit."""
    batch_size: Count
    lookahead: int
    policy: CachePolicy
    workspace_bytes: Count
    """Bytes of scratch memory for the update in each process, in `level0`."""
    output_bytes: Count
    """Bytes of the embedding layer's activations and their gradients, in `level0`. No budget
    includes them.
    """
    fixed: TableSeconds = field(default_factory=TableSeconds)
    """Seconds per step that do not depend on the batch: a cost for each group of tables that are
    looked up together.
    """
    ranks: Count = 1
    """Number of processes that share the tables. Budgets and bytes of tables are totals of all
    processes.
    """
    notes: tuple[str, ...] = ()
    """Remarks for the user, as sentences."""
    format: int = FORMAT

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def __post_init__(self) -> None:
        check_ranges(
            self, "", batch_size="[1, inf)", lookahead=f"[0, {MOST_AHEAD}]", ranks=f"[1, {_MOST_RANKS}]"
        )
        names = [placed.table for placed in self.tables]
        if len(set(names)) != len(names):
            raise ConfigError(f"a table is placed twice in {', '.join(names)}")

    def __getitem__(self, table: str) -> TablePlacement:
        """Return the placement of `table`; `ConfigError` if the plan does not have it."""
        for placement in self.tables:
            if placement.table == table:
                return placement
        raise ConfigError(
            f"the plan has no table {table!r}; it has {', '.join(placed.table for placed in self.tables)}"
        )

    @property
    def level0(self) -> Memory:
        """Memory in which rows are trained."""
        return "hbm" if "hbm" in self.budgets else "dram"

    @property
    def bytes(self) -> Parts:
        """Bytes of all tables, SSD stores and workspaces, for all processes together."""
        stores = {placement.ssd for placement in self.tables} - {None}
        shared: list[Parts] = [
            *[SHARED_BYTES] * len(stores),
            {self.level0: {"workspace": self.workspace_bytes}},
        ]
        return add_parts([*(placement.bytes for placement in self.tables), *shared * self.ranks])

    def used(self, memory: Memory) -> int:
        """Return the planned bytes in one memory, for all processes together."""
        return in_memory(self.bytes, memory)

    @property
    def float32_bytes(self) -> int:
        """Bytes that the tables would need if every row were in level 0, in float32."""
        parts = [placement.bytes[self.level0] for placement in self.tables]
        return sum(
            placement.rows * (part["slot weights"] + part.get("slot state", 0)) // placement.all_slots
            for placement, part in zip(self.tables, parts, strict=True)
        )

    @property
    def seconds(self) -> TableSeconds:
        """Predicted seconds of table work per step, for all tables together."""
        return sum((placement.seconds for placement in self.tables), self.fixed)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the embedding layer per step, with work that overlaps counted
        once.
        """
        cores = float(self.level0 == "dram")
        return StepTime(
            samples=self.batch_size, tables=self.seconds, lookahead=self.lookahead, busy_share=cores
        ).total

    @property
    def hit_rate(self) -> float:
        """Predicted share of a batch's distinct rows that are in level 0 already, over all tables
        under a cache.
        """
        cached = [placed for placed in self.tables if placed.tier != "level0"]
        distinct = sum(placed.distinct for placed in cached)
        return 1 - sum(placed.misses for placed in cached) / distinct if distinct else 1.0

    @property
    def summary(self) -> str:
        """Text of one line with the bytes of the tables as planned and as float32, and the
        predicted hit rate.
        """
        cached = [placed for placed in self.tables if placed.tier != "level0"]
        used = ", ".join(
            f"{format_bytes(self.used(memory))} of {MEMORY_NAMES[memory]}"
            for memory in MEMORIES
            if self.used(memory)
        )
        used += f" in {self.ranks} processes together" if self.ranks > 1 else ""
        by = f" ({self.policy})" if cached else ""
        return (
            f"tables: {format_bytes(self.float32_bytes)} as float32, planned {used}; {len(cached)} of "
            f"{len(self.tables)} tables cached{by}, predicted hit rate {self.hit_rate:.1%}"
        )

    def _repr_html_(self) -> str:
        homes = [
            (placed.table, f"{placed.tier}, {placed.codec.kind}, hit rate {placed.hit_rate:.1%}")
            for placed in self.tables
        ]
        return as_html("Plan", [("summary", self.summary), *homes])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, with totals under ``predicted`` for people who read it."""
        content: dict[str, Any] = pydantic.TypeAdapter(Plan).dump_python(self, mode="json")
        content["predicted"] = {
            "bytes": {memory: self.used(memory) for memory in self.budgets},
            "parts": self.bytes,
            "float32_bytes": self.float32_bytes,
            "hit_rate": self.hit_rate,
            "seconds": asdict(self.seconds),
            "step_seconds": self.step_seconds,
        }
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str = "plan") -> Plan:
        """Create a plan from data that `to_dict` returned; `DatasetError`, which names `origin`, if
        it is invalid.
        """
        if content.get("format") != FORMAT:
            number = content.get("format")
            fault = newer_format(number, FORMAT) or f"format {number!r}, expected {FORMAT}; plan again"
            raise DatasetError(f"{origin}: {fault}")
        bare = {key: value for key, value in content.items() if key != "predicted"}
        try:
            plan: Plan = pydantic.TypeAdapter(cls).validate_json(json.dumps(bare))
        except (pydantic.ValidationError, ConfigError) as error:
            raise DatasetError(f"{origin} is not a plan: {describe_error(error)}; {_ADVICE}") from error
        return plan

    def save(self, path: Path) -> None:
        """Write the plan as JSON, atomically."""
        write_sealed(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from the file that `save` wrote."""
        # Symbolic links are allowed here, because the user names the file.
        return cls.from_dict(
            read_unvalidated(path.resolve() if path.is_symlink() else path, FORMAT, _ADVICE), str(path)
        )


def tier_config(plan: Plan, memory: MemoryConfig, name: str, device: str = "cpu") -> TierConfig:
    """Return the tier settings of the engine for a plan.

    Stores with files get a directory `name` under the paths of `memory`. Rows are trained on
    `device` if the plan has them in GPU memory, otherwise in DRAM.

    Raises
    ------
    ConfigError
        If the plan needs a path that `memory` does not name.
    """
    tables = {
        placed.table: TableTier(
            # Records of GPU memory are in DRAM if the rows are trained there.
            home="dram" if placed.tier == "hbm" and device == "cpu" else placed.tier,
            codec=placed.codec,
            cache_rows=placed.cache_rows,
            hot_rows=placed.hot_rows,
            dram_rows=placed.dram_rows,
        )
        for placed in plan.tables
        if placed.tier != "level0"
    }
    for home, name_of_path, path in (
        ("mapped", "memory.mapped.path", memory.mapped),
        ("log", "memory.block.path", memory.block),
    ):
        table = next((name for name, tier in tables.items() if tier.home == home), None)
        if table is not None and path is None:
            raise ConfigError(
                f"the plan places table {table!r} in a {home} home: set {name_of_path}, a directory for it"
            )
    # All cached tables of a plan have the same number of ways; tables entirely in level 0 have
    # none.
    ways = max(
        (placed.ways for placed in plan.tables if placed.tier != "level0"), default=memory.cache.ways
    )
    return TierConfig(
        device=device if plan.level0 == "hbm" else "cpu",
        tables=tables,
        policy=plan.policy,
        ways=ways,
        lookahead=plan.lookahead,
        mapped_path=Path(memory.mapped.path) / name if memory.mapped else None,
        log_path=Path(memory.block.path) / name if memory.block else None,
        log_budget_bytes=memory.block.budget if memory.block else None,
    )


TOLERANCE = 0.05
"""The plan has a defect if used and predicted bytes differ by more than this share."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of planned and used bytes, for one part or for a whole memory."""

    memory: Memory
    part: str
    predicted: int
    """Planned bytes."""
    used: int
    """Used bytes."""
    reserve: int = 0
    """Bytes of `predicted` that are upper bounds. Not using them is no defect."""

    @property
    def off(self) -> float:
        """Relative difference of used and predicted bytes; infinite if bytes were used but none
        predicted.
        """
        if not self.predicted:
            return float("inf") if self.used else 0.0
        return self.used / self.predicted - 1

    @property
    def defect(self) -> bool:
        """Whether used and predicted bytes differ by more than `TOLERANCE`, apart from unused
        reserves.
        """
        return self.off > TOLERANCE or self.used < (1 - TOLERANCE) * (self.predicted - self.reserve)


def compare_totals(plan: Plan, measured: Mapping[Memory, int]) -> list[Comparison]:
    """Compare planned and used bytes of each memory that the plan may use. `measured` maps memories
    to used bytes.
    """
    parts = plan.bytes
    return [
        Comparison(
            memory=memory,
            part="total",
            predicted=plan.used(memory),
            used=measured.get(memory, 0),
            reserve=sum(size for part, size in parts.get(memory, {}).items() if part in RESERVES),
        )
        for memory in plan.budgets
    ]
