"""Configuration of tables, with TorchRec's names, and of the precision of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from stratarec.config.choices import OneOf
from stratarec.config.validate import check_choice, check_ranges
from stratarec.errors import ConfigError
from stratarec.kernels.policies import POLICIES


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Part of a larger table: its row r is row ``first + r * stride`` of the complete table."""

    first: int
    stride: int
    rows: int
    """Rows of the complete table."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig:
    """One table and the features that look it up.

    Examples
    --------
    >>> from stratarec import EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(
    ...     name="item", num_embeddings=1000, embedding_dim=8, feature_names=("item",)
    ... )
    >>> round(table.bound, 4)
    0.0316
    """

    name: str
    """Name of the table, unique in a collection."""
    num_embeddings: int
    """Number of rows."""
    embedding_dim: int
    """D, floats per row."""
    feature_names: tuple[str, ...] = ()
    """Features that are pooled from this table."""
    pooling: Literal["sum", "mean"] = "sum"
    """Function that combines the rows of a bag. The result for an empty bag is zeros."""
    sequence_features: tuple[str, ...] = ()
    """Features without pooling: one row for each id."""
    initial: float = 0.0
    """Initial weights are uniform in plus or minus this value; 0 means 1 / sqrt(rows of the
    complete table).
    """
    part: RowPart | None = None
    """Set if the table is a part of a larger table of the same name, whose initial values and noise
    it uses.
    """

    def __post_init__(self) -> None:
        check_ranges(
            self,
            f"table {self.name!r}: ",
            num_embeddings="[1, inf)",
            embedding_dim="[1, inf)",
            initial="[0, inf)",
        )
        check_choice(self.pooling, f"table {self.name!r}: pooling", ("sum", "mean"))
        if self.part is not None:
            last = self.part.first + (self.num_embeddings - 1) * self.part.stride
            if not 0 <= self.part.first <= last < self.part.rows:
                raise ConfigError(
                    f"table {self.name!r}: part is rows {self.part.first} to {last} of the complete table, "
                    f"expected 0 to {self.part.rows - 1}"
                )
        if not self.feature_names and not self.sequence_features:
            raise ConfigError(
                f"table {self.name!r}: no feature uses it; set feature_names or sequence_features"
            )

    @property
    def numbering(self) -> RowPart:
        """The part of the complete table; all rows if `part` is None."""
        return self.part or RowPart(first=0, stride=1, rows=self.num_embeddings)

    @property
    def bound(self) -> float:
        """Initial weights are uniform in plus or minus this value."""
        # Computed from the rows of the complete table, because its parts have the same initial
        # values.
        return self.initial or float(self.numbering.rows**-0.5)


def codec_names() -> Mapping[str, str]:
    """Return the name of each codec, and a text about it. The codecs load Numba."""
    from stratarec.kernels.codec.kinds import KINDS

    return {name: kind.about for name, kind in KINDS.items()}


CodecKind: TypeAlias = Annotated[str, OneOf(codec_names, "fp32")]
"""The name of a codec in recipes, checkpoints and exports: a key of `kernels.codec.kinds.KINDS`."""


def policy_names() -> Mapping[str, str]:
    """Return the name of each eviction policy, and a text about it."""
    return {name: policy.about for name, policy in POLICIES.items()}


CachePolicy: TypeAlias = Annotated[str, OneOf(policy_names)]
"""A key of `POLICIES`."""


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """Precision of rows outside level 0. In level 0, where rows are trained, they are float32."""

    kind: CodecKind = "fp32"
    """Storage of a weight. int8 and int4 are codes between the row's minimum and maximum weight."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Stochastic rounding is unbiased: updates smaller than a step of the format add up instead of
    being lost.
    """
    parameters: Literal["fp16", "fp32"] = "fp16"
    """Storage of the scale and the offset of an int8 or int4 row."""
    state: Literal["fp32", "bf16"] = "fp32"
    """Storage of the optimizer state. bf16 is always rounded stochastically: rounded to nearest,
    sums stop growing.
    """

    def __post_init__(self) -> None:
        check_choice(self.kind, "codec.kind", codec_names())
        check_choice(self.rounding, "codec.rounding", ("nearest", "stochastic"))
        check_choice(self.parameters, "codec.parameters", ("fp16", "fp32"))
        check_choice(self.state, "codec.state", ("fp32", "bf16"))


def check_tables(tables: tuple[EmbeddingBagConfig, ...]) -> None:
    """Raise a `ConfigError` for repeated names of tables or features."""
    for what, names in (
        ("table", [table.name for table in tables]),
        (
            "feature",
            [name for table in tables for name in (*table.feature_names, *table.sequence_features)],
        ),
    ):
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"{what} names must be distinct, repeated: {', '.join(repeated)}")
