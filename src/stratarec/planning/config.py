"""The ``memory:`` section of a recipe: budgets, precision and cache.

Without this section every table is float32 in DRAM. If `train.device` is ``cuda``, as much of the
tables as fits is in GPU memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from stratarec.config.choices import OneOf
from stratarec.config.units import parse_bytes
from stratarec.config.validate import check_choice, check_ranges
from stratarec.embedding.config import CodecConfig, CodecKind, codec_names, policy_names
from stratarec.errors import ConfigError
from stratarec.kernels.policies import POLICIES

Precision: TypeAlias = Annotated[str, OneOf(lambda: {"auto": "", **codec_names()}, "auto", "fp32")]
Policy: TypeAlias = Annotated[str, OneOf(lambda: {"auto": "", **policy_names()}, "auto")]
Memory: TypeAlias = Literal["hbm", "dram", "mapped", "block"]


MOST_AHEAD = 64
"""Largest value of ``lookahead``."""


def _size(name: str) -> Callable[[Any], Any]:
    """Return the validator of a size field. It converts text to a number of bytes and leaves null
    unchanged.
    """
    return partial(_parse, name=name)


def _parse(value: Any, *, name: str) -> Any:
    if name == "memory.hbm" and str(value) == "0":
        return 0
    return None if value is None else parse_bytes(value, name)


def _set_size(config: object, field_name: str, name: str) -> None:
    """Convert a size that was given as text, also if the dataclass was created in Python and not
    from a recipe.
    """
    object.__setattr__(config, field_name, _parse(getattr(config, field_name), name=name))


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Block device on which an SSD store appends the rows that are neither in DRAM nor in
    `mapped`.
    """

    path: str
    """Directory on the device. It is created if it does not exist."""
    budget: Annotated[int | None, BeforeValidator(_size("memory.block.budget"))] = None
    """Maximum bytes of the SSD stores of each process; null for no limit."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("memory.block.path is empty, expected a directory on the block device")
        _set_size(self, "budget", "memory.block.budget")


@dataclass(frozen=True, kw_only=True)
class MappedConfig:
    """Byte-addressable memory with a file system: DAX, CXL or tmpfs. Rows are an array in a mapped
    file.
    """

    path: str
    """Directory in the file system. It is created if it does not exist."""
    budget: Annotated[int | None, BeforeValidator(_size("memory.mapped.budget"))] = None
    """Maximum bytes of the file of each process; null for no limit."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("memory.mapped.path is empty, expected a directory")
        _set_size(self, "budget", "memory.mapped.budget")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Set-associative float32 cache over rows that have their home in another memory or as encoded
    records.
    """

    policy: Policy = "auto"
    """Choice of the row that a full set evicts. ``auto`` is ``rank`` if the ids of all tables are
    ranked by frequency. It is ``lru`` if a vocabulary is of kind ``hash``, or if the values of an
    earlier data set come first in it, as in the periods of `stratarec continue`. A plan has the
    policy that ``auto`` became."""
    fraction: float | None = None
    """Cache rows divided by a table's rows. It is raised if the pinned rows of a table need more.
    With null, the planner chooses a size within the budget, or 0.05 if there is no budget."""
    ways: int = 32
    """Number of slots per set."""

    def __post_init__(self) -> None:
        check_choice(self.policy, "memory.cache.policy", ("auto", *POLICIES))
        check_ranges(self, "memory.cache.", fraction="(0, 1]", ways="[1, 256]")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Memories that store rows, with their budgets, and the precision and cache of rows."""

    hbm: Annotated[int | None, BeforeValidator(_size("memory.hbm"))] = None
    """Bytes of GPU memory for rows, optimizer state and the workspace of an update. Requires
    `train.device` ``cuda``. Rows are trained in GPU memory, as whole tables or in caches over rows
    in the memories below. null for all free GPU memory that the network and a batch do not need; 0
    keeps rows out of GPU memory."""
    dram: Annotated[int | None, BeforeValidator(_size("memory.dram"))] = None
    """Bytes of DRAM per process for tables, optimizer state, caches with their metadata, and the
    workspace of an update; null for no limit. The network, the loader and activations need
    additional memory."""
    block: BlockConfig | None = None
    """A block device, such as an SSD."""
    mapped: MappedConfig | None = None
    """Byte-addressable memory that is mapped through a path."""
    precision: Precision | Mapping[str, Precision] = "auto"
    """Precision of rows in their home: one for all tables, or table -> precision with ``default``
    for the other tables. ``auto`` lowers the precision only as far as the budgets require. Any
    other value is used for tables for which a cache smaller than the table is sufficient. A table
    is float32 in level 0 if all its rows would be pinned in the cache, because no row would be read
    from its home."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Rounding of a row that is encoded and written to its home."""
    parameters: Literal["fp16", "fp32"] = "fp16"
    """Precision of the scale and offset of int8 and int4 rows."""
    state: Literal["fp32", "bf16"] = "fp32"
    """Precision of the optimizer state of rows in their home."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Float32 cache over rows in their home."""
    lookahead: int = 1
    """Number of batches that are staged ahead of training. With 0, each batch is staged when it is
    needed.
    """

    def __post_init__(self) -> None:
        _set_size(self, "hbm", "memory.hbm")
        _set_size(self, "dram", "memory.dram")
        named = {"": self.precision} if isinstance(self.precision, str) else dict(self.precision)
        for table, precision in named.items():
            if precision not in ("auto", "fp32"):
                check_choice(
                    precision, f"memory.precision{'.' * bool(table)}{table}", ("auto", *codec_names())
                )
        check_ranges(self, "memory.", lookahead=f"[0, {MOST_AHEAD}]")
        if self.block and self.mapped and self.block.path == self.mapped.path:
            raise ConfigError(
                f"memory.block.path and memory.mapped.path are both {self.block.path!r}; name two"
            )

    def times(self, ranks: int) -> MemoryConfig:
        """Return this section with the budgets of `ranks` processes together."""

        def all_of(budget: int | None) -> int | None:
            return None if budget is None else budget * ranks

        block = self.block and replace(self.block, budget=all_of(self.block.budget))
        mapped = self.mapped and replace(self.mapped, budget=all_of(self.mapped.budget))
        return replace(self, dram=all_of(self.dram), block=block, mapped=mapped)

    @property
    def level0(self) -> Memory:
        """Memory in which rows are trained. It is ``hbm`` only if `hbm` is set to a number above
        0.
        """
        return "hbm" if self.hbm else "dram"

    @property
    def level0_budget(self) -> int | None:
        """Maximum bytes of tables in the memory `level0`; None for no limit."""
        return self.hbm or self.dram

    def with_level0_budget(self, budget: int | None) -> MemoryConfig:
        """Return this section with `budget` bytes for tables in the memory `level0`; None for no
        limit.
        """
        return replace(self, hbm=budget) if self.hbm else replace(self, dram=budget)

    @property
    def is_identity(self) -> bool:
        """Whether every table is float32 in DRAM and there is nothing to plan."""
        named = {self.precision} if isinstance(self.precision, str) else set(self.precision.values())
        return not self.hbm and self.dram is None and named <= {"auto", "fp32"}

    def table_precision(self, table: str) -> Precision:
        """Return the precision of `table`: its own, that of ``default``, or ``auto``."""
        if isinstance(self.precision, str):
            return self.precision
        return self.precision.get(table, self.precision.get("default", "auto"))

    def check_tables(self, tables: Iterable[str]) -> None:
        """Raise `ConfigError` if there is a precision for a table that does not exist."""
        names = list(tables)
        for name in () if isinstance(self.precision, str) else self.precision:
            if name != "default" and name not in names:
                close = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
                raise ConfigError(f"memory.precision.{name}: no such table; {hint}")

    def codec(self, kind: CodecKind) -> CodecConfig:
        """Return the codec of `kind` with this section's rounding, parameters and state."""
        return CodecConfig(kind=kind, rounding=self.rounding, parameters=self.parameters, state=self.state)
