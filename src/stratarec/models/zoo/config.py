"""Settings of each model, and its defaults for other fields of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from stratarec.config.validate import check_ranges
from stratarec.errors import ConfigError
from stratarec.models.config import HistoryConfig, VectorsConfig

# Defaults for rows with a first-order weight. The gradients of this weight are many times larger
# than the gradients of the vector, and would determine a learning rate that is shared by all
# weights of the row.
FIRST_ORDER = {"train.embedding.kind": "adagrad"}
# Defaults for models without a network: they do not overfit in the second epoch, and early stopping
# ends training.
SHALLOW = {"train.epochs": 5}
# Bound of the initial weights of rows whose products are summed: with 40 fields, the sum is then
# within 0.1 of 0. With 1 / sqrt(rows), which is up to 1 for small tables, the sum would be many
# logits, which training must unlearn first.
MULTIPLIED = 0.05
# Default of `EnsembleConfig.trees` where trees are used: validation ends the fit long before.
MOST_TREES = 10_000


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(VectorsConfig):
    """Sizes of a DLRM."""

    kind: Literal["dlrm"] = "dlrm"
    bottom_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes of the network over dense features; a last layer of size `embedding_dim`
    follows.
    """
    top_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes of the network over interactions; a last layer of size 1 follows."""
    interaction: Literal["dot", "cat"] = "dot"
    """Input of the top MLP. ``dot``: the output of the bottom MLP and the dot products of all pairs
    of vectors; ``cat``: the output of the bottom MLP and the vectors, concatenated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interaction == "cat" and self.towers is not None:
            raise ConfigError(
                "model.towers requires model.interaction dot; remove model.towers, or set dot"
            )


@dataclass(frozen=True, kw_only=True)
class DCNv2Config(VectorsConfig):
    """Sizes of a DCN V2."""

    kind: Literal["dcnv2"] = "dcnv2"
    layer_counts: ClassVar[tuple[str, ...]] = ("cross_layers",)
    structure: Literal["stacked", "parallel"] = "parallel"
    """``stacked``: the deep network follows the crosses; ``parallel``: both use the input and are
    joined at the end.
    """
    cross_layers: int = 3
    """Number of cross layers; n layers give crosses of up to n + 1 features."""
    low_rank: int = 0
    """Rank of the cross matrices, U V^T; 0 for full matrices."""
    deep_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes of the deep network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "model.", low_rank="[0, inf)")


@dataclass(frozen=True, kw_only=True)
class LRConfig(VectorsConfig):
    """Settings of a logistic regression, whose tables have one weight per value."""

    kind: Literal["lr"] = "lr"
    # High learning rates, because there is no network: with the usual rates, weights hardly leave
    # 0.
    default_overrides: ClassVar[Mapping[str, Any]] = {
        **SHALLOW,
        "train.dense.learning_rate": 0.02,
        "train.embedding.learning_rate": 0.1,
    }
    embedding_dim: int = 1
    """Must be 1, the width of a weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding_dim != 1:
            raise ConfigError(
                f"model.embedding_dim is {self.embedding_dim}, expected 1: model.kind lr "
                "has one weight per value"
            )


@dataclass(frozen=True, kw_only=True)
class FMConfig(VectorsConfig):
    """Settings of a factorization machine."""

    kind: Literal["fm"] = "fm"
    first_order: ClassVar[bool] = True
    default_overrides: ClassVar[Mapping[str, Any]] = {
        **FIRST_ORDER,
        **SHALLOW,
        "train.dense.learning_rate": 0.01,
    }
    initial_rows: float = MULTIPLIED


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(VectorsConfig):
    """Sizes of a Wide & Deep network."""

    kind: Literal["wide_deep"] = "wide_deep"
    needed_layers: ClassVar[tuple[str, ...]] = ("deep_mlp",)
    first_order: ClassVar[bool] = True
    default_overrides: ClassVar[Mapping[str, Any]] = FIRST_ORDER
    deep_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes of the deep network."""


