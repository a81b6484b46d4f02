"""Where ranks meet: torchrun's environment, the store that all of them reach, and the interface that leads to it."""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from stratarec.distributed.config import DistributedConfig
from stratarec.errors import ConfigError, RankError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def listen_towards(host: str) -> None:
    """Let gloo listen on the interface that leads to `host`, unless ``GLOO_SOCKET_IFNAME`` names one.

    Where none can be found (a name that does not resolve, a system without this call) gloo chooses: the interface of
    the address that the host's own name resolves to.
    """
    if os.environ.get(_INTERFACE):
        return
    name = _interface_of(_local_address(host))
    if name:
        os.environ[_INTERFACE] = name


def _local_address(host: str) -> str:
    """The IPv4 address that this machine has towards `host`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A connected datagram socket only picks a route.
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    try:
        from fcntl import ioctl  # a system without it has no such call either
    except ImportError:
        return ""
    if not address:
        return ""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
        # 127.0.1.1 and its like are the loopback's, too.
        if socket.inet_ntoa(found[20:24]) == address or (name == "lo" and address.startswith("127.")):
            return name
    return ""


def number(name: str, default: int) -> int:
    """A variable of the environment."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, expected a whole number; start ranks by torchrun") from error


def starts() -> int:
    """How often torchrun has started this rank again."""
    return number("TORCHELASTIC_RESTART_COUNT", 0)


def holds_store(rank: int) -> bool:
    """Whether the store of all ranks is in this one's process; torchrun's agent has its own."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def shape(config: DistributedConfig, size: int) -> tuple[int, int]:
    """Hosts, and ranks of each."""
    if config.hosts is not None:
        hosts, said = config.hosts, f"distributed.hosts is {config.hosts}"
    else:
        local = number("LOCAL_WORLD_SIZE", size)
        hosts, said = size // max(local, 1), f"LOCAL_WORLD_SIZE is {local}"
        hosts = hosts if hosts * local == size else 0
    if not hosts or size % hosts:
        raise ConfigError(f"{said} for {size} ranks, expected as many ranks on every host")
    return hosts, size // hosts


def meet(config: DistributedConfig, rank: int, size: int) -> tuple[Store, Store]:
    """A store that outlives restarts, and one of this start; waits for the one that holds them, not for the others.

    Raises
    ------
    ConfigError
        Where the environment does not say where that is.
    RankError
        Where nobody answers there, or the port is in use.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is {size} but {', '.join(missing)} is not set; start ranks by torchrun")
    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT", 0)
    listen_towards(host)
    try:
        # Not by torch's `rendezvous`: it waits for all ranks in one call, in which no signal is heard.
        store = TCPStore(
            host, port, is_master=holds_store(rank), timeout=timedelta(seconds=config.timeout),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except (RuntimeError, ValueError, OSError) as error:
        # What torch says goes on with a C++ stack trace.
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankError(
            f"rank {rank} of {size} could not meet the others at {host}:{port} within {config.timeout:g} s "
            f"({detail[:200]}); name an address that all ranks reach and a port that is free (torchrun --master-addr, "
            "--master-port)"
        ) from error
    # The agent's store outlives a restart, with all that the ranks before wrote into it.
    return PrefixStore("stratarec/notes", store), PrefixStore(f"start-{starts()}", store)
