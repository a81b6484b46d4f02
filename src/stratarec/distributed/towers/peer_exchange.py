"""What ranks of equal place on all hosts exchange, where the exchange is by towers (SPTT, arXiv 2403.00877, section 3).

Rank (t, l) of T hosts with L ranks each asks inside host t for what the T ranks (., l) ask of tower t. Three things
travel between peers: what is asked for, once a batch; what towers tell, and its gradient.

Shapes: B_s samples of the peer on host s, W_t columns that tower t tells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.wire import Span, Wire
from stratarec.errors import StrataError

_TYPES = {"int32": torch.int32, "int64": torch.int64}


def packed(note: Any, arrays: Sequence[Tensor]) -> Tensor:
    """Flat uint8 of a value of JSON and of integer arrays; `unpacked` is the inverse."""
    shapes = [(str(array.dtype).removeprefix("torch."), array.numel()) for array in arrays]
    head = json.dumps([note, shapes]).encode()
    # Arrays begin where their type may be read.
    head += b" " * (-len(head) % 8)
    size = torch.tensor([len(head)]).view(torch.uint8)
    parts = [array.contiguous().view(-1).view(torch.uint8) for array in arrays]
    padded = [torch.nn.functional.pad(part, (0, -part.numel() % 8)) for part in parts]
    return torch.cat([size, torch.from_numpy(np.frombuffer(head, dtype=np.uint8).copy()), *padded])


def unpacked(content: Tensor) -> tuple[Any, list[Tensor]]:
    """What `packed` took."""
    length = int(content[:8].clone().view(torch.int64))
    note, shapes = json.loads(content[8 : 8 + length].numpy().tobytes())
    found, at = [], 8 + length
    for kind, count in shapes:
        size = count * _TYPES[kind].itemsize
        found.append(content[at : at + size].clone().view(_TYPES[kind]))
        at += size + -size % 8
    return note, found


def send_requests(
    messages: Sequence[Tensor], failed: StrataError | None, peers: Channel, everybody: Channel, order: Sequence[int],
    stopped: Callable[[], bool] = never,
) -> list[Tensor]:  # fmt: skip
    """Give each peer its message and take theirs; a collective of all ranks.

    Parameters
    ----------
    messages : sequence of Tensor
        Flat uint8, one for each host.
    failed : StrataError or None
        Why this rank has none.
    peers, everybody : Channel
    order : sequence of int
        This rank's peers by their numbers among all ranks.

    Raises
    ------
    RankError
        On all ranks, where one of them failed.
    """
    sizes = [message.numel() for message in messages]
    # Sizes and failure in one collective of all ranks: peers alone could not end the others.
    told = everybody.everyones([failed is not None, *sizes], stopped)
    if any(found[0] for found in told):
        everybody.raise_together(failed, [found[0] for found in told])
    theirs = [told[rank][1 + peers.rank] for rank in order]
    taken = peers.exchange(torch.cat(list(messages)), sizes, theirs, stopped)
    return list(taken.split(theirs))  # type: ignore[no-untyped-call]


class Told(torch.autograd.Function):
    """What this host's tower tells of all peers' samples ``[sum of B_s, W_t]`` -> what all towers tell of this rank's.

    Forward and backward are a collective of peers each. The outputs are ``[B, W_s]`` for each tower s.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, hop: Hop) -> tuple[Tensor, ...]:
        ctx.hop = hop
        ctx.set_materialize_grads(True)
        parts = mine.detach().split(hop.sizes)  # type: ignore[no-untyped-call]
        return tuple(hop.send(parts, hop.theirs, hop.own, hop.wire, "towers"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        hop: Hop = ctx.hop
        found = hop.send(gradients, hop.own, hop.theirs, hop.gradient_wire, "tower gradients")
        return torch.cat(found), None


class Hop:
    """One batch's way between peers, for `Told`.

    Parameters
    ----------
    channel : Channel
        Of peers.
    wire, gradient_wire : Wire
    columns : sequence of int
        W of each tower.
    samples : int
        Of this rank.
    sizes : sequence of int
        B_s.
    step : int
        Noise of wires that round at random is a function of it.
    """

    def __init__(
        self, channel: Channel, wires: tuple[Wire, Wire], columns: Sequence[int], samples: int, sizes: Sequence[int],
        step: int,
    ) -> None:  # fmt: skip
        self.channel, (self.wire, self.gradient_wire), self.step = channel, wires, step
        self.sizes = list(sizes)
        self.own = [Span(samples, width) for width in columns]
        """Shapes of what this rank hears, tower by tower."""
        self.theirs = [Span(size, columns[channel.rank]) for size in sizes]
        """Shapes of what its tower tells, peer by peer."""

    def send(
        self, rows: Sequence[Tensor], given: Sequence[Span], taken: Sequence[Span], wire: Wire, direction: str
    ) -> list[Tensor]:  # fmt: skip
        """Rows of the shapes `given`, one for each peer, for rows of the shapes `taken`."""
        flat = torch.cat([part.float().reshape(-1) for part in rows])
        message = wire.encode(flat, given, direction, self.step)
        given_sizes, sizes = ([wire.bytes_of([shape]) for shape in shapes] for shapes in (given, taken))
        floats = wire.decode(self.channel.exchange(message, given_sizes, sizes), taken)
        parts = floats.split([count * width for count, width in taken])  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, taken, strict=True)]
