"""The processes of a run: who they are, what connects them, and how they begin and end together.

`torchrun` says which process this is. Without it, or with one process, a mesh of one is the identity everywhere.

Each kind of traffic has connections of its own (`Channel`), because the threads that prepare batches ahead and that
train use them at the same time, and collectives of one group must come in one order on all ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stratarec.config.difference import first_difference
from stratarec.distributed.collectives import Channel
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.failures import Heartbeat, RollCall, Termination
from stratarec.distributed.rendezvous import holds_store, meet, number, shape, starts
from stratarec.errors import ConfigError, RankError, StrataError, Terminated
from stratarec.io.versions import versions

Result = TypeVar("Result")

# What reading, writing or compiling may take on one rank while the others wait and see signs of life.
_LONGEST_WORK_SECONDS, _PARTING_SECONDS = 6 * 3600.0, 5.0
# What decides about bits, and about the messages that ranks send each other, beside the code.
_VERSIONS = "versions"
_DECISIVE = ("stratarec", "torch", "numpy", "numba", "llvmlite")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a run and their channels."""

    rank: int
    ranks: int
    ids: Channel
    """Of the thread that prepares batches."""
    rows: Channel
    """Of the thread that trains: rows, gradients, and whatever is decided together."""
    files: Channel
    """Of the thread that trains, where ranks wait for others that read and write files, however long that takes."""
    devices: DeviceMesh | None
    """``[host, local]``; None where there is one rank."""
    notes: Store | None = None
    """What torchrun's agent keeps when it starts the ranks again; None where there is one rank."""
    inside: Mesh | None = None
    """The ranks of this host, where the exchange is by towers."""
    between: Mesh | None = None
    """The ranks of this one's place on all hosts, likewise; its rank is the host's number."""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All of them."""
        others = self.parts[1:]
        return self.ids, self.rows, self.files, *(c for part in others for c in (part.ids, part.rows))

    @property
    def parts(self) -> tuple[Mesh, ...]:
        """All ranks, and by towers the parts of them that this rank is in."""
        return self, *(part for part in (self.inside, self.between) if part is not None)

    @property
    def order(self) -> tuple[int, ...]:
        """Ranks in the order of their samples of a batch.

        By towers, ranks of equal place on their hosts follow one another: rank (t, l) joins what they ask of tower t
        before it asks inside its host, so that owners of rows see samples in the order of the batch.
        """
        if self.inside is None or self.between is None:
            return tuple(range(self.ranks))
        local = self.inside.ranks
        return tuple(host * local + place for place in range(local) for host in range(self.between.ranks))

    @property
    def place(self) -> int:
        """Of this rank in `order`."""
        return self.order.index(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: it prints, commits and reports."""
        return self.rank == 0

    @property
    def hosts(self) -> int:
        """Hosts that the ranks are on; ranks of a host follow one another."""
        return 1 if self.devices is None else int(self.devices.size(0))

    def first(self, work: Callable[[], Result]) -> Result:
        """Do `work` on rank 0 alone; all ranks get what it returned, a value of JSON, or its error.

        Raises
        ------
        RankError
            On all ranks, where `work` raised a `StrataError`.
        """
        found = self.files.together(lambda: work() if self.is_first else None)
        result: Result = json.loads(self.files.gather(json.dumps(found).encode())[0])
        return result

    def first_then_others(self, work: Callable[[], Result]) -> Result:
        """Do `work` on every rank, on rank 0 before the others: what it leaves on disk is there for them.

        Raises
        ------
        RankError
            On all ranks, where `work` raised a `StrataError` on one of them.
        """
        done: list[Result] = []
        for turn in (True, False):
            if self.is_first == turn:
                done.append(self.files.together(work))
            else:
                self.files.agree(None)
        return done[0]

    @classmethod
    def alone(cls) -> Mesh:
        """One process."""
        ids, rows, files = (Channel(0, 1) for _ in range(3))
        return cls(rank=0, ranks=1, ids=ids, rows=rows, files=files, devices=None)

    def note(self, what: str) -> None:
        """Write down something that is true for this run of torchrun, restarts included."""
        if self.notes is not None:
            self.notes.set(what, "")

    def noted(self, what: str) -> bool:
        """Whether it was written down, by this start or an earlier one."""
        return self.notes is not None and bool(self.notes.check([what]))

    def check_same(self, settings: Mapping[str, object]) -> None:
        """Refuse ranks that were started with other settings; nested values of JSON are compared field by field.

        Raises
        ------
        RankError
            On every rank, naming the first that differs from rank 0, the field and both values.
        """
        # Sorted: ranks may have built the same settings in another order.
        given = self.files.gather(json.dumps(settings, sort_keys=True).encode())
        different = difference([json.loads(content) for content in given])
        if different is not None:
            raise different


def difference(given: Sequence[Mapping[str, object]]) -> RankError | None:
    """What to raise where ranks, in their order, say other things of themselves."""
    for rank, mine in enumerate(given):
        found = first_difference(mine, given[0])
        if found is not None and found.field.startswith(_VERSIONS):
            name = found.field.removeprefix(f"{_VERSIONS}.")
            return RankError(f"rank {rank} has {name} {found.want}, rank 0 has {found.have}: install the same for all")
        if found is not None:
            return RankError(
                f"rank {rank} was started with {found.field} {found.want!r}, rank 0 with {found.have!r}: give all "
                "ranks the same recipe and data"
            )
    return None


