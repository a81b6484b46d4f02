"""The data section of a recipe: which logs become which data set."""

from __future__ import annotations

from dataclasses import dataclass, field

from stratarec.config.validate import check_directory
from stratarec.data.dedup_groups import GroupMode
from stratarec.data.sources import OnBadRow, SourceConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Which logs become which data set."""

    source: SourceConfig
    """Raw logs."""
    path: str
    """Directory of the prepared data set."""
    on_bad_row: OnBadRow = "error"
    """``error`` stops at the first bad row; ``skip`` leaves bad rows out and reports how many."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """How samples are dealt to train, valid and test."""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    """Which values get rows of their own."""
    shard_samples: int = 500_000
    """About how many samples a shard holds; bounds the memory of `prepare`."""
    groups: GroupMode = "auto"
    """Which features are stored once for each distinct value: the groups that the schema declares and those that repeat
    within sessions (``auto``), the declared ones (``declared``), or none, histories as copies (``none``)."""
    keep_rows: bool = True
    """Store which row of which file each sample came from, so that predictions can be joined to the log. Training does
    not read it; it takes 0.1 to 0.6 bytes a sample."""

    def __post_init__(self) -> None:
        if self.shard_samples < 1:
            raise ConfigError(f"data.shard_samples is {self.shard_samples}, expected at least 1")
        if not self.path:
            raise ConfigError("data.path is empty, expected a directory for the prepared data set")
        check_directory(self.path, "data.path")
        schema = getattr(self.source, "schema", None)
        if schema is not None and schema.labels and self.split.negatives < 1:
            raise ConfigError(
                f"data.split.negatives is {self.split.negatives}: of samples with several labels none can be left out "
                "by one of them; set it to 1, or name one label"
            )
