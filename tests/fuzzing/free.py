"""Fields that may be changed by whoever seals them again, and then change what comes of an artefact; each with why."""

from __future__ import annotations

import re

_FREE = (
    # Bytes that were changed and sealed again are what they say.
    r".*: bytes .* sealed",
    # An export is what it says: these are how its columns are standardised.
    r"export: field manifest.json moments\..*",
    # The number of the next batch, which rounding noise of int8 rows is a function of.
    r"(cached|log): field checkpoints/.*/state.json tables.batches .*",
)


def is_free(what: str) -> bool:
    """Whether a mutation may give another result."""
    return any(re.fullmatch(pattern, what) for pattern in _FREE)
