"""Number formats of rows and gradients between ranks (`WIRES`); recipes read them without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from stratarec.config.choices import OneOf
from stratarec.embedding.config import CodecConfig
from stratarec.registry import Registry


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """Properties of one kind of wire.

    Parameters
    ----------
    about : str
        Relative error of a row, for the reference page.
    codec : callable or None
        Returns the codec of a row; None for float32.
    scaled : bool
        Whether each row is divided by a power of two, because float16 has a small range.
    dense : str
        Name of torch's type for the network's gradients on this wire; empty if the wire does not
        support them.
    predicted : bool
        Whether `plan` predicts steps with this wire.
    """

    about: str
    codec: Callable[[], CodecConfig] | None
    scaled: bool = False
    dense: str = ""
    predicted: bool = True


WIRES = Registry(
    "wire format",
    {
        "fp32": WireFormat(about="exact", codec=None, dense="float32"),
        "fp16": WireFormat(
            about="relative error of a row 0.02 %",
            codec=lambda: CodecConfig(kind="fp16", rounding="nearest", state="bf16"),
            scaled=True,
            predicted=False,
        ),
        "bf16": WireFormat(
            about="relative error of a row 0.16 %",
            codec=lambda: CodecConfig(kind="bf16", rounding="nearest"),
            dense="bfloat16",
        ),
        # int8 is rounded stochastically: rounding to nearest has a bias, which would accumulate
        # over steps.
        "int8": WireFormat(
            about="relative error of a row 0.4 %",
            codec=lambda: CodecConfig(kind="int8", rounding="stochastic", state="bf16"),
            scaled=True,
        ),
    },
)
WireKind: TypeAlias = Annotated[str, OneOf(lambda: {name: wire.about for name, wire in WIRES.items()})]
"""A key of `WIRES`."""
DenseWireKind: TypeAlias = Annotated[
    str, OneOf(lambda: [name for name, wire in WIRES.items() if wire.dense])
]
"""A key of `WIRES` whose format has a type for gradients of the network."""
