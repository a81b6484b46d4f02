"""Registry of codecs. Each codec is a `Kind` in a module of this folder and has an entry below.

Recipes, plans, checkpoints and exports refer to a codec by its name in `KINDS`; kernels by its
position there. The planner reads rates and penalty from its entry.
"""

from __future__ import annotations

from stratarec.kernels.codec.kinds.base import Form, Kind
from stratarec.kernels.codec.kinds.floats import BF16, FP16, FP32
from stratarec.kernels.codec.kinds.integers import INT4, INT8
from stratarec.registry import Registry

__all__ = ["KINDS", "Form", "Kind"]

KINDS = Registry("codec", {kind.name: kind for kind in (FP32, FP16, BF16, INT8, INT4)})
