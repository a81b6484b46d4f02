"""What ranks do together: exchange bytes, gather, add in the order of ranks, agree.

All of it is `all_to_all_single`, of which gloo has one implementation for uneven sizes. Nothing is reduced by gloo: its
`reduce_scatter` is one all-reduce a rank, it adds in an order of its own and does not know bfloat16. Sums are taken
here, in the order of ranks, so that every run gives the same bits.

Gradients of weights that every rank has travel in one flat buffer, not by DDP, whose buckets change after the first
step, and again after a run was resumed, and with them the order of sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from stratarec.distributed.failures import RollCall
from stratarec.embedding.lookup_engine import WaitAbandoned
from stratarec.errors import RankError, StrataError

Result = TypeVar("Result")

# A wait that may be given up looks again after this share of what it has waited, within limits: on few cores every look
# is taken from whoever computes.
_POLL_SHARE, _POLL_SECONDS = 1 / 16, (1e-4, 2e-3)


def never() -> bool:
    """A wait that is not to be given up."""
    return False


class Channel:
    """All ranks, on connections of their own: collectives of one channel never mix with those of another.

    One thread at a time uses a channel, and every rank calls its methods in the same order.

    Parameters
    ----------
    rank, ranks : int
    group : ProcessGroup or None
        None where there is one rank.
    roll : RollCall or None
        Says who is gone when a collective fails; None where there is one rank.
    watch : callable
        Called while it waits; may raise.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None = None,
        roll: RollCall | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._group, self._roll, self._watch = group, roll, watch
        self.sent_bytes = 0
        """Bytes given to other ranks so far."""
        self.wait_seconds = 0.0
        """Time spent waiting for them so far, by the thread that uses the channel."""

    def close(self) -> None:
        """Drop the connections, so that the others see at once that this rank is gone; ends waits that may be."""
        # Not destroyed here: a group is made together, and `joined` ends all of them.
        self._group = None

    def exchange(
        self, given: Tensor, given_sizes: Sequence[int], sizes: Sequence[int], stopped: Callable[[], bool] = never
    ) -> Tensor:
        """Give every rank its part of `given` and take theirs.

        Parameters
        ----------
        given : Tensor
            Flat, contiguous.
        given_sizes, sizes : sequence of int
            Elements for each rank, and from each.
        stopped : callable
            Ends the wait; the channel is of no use afterwards.

        Returns
        -------
        Tensor
            What the ranks gave, rank after rank.

        Raises
        ------
        RankError
            When a rank is gone.
        Stopped
            When `stopped` came true.
        """
        if self._group is None:
            return given
        began = time.perf_counter()
        # As bytes: gloo has no bfloat16 for some collectives, and all of them are copies here.
        width = given.element_size()
        taken = torch.empty(sum(sizes) * width, dtype=torch.uint8)
        try:
            work = dist.all_to_all_single(
                taken, given.view(torch.uint8), [size * width for size in sizes],
                [size * width for size in given_sizes], group=self._group, async_op=True,
            )  # fmt: skip
            self._wait(work, stopped)
        except StrataError:
            raise
        except RuntimeError as error:
            assert self._roll is not None
            raise self._roll.explain(error) from error
        self.wait_seconds += time.perf_counter() - began
        self.sent_bytes += (sum(given_sizes) - given_sizes[self.rank]) * width
        return taken.view(given.dtype)

    def _wait(self, work: dist.Work, stopped: Callable[[], bool]) -> None:
        if stopped is not never or self._watch is not None:
            began, (least, most) = time.perf_counter(), _POLL_SECONDS
            while not work.is_completed():
                if stopped() or self._group is None:
                    raise WaitAbandoned
                if self._watch is not None:
                    self._watch()
                time.sleep(min(max((time.perf_counter() - began) * _POLL_SHARE, least), most))
        work.wait()

    def everyones(self, numbers: Sequence[int], stopped: Callable[[], bool] = never) -> list[list[int]]:
        """The whole numbers of every rank, which are equally many everywhere."""
        found: list[list[int]] = self._spread(torch.tensor(numbers, dtype=torch.int64), stopped).tolist()
        return found

    def figures(self, numbers: Sequence[float]) -> list[list[float]]:
        """As `everyones`, of float64."""
        found: list[list[float]] = self._spread(torch.tensor(numbers, dtype=torch.float64), never).tolist()
        return found

    def _spread(self, mine: Tensor, stopped: Callable[[], bool]) -> Tensor:
        """``[N, n]`` from ``[n]`` of every rank."""
        even = [mine.numel()] * self.ranks
        return self.exchange(mine.repeat(self.ranks), even, even, stopped).view(self.ranks, -1)

    def gather(self, content: bytes) -> list[bytes]:
        """What every rank gave, in the order of ranks, on all of them."""
        sizes = [size for (size,) in self.everyones([len(content)])]
        # Copied, since a view of bytes cannot be written, which torch warns of.
        given = torch.from_numpy(np.frombuffer(content * self.ranks, dtype=np.uint8).copy())
        parts = self.exchange(given, [len(content)] * self.ranks, sizes).split(sizes)  # type: ignore[no-untyped-call]
        return [part.numpy().tobytes() for part in parts]

    def agree(self, error: StrataError | None, stopped: Callable[[], bool] = never) -> None:
        """Return when every rank came here without an error; else raise the same error on all of them.

        Raises
        ------
        RankError
            With the message of the first rank that had an error, and that rank's number.
        """
        failed = [bad for (bad,) in self.everyones([error is not None], stopped)]
        if any(failed):
            self.raise_together(error, failed)

    def together(self, work: Callable[[], Result]) -> Result:
        """What `work` gives this rank, once it did so on every rank.

        Raises
        ------
        RankError
            On all ranks, as by `agree`, where it raised a `StrataError` on one of them.
        """
        failed: StrataError | None = None
        try:
            found = work()
        except StrataError as error:
            # Not raised yet: the others would wait here for this rank until the timeout.
            failed = error
        self.agree(failed)
        return found

    def raise_together(self, error: StrataError | None, failed: Sequence[int]) -> NoReturn:
        """As `agree` once every rank knows which of them `failed`."""
        if self._group is None and error is not None:
            raise error
        # Those that failed nothing take part, too: a gather is a collective.
        messages = self.gather(str(error).encode() if error is not None else b"")
        first = next(rank for rank, bad in enumerate(failed) if bad)
        raise RankError(f"rank {first}: {messages[first].decode()}") from error

    def sum(
        self, flat: Tensor, order: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:  # fmt: skip
        """``[n]`` float32: the sum over ranks, added in their order; the same bits on all of them.

        Each rank adds a piece of it, so 2 (N - 1) / N of the bytes travel, as in the best all-reduce.

        Parameters
        ----------
        order : sequence of int
            Ranks as they are added; by default 0, 1, ...
        dtype : torch.dtype
            In which numbers and sums travel; they are added in float32.
        """
        if self._group is None:
            return flat
        piece = -(-flat.numel() // self.ranks)
        # As long as all pieces together: zeros at the end change no sum, and pieces stay even.
        padded = torch.zeros(piece * self.ranks, dtype=dtype)
        padded[: flat.numel()] = flat
        even = [piece] * self.ranks
        parts = self.exchange(padded, even, even).view(self.ranks, piece)
        first, *others = range(self.ranks) if order is None else order
        total = parts[first].float()
        total = total.clone() if dtype == torch.float32 else total
        # One after another, never as a tree: the order is part of the bits.
        for rank in others:
            total += parts[rank]
        return self.exchange(total.to(dtype).repeat(self.ranks), even, even)[: flat.numel()].float()


def reduce_gradients(
    channel: Channel, weights: Sequence[Tensor], order: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32, more: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """Replace the gradient of each weight by the sum over ranks, through one flat buffer.

    A weight that has no gradient on a rank counts as zeros there; weights come in the same order everywhere. See
    `Channel.sum` for `order` and `dtype`.

    Parameters
    ----------
    more : sequence of Tensor
        Flat float32 that is added with them.

    Returns
    -------
    list of Tensor
        The sums of `more`.
    """
    if channel.ranks == 1 or not (weights or more):
        return list(more)
    mine = [torch.zeros(each.numel()) if each.grad is None else each.grad.reshape(-1).float() for each in weights]
    flat = torch.cat([*mine, *more])
    sizes = [each.numel() for each in (*weights, *more)]
    parts = channel.sum(flat, order, dtype).split(sizes)  # type: ignore[no-untyped-call]
    for weight, part in zip(weights, parts, strict=False):
        weight.grad = part.view_as(weight)
    return list(parts[len(weights) :])


def average(channel: Channel, values: Sequence[Tensor], share: float, order: Sequence[int] | None = None) -> None:
    """Replace float32 values by their mean over ranks, in which this one counts for `share`; see `Channel.sum`."""
    if channel.ranks == 1 or not values:
        return
    flat = torch.cat([value.reshape(-1) for value in values]).mul_(share)
    parts = channel.sum(flat, order).split([value.numel() for value in values])  # type: ignore[no-untyped-call]
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view_as(value))
