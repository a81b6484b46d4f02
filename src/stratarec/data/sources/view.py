"""Which columns of a log are read."""

from __future__ import annotations

from dataclasses import dataclass

from stratarec.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class View:
    """Which columns of a log are read, where that is not all that a schema names and nothing else."""

    schema: Schema
    label: bool = True
    """Whether the log has a label."""
    keep: tuple[str, ...] = ()
    """Columns to pass through."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read, each once."""
        schema, label = self.schema, self.schema.label_columns if self.label else ()
        derived = {feature.name for feature in schema.histories}
        features = [name for name in schema.names if name not in derived]
        features += [feature.weights for feature in schema.weighted]
        keys = [name for name in (schema.weight, schema.time, schema.session, schema.user) if name]
        return tuple(dict.fromkeys((*label, *features, *keys, *self.keep)))
