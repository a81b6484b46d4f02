"""Registry of codecs: each is a `Kind` in a module of this folder, and an entry below.

Recipes, plans, checkpoints and exports use the names in `KINDS`, and the planner its numbers. Kernels number the kinds
in this order.
"""

from __future__ import annotations

from stratarec.kernels.codec.kinds.base import Form, Kind
from stratarec.kernels.codec.kinds.floats import BF16, FP16, FP32
from stratarec.kernels.codec.kinds.integers import INT4, INT8

__all__ = ["KINDS", "Form", "Kind"]

KINDS = {kind.name: kind for kind in (FP32, FP16, BF16, INT8, INT4)}
