"""Evict the row with the largest id, the least frequent one if ids are ranked by frequency."""

from __future__ import annotations

from stratarec.kernels.policies.base import Policy

RANK = Policy(
    about="the row with the largest id, the least frequent one if ids are ranked by frequency",
    score=None,
    keeps="first",
)
