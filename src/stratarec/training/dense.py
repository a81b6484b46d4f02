"""Torch's optimizers without torch's compiler.

The methods of `torch.optim.Optimizer` are marked for `torch.compile`, and the mark imports the compiler when a method
is first called: a second of a processor and 60 MiB, in every process, for what is not compiled here. The functions
below the marks are the same to the bit.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch.optim import Optimizer

_MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@cache
def uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    """The optimizer `kind`, such as `torch.optim.Adam`, whose methods are not marked for `torch.compile`."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in _MARKED}
    # What unwrapping takes away from a step besides the mark: gradients are not recorded in it.
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)
