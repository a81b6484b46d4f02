"""The ``data`` section of a recipe: logs, and how a data set is prepared from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from stratarec.config.validate import check_directory, check_ranges
from stratarec.data.dedup_groups import GroupMode
from stratarec.data.sources import OnBadRow, SourceConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Logs, and how a data set is prepared from them.

    Examples
    --------
    >>> from stratarec import Recipe
    >>> config = Recipe.load("clicks.yaml").data
    >>> config.path
    'data/clicks'
    """

    source: SourceConfig
    """Raw logs."""
    path: str
    """Directory of the prepared data set."""
    on_bad_row: OnBadRow = "error"
    """``error`` stops at the first bad row; ``skip`` omits bad rows and reports their number."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Assignment of samples to train, valid and test."""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    """Limits that decide which values get a row."""
    shard_samples: int = 500_000
    """Approximate number of samples in a shard. `prepare` needs memory for two shards: one is
    encoded while another is written."""
    groups: GroupMode = "auto"
    """Deduplication groups, whose values are stored once for each distinct value: the groups that
    the schema declares and groups that are found to repeat within sessions (``auto``), only
    declared groups (``declared``), or none, in which case histories are stored as copies too
    (``none``)."""
    keep_rows: bool = True
    """Whether to store the file and row of each sample, so that predictions can be joined to the
    log. Training does not read them. They take 0.1 to 0.6 bytes per sample."""

    def __post_init__(self) -> None:
        check_ranges(self, "data.", shard_samples="[1, inf)")
        if not self.path:
            raise ConfigError("data.path is empty; set it to a directory for the prepared data set")
        check_directory(self.path, "data.path")
        schema = getattr(self.source, "schema", None)
        if schema is not None and schema.labels and self.split.negatives < 1:
            raise ConfigError(
                f"data.split.negatives is {self.split.negatives}, expected 1 with several labels; set it "
                "to 1, or use one label"
            )
