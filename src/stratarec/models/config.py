"""Settings that all models share.

Recipes import the modules of settings, which need neither torch nor Numba: both take seconds to
load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratarec.config.validate import check_ranges
from stratarec.errors import ConfigError
from stratarec.models.tower_config import TowersConfig

if TYPE_CHECKING:
    from stratarec.models.layers import MLP

Initialization = Literal["dlrm", "xavier"]


def check_sizes(field_name: str, sizes: Sequence[int], *, least: int = 0) -> None:
    """Raise `ConfigError` unless all layer sizes are positive and there are at least `least` of
    them.
    """
    if len(sizes) < least or any(size < 1 for size in sizes):
        count = "at least one positive size" if least else "positive sizes"
        raise ConfigError(f"model.{field_name} is {list(sizes)}, expected {count}")


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    """Pooling of a history to one vector."""

    pooling: Literal["mean", "target_attention", "transformer"] = "mean"
    """``mean`` of the rows. ``target_attention``: a sum with weights that depend on the candidate
    item (DIN, Zhou et al. 2018). ``transformer``: self-attention, then the mean; it does not depend
    on the candidate."""
    attention_mlp: tuple[int, ...] = (36,)
    """Hidden sizes of the attention's scoring MLP."""
    layers: int = 1
    """Number of transformer blocks."""
    heads: int = 2
    """Number of attention heads per block; must divide the embedding width."""

    def __post_init__(self) -> None:
        check_ranges(self, "model.history.", layers="[1, inf)", heads="[1, inf)")
        check_sizes("history.attention_mlp", self.attention_mlp, least=1)


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Heads for several labels; not used with one label."""

    kind: Literal["shared_bottom", "mmoe"] = "shared_bottom"
    """``shared_bottom``: each label has a tower on the network's last layer; ``mmoe``: each label
    has a tower on a separate mixture of experts (Ma et al. 2018)."""
    tower_mlp: tuple[int, ...] = (32,)
    """Hidden sizes of each label's tower; a last layer of size 1 follows."""
    experts: int = 4
    """Number of experts of ``mmoe``."""
    expert_mlp: tuple[int, ...] = (64,)
    """Layer sizes of each expert."""

    def __post_init__(self) -> None:
        check_sizes("heads.tower_mlp", self.tower_mlp)
        check_sizes("heads.expert_mlp", self.expert_mlp, least=1)
        check_ranges(self, "model.heads.", experts="[1, inf)")


@dataclass(frozen=True, kw_only=True)
class VectorsConfig:
    """Settings of all models."""

    kind: str
    """Name of the model."""
    first_order: ClassVar[bool] = False
    """Whether a row has, after its vector, a first-order weight."""
    layer_counts: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that set a number of layers, at least 1; exports limit these numbers."""
    needed_layers: ClassVar[tuple[str, ...]] = ()
    """Names of the fields with hidden sizes that must not be empty."""
    default_overrides: ClassVar[Mapping[str, Any]] = {}
    """Field of a recipe, such as ``train.embedding.kind`` -> default value for this model."""
    embedding_dim: int = 16
    """D, width of the vectors that are the network's input."""
    embedding_dims: Mapping[str, int] = field(default_factory=dict)
    """Vocabulary -> width of its table, if it differs from `embedding_dim`. A learned linear
    projection maps its vectors to `embedding_dim` (mixed dimensions, Ginart et al. 2019, arXiv
    1909.11810). Small vocabularies need smaller widths."""
    pooling: Literal["mean", "sum"] = "mean"
    """Pooling of features with several values; a weighted mean or sum if the values have
    weights.
    """
    history: HistoryConfig = field(default_factory=HistoryConfig)
    """Pooling of histories and sequences."""
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    """Layers for several labels on top of the shared network."""
    towers: TowersConfig | None = None
    """Towers: groups of features whose outputs are computed separately and then combined; null for
    no towers.
    """
    dropout: float = 0.0
    """Dropout probability after each hidden layer; not applied in the attention over histories."""
    initialization: Initialization = "dlrm"
    """Initialization of linear layers: weights are drawn from Xavier's normal distribution; biases
    are random (``dlrm``) or 0 (``xavier``)."""
    initial_logit: Literal["click_rate", "zero"] = "click_rate"
    """Initial bias of the last layer: the log-odds of the click rate, or 0. With 0 all rows first
    learn the click rate together, which helps some models whose products of vectors are small at
    the start."""
    initial_rows: float = 0.0
    """Bound b of the initial weights of rows, which are uniform in [-b, b]. 0 means 1 / sqrt(R) for
    a table of R rows, so the weights of small tables are larger. If a table grows later, R remains
    its first number of rows."""
    batch_norm: bool = False
    """Whether each hidden layer has batch normalization before its ReLU; not applied in the
    attention over histories. Each rank normalizes over its own samples."""

    one_label: ClassVar[bool] = False
    """Whether the model supports only one label."""

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("embedding_dim", *self.layer_counts), "[1, inf)")
        check_ranges(self, "model.", initial_rows="[0, inf)", dropout="[0, 1)", **counts)
        for name, width in self.embedding_dims.items():
            if width < 1:
                raise ConfigError(f"model.embedding_dims.{name} is {width}, expected at least 1")
        for name, sizes in vars(self).items():
            if name.endswith(("_mlp", "_layers")) and isinstance(sizes, list | tuple):
                check_sizes(name, sizes, least=name in self.needed_layers)

    def mlp(self, inputs: int, sizes: Sequence[int], *, last: int | None = None) -> MLP:
        """Return an `MLP` with the dropout and batch normalization settings of this model."""
        from stratarec.models.layers import MLP

        return MLP(inputs, sizes, dropout=self.dropout, batch_norm=self.batch_norm, last=last)

    def table_width(self, vocabulary: str) -> int:
        """Return the floats per row of the table of `vocabulary`."""
        return self.embedding_dims.get(vocabulary, self.vector_width)

    @property
    def vector_width(self) -> int:
        """Width of a value's input to the network: its vector, and its first-order weight if the
        model has one.
        """
        return self.embedding_dim + self.first_order

    def check_labels(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` if there are several labels and the model supports only one."""
        if self.one_label and len(names) > 1:
            raise ConfigError(
                f"model.kind is {self.kind}, which supports one label; got {', '.join(names)}. Set "
                "model.kind to another kind, such as dlrm"
            )

    def check_vocabularies(self, names: Collection[str]) -> None:
        """Raise `ConfigError` if `embedding_dims` names an unknown vocabulary."""
        other = next((name for name in self.embedding_dims if name not in names), None)
        if other is not None:
            raise ConfigError(
                f"model.embedding_dims.{other}: no such vocabulary; there are {', '.join(names)}"
            )
