"""Evict the row that was not used for the longest time."""

from __future__ import annotations

from stratarec.kernels.policies.base import Policy

LRU = Policy(about="the longest unused row", score=None, keeps="recent")
