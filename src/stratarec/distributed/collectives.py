"""Collectives of ranks: exchange bytes, gather, sum in the order of ranks, and agree on errors.

All of them use `all_to_all_single`, which gloo implements for uneven sizes. Gloo's reductions are
not used: its `reduce_scatter` is one all-reduce per rank, adds in another order and does not
support bfloat16. Sums are computed here in the order of ranks, so that every run gives the same
bits.

Gradients of weights that all ranks have are sent in one flat buffer. DDP is not used, because its
buckets, and so the order of sums, change after the first step and after a run is resumed.
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

# A wait that can be aborted is checked at growing intervals: this share of its duration so far,
# within limits. On few cores each check takes time from computing threads.
_POLL_SHARE, _POLL_SECONDS = 1 / 16, (1e-4, 2e-3)


def never() -> bool:
    """Return False, so that a wait is never aborted."""
    return False


class Channel:
    """A set of connections among all ranks. Collectives of different channels are independent.

    A channel is used by one thread at a time, and every rank must call its methods in the same
    order.

    Parameters
    ----------
    rank, ranks : int
        Number of this rank among the ranks of the channel, and number of these ranks.
    group : ProcessGroup or None
        Torch's group of these ranks; None for a single rank.
    roll : RollCall or None
        Determines the missing rank when a collective fails; None for a single rank.
    watch : callable
        Called while a collective waits; an exception from it ends the wait.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None = None,
        roll: RollCall | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self._group = group
        self._roll = roll
        self._watch = watch
        # Bytes sent to other ranks, and seconds that the thread of the channel waited for them.
        self.sent_bytes = 0
        self.wait_seconds = 0.0

    def close(self) -> None:
        """Close the connections, so that other ranks notice at once that this rank ended. Pending
        waits are aborted.
        """
        # The group is not destroyed here: all ranks create groups, and `joined` destroys all of
        # them.
        self._group = None

    def exchange(
        self,
        message: Tensor,
        sent_sizes: Sequence[int],
        sizes: Sequence[int],
        stopped: Callable[[], bool] = never,
    ) -> Tensor:
        """Send every rank its part of `message`, and receive a part from every rank.

        Parameters
        ----------
        message : Tensor
            The parts for all ranks, in order; flat and contiguous.
        sent_sizes, sizes : sequence of int
            Number of elements to send to each rank, and to receive from each rank.
        stopped : callable
            Aborts the wait when it returns true; the channel cannot be used afterwards.

        Returns
        -------
        Tensor
            The parts from all ranks, in order.

        Raises
        ------
        RankError
            If a rank has ended or does not answer.
        WaitAbandoned
            If `stopped` returned true.
        """
        if self._group is None:
            return message
        began = time.perf_counter()
        # Sent as bytes: gloo lacks bfloat16 in some collectives, and this collective only copies
        # elements.
        width = message.element_size()
        received = torch.empty(sum(sizes) * width, dtype=torch.uint8)
        try:
            work = dist.all_to_all_single(
                received,
                message.view(torch.uint8),
                [size * width for size in sizes],
                [size * width for size in sent_sizes],
                group=self._group,
                async_op=True,
            )
            self._wait(work, stopped)
        except StrataError:
            raise
        except RuntimeError as error:
            assert self._roll is not None
            raise self._roll.explain(error) from error
        self.wait_seconds += time.perf_counter() - began
        self.sent_bytes += (sum(sent_sizes) - sent_sizes[self.rank]) * width
        return received.view(message.dtype)

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

    def gather_ints(self, numbers: Sequence[int], stopped: Callable[[], bool] = never) -> list[list[int]]:
        """Return the integers of every rank, ``[ranks][n]``; a collective.

        Parameters
        ----------
        numbers : sequence of int
            n integers of this rank, with the same n on all ranks.
        stopped : callable
            As for `exchange`.
        """
        gathered: list[list[int]] = self._gather_equal(
            torch.tensor(numbers, dtype=torch.int64), stopped
        ).tolist()
        return gathered

    def gather_floats(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather float64 `numbers`, ``[ranks][n]``, a collective; all ranks have the same n."""
        gathered: list[list[float]] = self._gather_equal(
            torch.tensor(numbers, dtype=torch.float64), never
        ).tolist()
        return gathered

    def _gather_equal(self, mine: Tensor, stopped: Callable[[], bool]) -> Tensor:
        """Gather ``[n]`` from each of N ranks; return ``[N, n]``."""
        even = [mine.numel()] * self.ranks
        return self.exchange(mine.repeat(self.ranks), even, even, stopped).view(self.ranks, -1)

    def gather(self, content: bytes) -> list[bytes]:
        """Return, on all ranks, the `content` of every rank in order; a collective."""
        sizes = [size for (size,) in self.gather_ints([len(content)])]
        # Copied, as torch warns about read-only memory.
        message = torch.from_numpy(np.frombuffer(content * self.ranks, dtype=np.uint8).copy())
        parts = self.exchange(message, [len(content)] * self.ranks, sizes).split(sizes)  # type: ignore[no-untyped-call]
        return [part.numpy().tobytes() for part in parts]

    def agree(self, error: StrataError | None, stopped: Callable[[], bool] = never) -> None:
        """Wait until every rank has called this method. If one of them passed an error, raise it on
        all ranks.

        Parameters
        ----------
        error : StrataError or None
            Error of this rank.
        stopped : callable
            As for `exchange`.

        Raises
        ------
        RankError
            Has the number and the message of the first rank with an error.
        """
        failed = [bad for (bad,) in self.gather_ints([error is not None], stopped)]
        if any(failed):
            self.raise_everywhere(error, failed)

    def run_everywhere(self, work: Callable[[], Result]) -> Result:
        """Run `work` on every rank and return its result, after all ranks have succeeded.

        Raises
        ------
        RankError
            On all ranks, if `work` raised a `StrataError` on one of them; see `agree`.
        """
        failed: StrataError | None = None
        try:
            result = work()
        except StrataError as error:
            # The error is not raised yet, because the others would wait here for this rank until
            # the timeout.
            failed = error
        self.agree(failed)
        return result

    def raise_everywhere(self, error: StrataError | None, failed: Sequence[int]) -> NoReturn:
        """Raise on every rank the error of the first failed rank, as `agree` does; a collective.

        Parameters
        ----------
        error : StrataError or None
            Error of this rank.
        failed : sequence of int
            For each rank, 1 if it has an error and 0 if not; equal on all ranks, and at least one
            is 1.
        """
        if self._group is None and error is not None:
            raise error
        # Ranks without an error take part too, because a gather is a collective.
        messages = self.gather(str(error).encode() if error is not None else b"")
        first = next(rank for rank, bad in enumerate(failed) if bad)
        raise RankError(f"rank {first}: {messages[first].decode()}") from error

    def sum(
        self, flat: Tensor, order: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return ``[n]`` float32 sums over ranks, added in a fixed order, so all ranks get the same
        bits.

        Each rank adds one of N pieces, so it sends 2 (N - 1) / N of the bytes, as in an optimal
        all-reduce.

        Parameters
        ----------
        flat : Tensor
            ``[n]`` numbers of this rank, with the same n on all ranks.
        order : sequence of int
            Order in which ranks are added; by default 0, 1, ...
        dtype : torch.dtype
            Type in which numbers and sums are sent; they are added in float32.
        """
        if self._group is None:
            return flat
        piece = -(-flat.numel() // self.ranks)
        # Padded to equal pieces; zeros at the end do not change sums.
        padded = torch.zeros(piece * self.ranks, dtype=dtype)
        padded[: flat.numel()] = flat
        even = [piece] * self.ranks
        parts = self.exchange(padded, even, even).view(self.ranks, piece)
        first, *others = range(self.ranks) if order is None else order
        total = parts[first].float()
        total = total.clone() if dtype == torch.float32 else total
        # Added one after another and not as a tree, because the order determines the bits.
        for rank in others:
            total += parts[rank]
        return self.exchange(total.to(dtype).repeat(self.ranks), even, even)[: flat.numel()].float()


def reduce_gradients(
    channel: Channel,
    weights: Sequence[Tensor],
    order: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Replace the gradient of each weight by its sum over ranks; all gradients are sent in one flat
    buffer.

    Parameters
    ----------
    channel : Channel
        Channel of the calling thread.
    weights : sequence of Tensor
        Weights, in the same order on all ranks. A missing gradient counts as zeros.
    order, dtype
        As for `Channel.sum`.
    """
    if channel.ranks == 1 or not weights:
        return
    mine = [torch.zeros(w.numel()) if w.grad is None else w.grad.reshape(-1).float() for w in weights]
    sizes = [weight.numel() for weight in weights]
    parts = channel.sum(torch.cat(mine), order, dtype).split(sizes)  # type: ignore[no-untyped-call]
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = part.view_as(weight)


def average(
    channel: Channel, values: Sequence[Tensor], share: float, order: Sequence[int] | None = None
) -> None:
    """Replace float32 tensors by their weighted mean over ranks.

    Parameters
    ----------
    channel : Channel
        Channel of the calling thread.
    values : sequence of Tensor
        Tensors to replace, in the same order on all ranks.
    share : float
        Weight of this rank; the weights of all ranks add up to 1.
    order : sequence of int, optional
        As for `Channel.sum`.
    """
    if channel.ranks == 1 or not values:
        return
    flat = torch.cat([value.reshape(-1) for value in values]).mul_(share)
    parts = channel.sum(flat, order).split([value.numel() for value in values])  # type: ignore[no-untyped-call]
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view_as(value))
