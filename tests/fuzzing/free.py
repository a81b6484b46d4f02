"""Fields that a writer may change and seal again, and that then change what comes of an artefact; each with why."""

from __future__ import annotations

import re

_FREE = (
    # Bytes that were changed and sealed again are what they say.
    r".*: bytes .* sealed",
    # How raw columns are read and standardised is what a data set or an export says of itself.
    r"export: field manifest.json (moments|schema\.(dense|sparse)\.\d+)\..*",
    r"(data|plain): field dataset.json about.moments.*",
    # A plan that was made for another memory section is no plan of this run: it is planned anew, and rounded anew.
    r"(cached|log): field plan.json memory.*",
    # The number of the next batch, which rounding noise of int8 rows is a function of.
    r"(cached|log): field checkpoints/.*/state.json tables.batches .*",
)


def is_free(what: str) -> bool:
    """Whether a mutation may give another result."""
    return any(re.fullmatch(pattern, what) for pattern in _FREE)
