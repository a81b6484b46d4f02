"""Eviction policies of the row cache, each a module of this folder and an entry of `POLICIES`."""

from __future__ import annotations

from stratarec.kernels.policies.base import Policy
from stratarec.kernels.policies.lru import LRU
from stratarec.kernels.policies.rank import RANK
from stratarec.registry import Registry

__all__ = ["POLICIES", "Policy"]

POLICIES = Registry("eviction policy", {"lru": LRU, "rank": RANK})
