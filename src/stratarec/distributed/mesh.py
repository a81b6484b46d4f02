"""The mesh of a run's processes: their ranks, their connections, and how they start and end
together.

`torchrun` sets the rank of this process. Without torchrun, or with one process, the mesh has one
rank and exchanges nothing.

Each kind of traffic has separate connections (`Channel`). The thread that stages batches and the
training thread use them at the same time, and the collectives of one group must have the same order
on all ranks.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stratarec.config.validate import first_difference
from stratarec.distributed.collectives import Channel
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.failures import Heartbeat, RollCall, Termination
from stratarec.errors import ConfigError, RankError, StrataError, Terminated
from stratarec.io.hashes import versions

Result = TypeVar("Result")

# Longest time for which one rank may read, write or compile while the others see its heartbeat, and
# longest time to wait for a disconnection.
_LONGEST_WORK_SECONDS, _PARTING_SECONDS = 6 * 3600.0, 5.0
# Packages whose versions must be equal on all ranks, because bits and messages depend on them.
_VERSIONS = "versions"
_DECISIVE = ("stratarec", "torch", "numpy", "numba", "llvmlite")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a run and their channels.

    Parameters
    ----------
    rank, ranks : int
        Number of this rank, and number of ranks.
    ids : Channel
        Channel of the thread that stages batches.
    rows : Channel
        Channel of the training thread for rows, gradients and common decisions.
    files : Channel
        Channel of the training thread for collectives in which ranks read or write files, which may
        take long.
    devices : DeviceMesh or None
        ``[host, local]``; None for a single rank.
    records : Store or None
        Store that remains when torchrun restarts ranks; None for a single rank.
    inside : Mesh or None
        With the exchange by towers, the mesh of this host's ranks.
    between : Mesh or None
        With the exchange by towers, the mesh of the ranks with the same place on each host. In this
        mesh, the number of a rank is the number of its host.
    """

    rank: int
    ranks: int
    ids: Channel
    rows: Channel
    files: Channel
    devices: DeviceMesh | None
    records: Store | None = None
    inside: Mesh | None = None
    between: Mesh | None = None

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All channels of this mesh, of `inside` and of `between`."""
        others = self.parts[1:]
        return self.ids, self.rows, self.files, *(c for part in others for c in (part.ids, part.rows))

    @property
    def parts(self) -> tuple[Mesh, ...]:
        """This mesh, then `inside` and `between` if they exist."""
        return self, *(part for part in (self.inside, self.between) if part is not None)

    @property
    def order(self) -> tuple[int, ...]:
        """Ranks in the order of their samples in a batch.

        With the exchange by towers, ranks with the same place on their hosts are adjacent. The rank
        at place l of host t concatenates the requests to tower t from all ranks at place l, and
        then sends them inside its host. So owners of rows get samples in this order."""
        if self.inside is None or self.between is None:
            return tuple(range(self.ranks))
        local = self.inside.ranks
        return tuple(host * local + place for place in range(local) for host in range(self.between.ranks))

    @property
    def place(self) -> int:
        """Place of this rank in `order`."""
        return self.order.index(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints, commits and reports for all ranks."""
        return self.rank == 0

    @property
    def hosts(self) -> int:
        """Number of hosts; ranks of a host are consecutive."""
        return 1 if self.devices is None else int(self.devices.size(0))

    def first(self, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0 only. All ranks return its result, which must be a JSON value.

        Raises
        ------
        RankError
            On all ranks, if `work` raised a `StrataError`.
        """
        value = self.files.run_everywhere(lambda: work() if self.is_first else None)
        result: Result = json.loads(self.files.gather(json.dumps(value).encode())[0])
        return result

    def first_then_others(self, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0 and then on the others, so that they can use the files that rank 0
        wrote.

        Raises
        ------
        RankError
            On all ranks, if `work` raised a `StrataError` on one of them.
        """
        done: list[Result] = []
        for turn in (True, False):
            if self.is_first == turn:
                done.append(self.files.run_everywhere(work))
            else:
                self.files.agree(None)
        return done[0]

    @classmethod
    def alone(cls) -> Mesh:
        """Return the mesh of a single process."""
        ids, rows, files = (Channel(0, 1) for _ in range(3))
        return cls(rank=0, ranks=1, ids=ids, rows=rows, files=files, devices=None)

    def record(self, fact: str) -> None:
        """Store a fact about this run that ranks can read after torchrun restarts them."""
        if self.records is not None:
            self.records.set(fact, "")

    def is_recorded(self, fact: str) -> bool:
        """Whether the fact was recorded, in this start or an earlier start."""
        return self.records is not None and bool(self.records.check([fact]))

    def check_same(self, settings: Mapping[str, object]) -> None:
        """Check that the settings of all ranks, which are JSON values, are equal.

        Raises
        ------
        RankError
            On every rank, if a rank differs from rank 0; names the rank, the field and both values.
        """
        # Sorted, because ranks may have built equal settings in different orders.
        contents = self.files.gather(json.dumps(settings, sort_keys=True).encode())
        different = difference([json.loads(content) for content in contents])
        if different is not None:
            raise different


def difference(settings: Sequence[Mapping[str, object]]) -> RankError | None:
    """Return the error for the first rank whose settings differ from those of rank 0, or None."""
    for rank, mine in enumerate(settings):
        other = first_difference(mine, settings[0])
        if other is not None and other.field.startswith(_VERSIONS):
            name = other.field.removeprefix(f"{_VERSIONS}.")
            return RankError(
                f"rank {rank} has {name} {other.want}, rank 0 has {other.have}: install the "
                "same version for all ranks"
            )
        if other is not None:
            return RankError(
                f"rank {rank} was started with {other.field} {other.want!r}, rank 0 with {other.have!r}: "
                "use the same recipe and data for all ranks"
            )
    return None


@contextmanager
def joined(
    config: DistributedConfig | None = None, towers: int = 0, settings: Mapping[str, object] | None = None
) -> Iterator[Mesh]:
    """Connect the ranks that torchrun's environment variables describe; disconnect at the end of
    the `with` block.

    Parameters
    ----------
    config : DistributedConfig
        Timeouts and network interface; by default those of a recipe without this section.
    towers : int
        Number of towers of the model.
    settings : mapping
        JSON that must be equal on all ranks. Versions and the code must be equal too.

    Raises
    ------
    ConfigError
        If environment variables have values that torchrun would not set.
    RankError
        If other ranks cannot be reached or have other settings, if a rank fails (on all ranks), or
        after SIGTERM; names the rank that ended.
    """
    config, size = config or DistributedConfig(), integer_variable("WORLD_SIZE", 1)
    if size == 1:
        yield Mesh.alone()
        return
    rank = integer_variable("RANK", -1)
    hosts = hosts_and_local_ranks(config, size)
    by_towers = config.by_towers(towers, hosts[0])
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK is {rank} of WORLD_SIZE {size}, expected 0 to {size - 1}; start ranks by torchrun"
        )
    about = {
        _VERSIONS: versions(*_DECISIVE),
        **(settings or {}),
        "hosts": hosts[0],
        "timeout": config.timeout,
        "exchange by towers": by_towers,
    }
    records, store = connect_store(config, rank, size)
    roll = RollCall(store, rank, size, holds_store=holds_store(rank))
    mesh: Mesh | None = None
    terminated: Terminated | None = None
    with Termination().listening() as termination:
        try:
            with Heartbeat(store, rank, size, config.timeout) as heart:
                roll.answer(about, heart, config.timeout, difference)
                mesh = replace(
                    _connected(config, rank, size, store, hosts, roll, heart, by_towers), records=records
                )
                yield mesh
        except StrataError as error:
            termination.ignore()
            roll.leave(str(error) if isinstance(error, RankError) else f"rank {rank}: {error}")
            raise
        except Terminated:
            roll.leave(f"rank {rank} received SIGTERM")
            terminated = Terminated()  # without the frames that still use connections
        except BaseException as error:
            termination.ignore()
            roll.leave(f"rank {rank} ended with {type(error).__name__}: {error}")
            raise
        finally:
            termination.ignore()
            for channel in mesh.channels if mesh is not None else ():
                channel.close()
            # After the channels are closed, because closed connections show the others at once that
            # this rank ended.
            _disconnect()
            if terminated is None:
                roll.linger()
        if terminated is not None:  # connections are closed, so the others notice and answer
            raise roll.explain(terminated)


