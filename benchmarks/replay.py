"""Replay the steps of a cluster on one machine: each rank computes alone, and its schedule is
played over given links.

Ranks that share processors slow each other down, which ranks of a cluster do not. So the ranks of a
run are threads of one process of which one computes at a time (`record`). A rank computes with its
real tables, its real share of each batch and the code of `stratarec train`, until it reaches a
collective. Then another rank computes. Collectives deliver what the other ranks sent, so losses and
rows have the bits of a run with as many processes. The processor time of each rank between two
collectives is measured, and the bytes that it sends to each other rank are recorded.

`play` then computes when each rank would reach and leave each collective if it had a core to
itself. A collective takes a latency. Bytes pass when both ends have arrived, at the fair share of
the links that they use: the ranks of a host share a link out of the host and one into it, and each
rank has such links inside its host. With lookahead, the second thread of a rank exchanges the ids
of the next batch at the same time, on the same core.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle, islice
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.collectives import Channel, never
from stratarec.distributed.measure import emulated_mesh
from stratarec.distributed.mesh import Mesh
from stratarec.errors import TrainingError
from stratarec.kernels.runtime.threads import limit_threads
from stratarec.planning.machine import Cluster
from stratarec.recipe import Recipe
from stratarec.training.distributed import RankPipeline
from stratarec.training.forecast import rank_pipeline

BATCHES = 5
"""Number of batches that steps repeat."""
WARM = BATCHES + 1
"""Number of steps before the recorded ones. They compile kernels, create optimizer state, and touch
the memory of the rows, which in training most steps find touched.
"""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Work of a rank up to a collective, or up to the end of a part of the step."""

    seconds: float
    ahead: bool
    """Whether the thread that stages batches does this work."""
    channel: int = -1
    """Number of the collective's channel; -1 at the end of a part."""
    members: tuple[int, ...] = ()
    """Ranks of the channel."""
    sent: tuple[float, ...] = ()
    """Bytes sent to each member."""


Step = list[Piece]
_FILES = 2  # the third channel of a mesh


