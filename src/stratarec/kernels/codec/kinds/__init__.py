"""The registry of codecs: a storage of weights is a file here and an entry below.

Recipes, plans, checkpoints and exports take the names, and the planner its numbers, from `KINDS`; kernels choose among
them in this order.
"""

from __future__ import annotations

from stratarec.kernels.codec.kinds.base import Form, Kind
from stratarec.kernels.codec.kinds.fp import BF16, FP16, FP32
from stratarec.kernels.codec.kinds.int4 import INT4
from stratarec.kernels.codec.kinds.int8 import INT8

__all__ = ["KINDS", "Form", "Kind"]

KINDS = {kind.name: kind for kind in (FP32, FP16, BF16, INT8, INT4)}