def _disconnect() -> None:
    """Destroy all process groups on a thread, and wait for it only for a limited time.

    Destroying a group that still waits for a stopped rank takes until the end of that wait, perhaps
    hours.
    """
    if dist.is_initialized():
        ending = threading.Thread(target=dist.destroy_process_group, name="disconnect", daemon=True)
        ending.start()
        ending.join(_PARTING_SECONDS)


def restarted() -> bool:
    """Whether torchrun restarted this rank after a failure."""
    return starts() > 0


def _connected(
    config: DistributedConfig,
    rank: int,
    size: int,
    store: Store,
    shape: tuple[int, int],
    roll: RollCall,
    heart: Heartbeat,
    by_towers: bool,
) -> Mesh:
    timeout = timedelta(seconds=config.timeout)
    try:
        store = PrefixStore("torch", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        devices = init_device_mesh("cpu", shape, mesh_dim_names=("host", "local"))
        # Groups are created in the same order on all ranks, because they are identified by number.
        channels = [Channel(rank, size, dist.new_group(timeout=timeout), roll) for _ in range(2)]
        # Collectives of this group may wait while a rank reads a terabyte, as long as heartbeats
        # arrive. Only connecting has the usual timeout.
        patient = dist.new_group(timeout=timeout)
        longest = timedelta(seconds=max(config.timeout, _LONGEST_WORK_SECONDS))
        dist.distributed_c10d._set_pg_timeout(longest, patient)
        channels.append(Channel(rank, size, patient, roll, heart.look))
        subgroups = [devices.get_group(name) for name in ("host", "local")]
        between, inside = (
            [
                _part(rank, ranks, timeout, roll)
                for ranks in (devices.mesh.T.tolist(), devices.mesh.tolist())
            ]
            if by_towers
            else (None, None)
        )
    except RuntimeError as error:
        raise roll.explain(error) from error
    # The first collective of a group connects; a rank that ends before it would leave the others
    # waiting.
    for group in subgroups:
        Channel(dist.get_rank(group), dist.get_world_size(group), group, roll).agree(None)
    ids, rows, files = channels
    mesh = Mesh(
        rank=rank,
        ranks=size,
        ids=ids,
        rows=rows,
        files=files,
        devices=devices,
        inside=inside,
        between=between,
    )
    for channel in mesh.channels:
        channel.agree(None)
    return mesh


def _part(rank: int, parts: Sequence[Sequence[int]], timeout: timedelta, roll: RollCall) -> Mesh:
    """Return the mesh of the part that contains this rank, with channels for ids and rows."""
    mine = next(ranks for ranks in parts if rank in ranks)
    mesh = Mesh.alone()
    if len(mine) == 1:
        return mesh
    channels = []
    for _ in range(2):
        # Every rank must create all groups, including groups to which it does not belong.
        groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
        group = groups[parts.index(mine)]
        channels.append(Channel(mine.index(rank), len(mine), group, roll))
    ids, rows = channels
    return replace(mesh, rank=mine.index(rank), ranks=len(mine), ids=ids, rows=rows)


_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def listen_towards(host: str) -> None:
    """Make gloo listen on the network interface with the route to `host`, unless
    ``GLOO_SOCKET_IFNAME`` is set.

    If the interface cannot be determined, gloo uses the interface with the address of this
    machine's name.
    """
    if os.environ.get(_INTERFACE):
        return
    name = _interface_of(_local_address(host))
    if name:
        os.environ[_INTERFACE] = name


def _local_address(host: str) -> str:
    """Return the IPv4 address of this machine on the route to `host`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket only selects a route.
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    try:
        from fcntl import ioctl  # not on every system
    except ImportError:
        return ""
    if not address:
        return ""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                reply = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
        # Addresses such as 127.0.1.1 also belong to the loopback.
        if socket.inet_ntoa(reply[20:24]) == address or (name == "lo" and address.startswith("127.")):
            return name
    return ""


def integer_variable(name: str, default: int) -> int:
    """Return the integer in the environment variable `name`; `default` if it is not set."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} is {text!r}, expected a whole number; start ranks by torchrun"
        ) from error