@contextmanager
def joined(
    config: DistributedConfig | None = None, towers: int = 0, settings: Mapping[str, object] | None = None,
    *, modules: bool = True,
) -> Iterator[Mesh]:  # fmt: skip
    """The mesh of this run, by torchrun's environment; left together with the `with` block.

    Parameters
    ----------
    config : DistributedConfig
    towers : int
        Of the model that is trained.
    settings : mapping
        JSON, which must be the same on all ranks, as must versions and the code.
    modules : bool
        Whether its towers have modules.

    Raises
    ------
    ConfigError
        For variables that say something else than torchrun would.
    RankError
        When the other ranks cannot be reached or are not alike, on every rank when one of them leaves with an error,
        and when this process is told to end (SIGTERM), with the rank that is gone.
    """
    config, size = config or DistributedConfig(), number("WORLD_SIZE", 1)
    if size == 1:
        yield Mesh.alone()
        return
    rank = number("RANK", -1)
    hosts = shape(config, size)
    by_towers = config.by_towers(towers, hosts[0], modules=modules)
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} of WORLD_SIZE {size}, expected 0 to {size - 1}; start ranks by torchrun")
    about = {
        _VERSIONS: versions(*_DECISIVE), **(settings or {}), "hosts": hosts[0], "timeout": config.timeout,
        "exchange by towers": by_towers,
    }  # fmt: skip
    notes, store = meet(config, rank, size)
    roll = RollCall(store, rank, size, holds_store=holds_store(rank))
    mesh: Mesh | None = None
    told: Terminated | None = None
    with Termination().listening() as termination:
        try:
            with Heartbeat(store, rank, size, config.timeout) as heart:
                roll.answer(about, heart, config.timeout, difference)
                mesh = replace(_connected(config, rank, size, store, hosts, roll, heart, by_towers), notes=notes)
                yield mesh
        except StrataError as error:
            termination.ignore()
            roll.leave(str(error) if isinstance(error, RankError) else f"rank {rank}: {error}")
            raise
        except Terminated:
            roll.leave(f"rank {rank} was told to end (SIGTERM)")
            told = Terminated()  # without the frames that still use connections
        except BaseException as error:
            termination.ignore()
            roll.leave(f"rank {rank} ended with {type(error).__name__}: {error}")
            raise
        finally:
            termination.ignore()
            for channel in mesh.channels if mesh is not None else ():
                channel.close()
            # After the channels, by whose end the others see at once that this rank is gone.
            _disconnect()
            if told is None:
                roll.linger()
        if told is not None:  # connections are broken, so others notice and answer
            raise roll.explain(told)


def _disconnect() -> None:
    """End all groups.

    One in which something still waits for a rank that is stopped, not gone, ends with that wait, which may be for
    hours; whoever leaves does not stay for it.
    """
    if dist.is_initialized():
        ending = threading.Thread(target=dist.destroy_process_group, name="disconnect", daemon=True)
        ending.start()
        ending.join(_PARTING_SECONDS)


def restarted() -> bool:
    """Whether torchrun started this rank again after one of them failed."""
    return starts() > 0


def _connected(
    config: DistributedConfig, rank: int, size: int, store: Store, shape: tuple[int, int], roll: RollCall,
    heart: Heartbeat, by_towers: bool,
) -> Mesh:  # fmt: skip
    timeout = timedelta(seconds=config.timeout)
    try:
        store = PrefixStore("torch", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        devices = init_device_mesh("cpu", shape, mesh_dim_names=("host", "local"))
        # In one order on all ranks: a group is known by how many were made before it.
        channels = [Channel(rank, size, dist.new_group(timeout=timeout), roll) for _ in range(2)]
        # Its collectives wait while a rank reads a terabyte; signs of life tell slow from gone. Connecting does not.
        patient = dist.new_group(timeout=timeout)
        longest = timedelta(seconds=max(config.timeout, _LONGEST_WORK_SECONDS))
        dist.distributed_c10d._set_pg_timeout(longest, patient)
        channels.append(Channel(rank, size, patient, roll, heart.look))
        subgroups = [devices.get_group(name) for name in ("host", "local")]
        between, inside = (
            [_part(rank, ranks, timeout, roll) for ranks in (devices.mesh.T.tolist(), devices.mesh.tolist())]
            if by_towers
            else (None, None)
        )
    except RuntimeError as error:
        raise roll.explain(error) from error
    # Connections are made by the first collective of a group, and a rank that dies before leaves the others waiting.
    for group in subgroups:
        Channel(dist.get_rank(group), dist.get_world_size(group), group, roll).agree(None)
    ids, rows, files = channels
    mesh = Mesh(
        rank=rank, ranks=size, ids=ids, rows=rows, files=files, devices=devices, inside=inside, between=between,
    )  # fmt: skip
    for channel in mesh.channels:
        channel.agree(None)
    return mesh


def _part(rank: int, parts: Sequence[Sequence[int]], timeout: timedelta, roll: RollCall) -> Mesh:
    """The part of the ranks that this one is in, with channels for ids and rows."""
    mine = next(ranks for ranks in parts if rank in ranks)
    found = Mesh.alone()
    if len(mine) == 1:
        return found
    channels = []
    for _ in range(2):
        # Every rank makes all groups, also those that it is in no part of.
        groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
        group = groups[parts.index(mine)]
        channels.append(Channel(mine.index(rank), len(mine), group, roll))
    ids, rows = channels
    return replace(found, rank=mine.index(rank), ranks=len(mine), ids=ids, rows=rows)