@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(VectorsConfig):
    """Sizes of a DeepFM."""

    kind: Literal["deepfm"] = "deepfm"
    needed_layers: ClassVar[tuple[str, ...]] = ("deep_mlp",)
    first_order: ClassVar[bool] = True
    default_overrides: ClassVar[Mapping[str, Any]] = FIRST_ORDER
    initial_rows: float = MULTIPLIED
    deep_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes of the deep network."""


@dataclass(frozen=True, kw_only=True)
class FinalMLPConfig(VectorsConfig):
    """Sizes of a FinalMLP."""

    kind: Literal["finalmlp"] = "finalmlp"
    layer_counts: ClassVar[tuple[str, ...]] = ("fusion_heads",)
    needed_layers: ClassVar[tuple[str, ...]] = ("first_mlp", "second_mlp")
    first_mlp: tuple[int, ...] = (512,)
    """Hidden sizes of the first network."""
    second_mlp: tuple[int, ...] = (512,)
    """Hidden sizes of the second network."""
    gate_features: tuple[tuple[str, ...], ...] = ()
    """Features of each network's gate, such as ``[[user], [item]]``; empty for no gates."""
    gate_vectors: Literal["shared", "own"] = "shared"
    """Vectors that gates use: the same vectors as the networks (``shared``), or separate vectors
    (``own``), as in the published results. Separate vectors add D weights to every row of every
    table."""
    gate_mlp: tuple[int, ...] = (64,)
    """Hidden sizes of a gate, which has neither dropout nor batch normalization."""
    fusion_heads: int = 1
    """K, number of heads, into which the outputs of both networks are split; must divide both
    sizes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("first_mlp", "second_mlp"):
            if getattr(self, name)[-1] % self.fusion_heads:
                raise ConfigError(
                    f"model.fusion_heads is {self.fusion_heads}, expected a divisor of the last size of "
                    f"{name}, {getattr(self, name)[-1]}"
                )
        if self.gate_vectors == "own" and not self.gate_features:
            raise ConfigError(
                "model.gate_vectors is own, but model.gate_features is empty: add features, or set "
                "gate_vectors to shared"
            )
        if self.gate_features and (len(self.gate_features) != 2 or not all(self.gate_features)):
            raise ConfigError(
                f"model.gate_features is {[list(names) for names in self.gate_features]}, expected two "
                "lists of features, or none"
            )

    @property
    def vector_width(self) -> int:
        """Width of a row: D, or 2 D if gates have separate vectors."""
        return self.embedding_dim * (2 if self.gate_vectors == "own" else 1)


@dataclass(frozen=True, kw_only=True)
class DINConfig(VectorsConfig):
    """Sizes of a deep interest network."""

    kind: Literal["din"] = "din"
    needed_layers: ClassVar[tuple[str, ...]] = ("deep_mlp",)
    history: HistoryConfig = field(default_factory=partial(HistoryConfig, pooling="target_attention"))
    """Pooling of histories and sequences, by default target attention."""
    deep_mlp: tuple[int, ...] = (200, 80)
    """Hidden sizes of the deep network."""


MemberKind = Literal["plain", "dropout", "field_dropout", "narrow"]


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(VectorsConfig):
    """Sizes of an ensemble. A row contains a vector and a first-order weight for each member."""

    kind: Literal["ensemble"] = "ensemble"
    layer_counts: ClassVar[tuple[str, ...]] = ("members",)
    needed_layers: ClassVar[tuple[str, ...]] = ("member_mlp",)
    one_label: ClassVar[bool] = True
    embedding_dim: int = 8
    """D, width of a member's vectors."""
    members: int = 8
    """K; training minimizes the log loss of each member, and the score is a weighted mean of their
    logits.
    """
    member_kinds: tuple[MemberKind, ...] = ("dropout", "field_dropout", "plain", "narrow")
    """Members are in pairs, and these are the kinds of the pairs, repeated if there are more. The
    second member of a pair starts as a linear model. ``dropout``: up to three times the dropout
    rate. ``field_dropout``: drops a fifth of each sample's features. ``narrow``: a quarter of the
    hidden outputs, no dropout."""
    member_mlp: tuple[int, ...] = (128, 64)
    """Hidden sizes of each member's network."""
    trees: int = 0
    """Most boosted trees of each of six more members, which LightGBM fits while the networks train.
    A member has fewer where validation stops improving. 0: no such members."""
    bins: int = 32
    """Q, number of bins between quantiles of a number; its effect is linear in each bin."""
    dropout: float = 0.1
    initial_rows: float = 0.08

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "model.", bins="[1, inf)", trees="[0, 100000]")
        if not self.member_kinds:
            raise ConfigError("model.member_kinds is empty, expected at least one kind, such as plain")
        if self.batch_norm:
            raise ConfigError("ensemble does not support model.batch_norm; set it to false")

    @property
    def vector_width(self) -> int:
        """Width of a row: every member's vector, followed by its first-order weight."""
        return self.members * (self.embedding_dim + 1)

    @property
    def kinds(self) -> list[MemberKind]:
        """Kind of each member."""
        return [self.member_kinds[member // 2 % len(self.member_kinds)] for member in range(self.members)]