def starts() -> int:
    """Return how often torchrun has restarted this rank."""
    return integer_variable("TORCHELASTIC_RESTART_COUNT", 0)


def holds_store(rank: int) -> bool:
    """Whether this process holds the store of all ranks; if none does, torchrun's agent does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def hosts_and_local_ranks(config: DistributedConfig, size: int) -> tuple[int, int]:
    """Return the number of hosts, and the number of ranks on each host.

    Parameters
    ----------
    config : DistributedConfig
        Its field `hosts`, or else torchrun's variable ``LOCAL_WORLD_SIZE``, determines the result.
    size : int
        Number of all ranks.
    """
    if config.hosts is not None:
        hosts, setting = config.hosts, f"distributed.hosts is {config.hosts}"
    else:
        local = integer_variable("LOCAL_WORLD_SIZE", size)
        hosts, setting = size // max(local, 1), f"LOCAL_WORLD_SIZE is {local}"
        hosts = hosts if hosts * local == size else 0
    if not hosts or size % hosts:
        raise ConfigError(f"{setting} for {size} ranks, expected the same number of ranks on every host")
    return hosts, size // hosts


def connect_store(config: DistributedConfig, rank: int, size: int) -> tuple[Store, Store]:
    """Connect to the rendezvous store; return a view of it that survives restarts, and a view for
    this start.

    Waits only for the process that holds the store.

    Parameters
    ----------
    config : DistributedConfig
        Has the timeout in seconds.
    rank, size : int
        Number of this rank, and number of all ranks.

    Raises
    ------
    ConfigError
        If the environment does not have the address of the store.
    RankError
        If no process answers at the address, or the port is in use.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {size} but {', '.join(missing)} is not set; start ranks by torchrun"
        )
    host, port = os.environ["MASTER_ADDR"], integer_variable("MASTER_PORT", 0)
    listen_towards(host)
    try:
        # torch's `rendezvous` is not used: it waits for all ranks in one call that blocks signals.
        store = TCPStore(
            host,
            port,
            is_master=holds_store(rank),
            timeout=timedelta(seconds=config.timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError) as error:
        # torch's message continues with a C++ stack trace.
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankError(
            f"rank {rank} of {size} could not reach the store at {host}:{port} within {config.timeout:g} s "
            f"({detail[:200]}); set an address that all ranks reach and a free port (torchrun "
            "--master-addr, --master-port)"
        ) from error
    # The agent's store survives a restart, with the entries of earlier ranks.
    return PrefixStore("stratarec/records", store), PrefixStore(f"start-{starts()}", store)
