"""How the rows of a table are encoded in their home."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """The precision of a row at rest. In level 0, where it is trained, every row is float32."""

    kind: Literal["fp32", "fp16", "bf16", "int8", "int4"] = "fp32"
    """Storage of a weight. int8 and int4 are codes between the row's own least and greatest weight."""
    rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Stochastic rounding is unbiased: updates smaller than a step of the storage add up instead of vanishing."""
    parameters: Literal["fp16", "fp32"] = "fp16"
    """Storage of the scale and the offset of an int8 or int4 row."""
    state: Literal["fp32", "bf16"] = "fp32"
    """Storage of the optimizer state; bf16 is always stochastically rounded, since a nearest sum stops growing."""

    def __post_init__(self) -> None:
        choices = get_type_hints(type(self))
        for field in fields(self):
            value, allowed = getattr(self, field.name), get_args(choices[field.name])
            if value not in allowed:
                raise ConfigError(f"codec.{field.name} is {value!r}, expected one of {', '.join(allowed)}")