class Turns:
    """Scheduler of the ranks of one process: one rank computes at a time."""

    def __init__(self, ranks: int) -> None:
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._parts: dict[tuple[int, tuple[int, ...], int], dict[int, Sequence[Tensor]]] = defaultdict(dict)
        self._calls: dict[tuple[int, tuple[int, ...], int], int] = defaultdict(int)
        self._began = [0.0] * ranks
        self.ahead = [False] * ranks
        self._failure: BaseException | None = None
        self.pieces: list[list[Piece]] = [[] for _ in range(ranks)]

    def run(self, rank: int, work: Callable[[], Any]) -> Any:
        """Run the work of a rank while no other rank computes, and return its result."""
        torch.set_num_threads(1)
        limit_threads(1)
        with self._turn:
            self._began[rank] = time.thread_time()
            try:
                return work()
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()
                raise

    def part(self, rank: int, *, ahead: bool) -> None:
        """End a part of the step and begin the next one."""
        now = time.thread_time()
        self.pieces[rank].append(Piece(seconds=now - self._began[rank], ahead=self.ahead[rank]))
        self.ahead[rank], self._began[rank] = ahead, time.thread_time()

    def exchange(
        self, rank: int, channel: int, members: tuple[int, ...], parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """Let other ranks compute until all members have called this method. Return what they sent
        to this rank.
        """
        seconds = time.thread_time() - self._began[rank]
        sent = tuple(
            float(part.nbytes) if member != rank else 0.0
            for member, part in zip(members, parts, strict=True)
        )
        self.pieces[rank].append(
            Piece(seconds=seconds, ahead=self.ahead[rank], channel=channel, members=members, sent=sent)
        )
        key = channel, members, self._calls[channel, members, rank]
        self._calls[channel, members, rank] += 1
        # Copied, because the rank may overwrite its message before the others read it.
        copies = [part.clone() for part in parts]
        with self._changed:
            self._parts[key][rank] = copies
            self._changed.notify_all()
        self._turn.release()
        with self._changed:
            self._changed.wait_for(lambda: len(self._parts[key]) == len(members) or self._failure)
        self._turn.acquire()
        if self._failure is not None:
            raise TrainingError("another rank failed") from self._failure
        place = members.index(rank)
        received = [self._parts[key][member][place] for member in members]
        self._calls[(*key[:2], -1 - key[2])] += 1
        if self._calls[(*key[:2], -1 - key[2])] == len(members):
            del self._parts[key]
        self._began[rank] = time.thread_time()
        return received


class TurnChannel(Channel):
    """Channel between ranks of which one computes at a time."""

    def __init__(self, turns: Turns, number: int, place: int, members: Sequence[int]) -> None:
        super().__init__(place, len(members), cast(Any, turns) if len(members) > 1 else None)
        self._turns = turns
        self._number = number
        self._members = tuple(members)

    def exchange(
        self,
        message: Tensor,
        sent_sizes: Sequence[int],
        sizes: Sequence[int],
        stopped: Callable[[], bool] = never,
    ) -> Tensor:
        if self.ranks == 1:
            return message
        parts = message.split(list(sent_sizes))  # type: ignore[no-untyped-call]
        received = torch.cat(
            self._turns.exchange(self._members[self.rank], self._number, self._members, parts)
        )
        assert received.numel() == sum(sizes)
        return received


def mesh_of(turns: Turns, rank: int, hosts: int, local: int, *, by_towers: bool) -> Mesh:
    """Return the mesh of a rank. Its channels have numbers, in the same order on all ranks."""
    numbers = count()
    return emulated_mesh(
        rank,
        hosts,
        local,
        by_towers=by_towers,
        channel=lambda place, members: TurnChannel(turns, next(numbers), place, members),
    )


def train(
    pipeline: RankPipeline, steps: int, between: Callable[[bool], None], depth: int = 0
) -> tuple[list[float], float]:
    """Train some steps on batches in memory. Return the loss of each step, and the mean seconds of
    a step.

    `between` is called between the parts of a step. Its argument is whether the next part stages a
    batch.
    """
    files = pipeline.mesh.files
    batches = cycle(list(islice(pipeline.loader.batches(0), BATCHES)))
    items = ((batch, pipeline.request(batch)) for batch in islice(batches, WARM + steps))
    losses, began, ended = [], 0.0, 0.0
    with pipeline.stage_ahead(items, depth=depth) as ahead:
        between(True)
        for number, (item, handle) in enumerate(ahead):
            between(False)
            if number == WARM:
                files.agree(None)
                began = time.perf_counter()
            losses.append(pipeline.train(number, *item, handle).loss)
            between(True)
        files.agree(None)
        ended = time.perf_counter()
    return losses, (ended - began) / steps


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Recorded steps of all ranks."""

    schedule: list[Step]
    """Step of each rank: median seconds and mean bytes over the recorded steps."""
    losses: list[float]

    @classmethod
    def least(cls, recordings: Sequence[Recording]) -> Recording:
        """Return the recorded steps with the shortest time of each piece in several recordings."""
        first = recordings[0]
        pieces = [
            [
                replace(same[0], seconds=min(piece.seconds for piece in same))
                for same in zip(*steps, strict=True)
            ]
            for steps in zip(*(each.schedule for each in recordings), strict=True)
        ]
        return cls(schedule=pieces, losses=first.losses)


def record(recipe: Recipe, dataset: Dataset, hosts: int, local: int, steps: int) -> Recording:
    """Train some steps with `local` ranks of one thread on each of `hosts` hosts, and record their
    schedule.
    """
    ranks = hosts * local
    by_towers = recipe.distributed.by_towers(recipe.towers, hosts)
    turns = Turns(ranks)

    def work(rank: int) -> list[float]:
        pipeline = rank_pipeline(recipe, dataset, mesh_of(turns, rank, hosts, local, by_towers=by_towers))
        with closing(pipeline.model.embeddings):
            return train(pipeline, steps, lambda ahead: turns.part(rank, ahead=ahead))[0]

    with ThreadPoolExecutor(ranks) as pool:
        losses, *_ = pool.map(lambda rank: turns.run(rank, partial(work, rank)), range(ranks))
    return Recording(schedule=[typical(pieces, steps) for pieces in turns.pieces], losses=losses)


def typical(pieces: Sequence[Piece], steps: int) -> Step:
    """Return the median step of a rank over `steps` steps; the steps before them are left out."""
    each: list[Step] = [[]]
    before = False
    for piece in pieces:
        # The first part of a step stages its batch.
        if piece.ahead and not before:
            each.append([])
        before = piece.ahead
        if piece.channel != _FILES:  # only this module uses that channel between steps
            each[-1].append(piece)
    return [
        Piece(
            seconds=median(piece.seconds for piece in same),
            ahead=same[0].ahead,
            channel=same[0].channel,
            members=same[0].members,
            sent=tuple(
                sum(sizes) / len(same) for sizes in zip(*(piece.sent for piece in same), strict=True)
            ),
        )
        for same in zip(*each[1 + WARM : 1 + WARM + steps], strict=True)
    ]


Link = tuple[str, int]


@dataclass(eq=False)
class _Job:
    """Work on a core or on links, which it shares with other jobs."""

    amount: float
    links: tuple[Link, ...]
    then: Callable[[], None]
    rate: float = math.inf


class _Fluid:
    """Jobs that run at the same time, each at a max-min fair rate."""

    def __init__(self, capacity: Callable[[Link], float]) -> None:
        self._capacity = capacity
        self._jobs = list[_Job]()
        self.now = 0.0

    def start(self, amount: float, links: tuple[Link, ...], then: Callable[[], None]) -> None:
        self._jobs.append(_Job(amount, links, then))

    def run(self) -> None:
        """Run until no job is left. When a job ends, it may start other jobs."""
        while self._jobs:
            self._set_rates()
            seconds = min(job.amount / job.rate for job in self._jobs)
            self.now += seconds
            ended = [job for job in self._jobs if job.amount / job.rate <= seconds * (1 + 1e-9)]
            self._jobs = [job for job in self._jobs if job not in ended]
            for job in self._jobs:
                job.amount -= job.rate * seconds
            for job in ended:
                job.then()

    def _set_rates(self) -> None:
        """Set the rates of jobs, beginning with the jobs on the link that has the smallest share
        for each.
        """
        users: dict[Link, list[_Job]] = defaultdict(list)
        for job in self._jobs:
            job.rate = math.inf if job.links else 1.0  # a job without links is a time
            for link in job.links:
                users[link].append(job)
        left = {link: self._capacity(link) for link in users}
        while users:
            tightest = min(users, key=lambda link: left[link] / len(users[link]))
            rate = left[tightest] / len(users[tightest])
            if math.isinf(rate):
                return
            for job in list(users[tightest]):
                job.rate = rate
                for link in job.links:
                    left[link] = max(left[link] - rate, 1e-12)
                    users[link].remove(job)
                    if not users[link]:
                        del users[link]


class _Player:
    """Threads of ranks that compute, meet in collectives and send bytes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.fluid = _Fluid(self._capacity)
        self._arrived: dict[Any, list[tuple[Piece, int, Callable[[], None]]]] = defaultdict(list)
        self._calls: dict[Any, int] = defaultdict(int)
        self._blocked: list[Callable[[], None]] = []
        self.ended: dict[tuple[int, bool], list[float]] = defaultdict(list)
        """Times at which each thread ended its steps, by rank and whether the thread stages
        batches.
        """
        self.begun: dict[tuple[int, bool], int] = defaultdict(lambda: -1)
        """Number of the current step of each thread."""

    def _capacity(self, link: Link) -> float:
        kind, cluster = link[0], self._cluster
        if kind == "core":
            return 1.0
        return (
            cluster.between_bytes_per_second if kind.startswith("host") else cluster.inside_bytes_per_second
        )

    def start(
        self, rank: int, pieces: Step, ready: Callable[[int], bool], steps: int, *, ahead: bool
    ) -> None:
        """Start a thread, which begins step n when ``ready(n)`` is true."""
        thread = self._thread(rank, pieces, ready, steps, ahead, lambda: next(thread, None))
        next(thread, None)

    def _thread(
        self,
        rank: int,
        pieces: Step,
        ready: Callable[[int], bool],
        steps: int,
        ahead: bool,
        resume: Callable[[], None],
    ) -> Iterator[None]:
        for step in range(steps):
            while not ready(step):
                self._blocked.append(resume)
                yield
            self.begun[rank, ahead] = step
            self._wake()
            for piece in pieces:
                self.fluid.start(piece.seconds, (("core", rank),), resume)
                yield
                if piece.channel >= 0:
                    self._arrive(rank, piece, resume)
                    yield
            self.ended[rank, ahead].append(self.fluid.now)
            self._wake()

    def _wake(self) -> None:
        blocked, self._blocked = self._blocked, []
        for resume in blocked:
            # As a job, because a thread cannot be resumed from inside itself.
            self.fluid.start(0.0, (), resume)

    def _arrive(self, rank: int, piece: Piece, resume: Callable[[], None]) -> None:
        """Start the transfers to and from the members that have arrived. Call `resume` when all
        have ended.
        """
        key = piece.channel, piece.members, self._calls[piece.channel, piece.members, rank]
        self._calls[piece.channel, piece.members, rank] += 1
        peers = len(piece.members) - 1
        hosts = {member // self._cluster.ranks for member in piece.members}
        links = self._cluster.between if len(hosts) > 1 else self._cluster.inside
        left = [2 * peers]

        def transferred() -> None:
            left[0] -= 1
            if not left[0]:
                self.fluid.start(links.latency(peers), (), resume)

        here = self._arrived[key]
        for other, member, done in here:
            for sender, receiver, sent in (
                (rank, member, piece.sent[piece.members.index(member)]),
                (member, rank, other.sent[other.members.index(rank)]),
            ):
                self.fluid.start(
                    sent, self._path(sender, receiver), lambda done=done: (done(), transferred())
                )
        here.append((piece, rank, transferred))

    def _path(self, sender: int, receiver: int) -> tuple[Link, ...]:
        here, there = sender // self._cluster.ranks, receiver // self._cluster.ranks
        return (
            (("rank out", sender), ("rank in", receiver))
            if here == there
            else (("host out", here), ("host in", there))
        )


def play(schedule: Sequence[Step], cluster: Cluster, steps: int = 9) -> float:
    """Return the seconds of a step of a schedule in the steady state.

    Parameters
    ----------
    schedule : sequence of Step
        Step of each rank.
    cluster : Cluster
        Links between the ranks. Each rank has one core.
    """
    player = _Player(cluster)
    for rank, pieces in enumerate(schedule):
        for ahead in (True, False):
            part = [piece for piece in pieces if piece.ahead == ahead]
            player.start(rank, part, partial(_is_ready, player, rank, ahead), steps, ahead=ahead)
    player.fluid.run()
    # The first steps fill the pipeline, and in the last one no batch is staged.
    ends = [
        max(player.ended[rank, False][step] for rank in range(len(schedule))) for step in (2, steps - 2)
    ]
    return (ends[1] - ends[0]) / (steps - 4)


def _is_ready(player: _Player, rank: int, ahead: bool, step: int) -> bool:
    """Return whether a batch may be staged (training of the one before has begun), or trained (it
    is staged).
    """
    return player.begun[rank, False] >= step - 1 if ahead else len(player.ended[rank, True]) > step
