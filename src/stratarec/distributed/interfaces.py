"""Which network interface ranks listen on: the one that leads to the rendezvous, never all of them."""

from __future__ import annotations

import os
import socket
import struct

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def listen_towards(host: str) -> None:
    """Let gloo listen on the interface that leads to `host`, unless ``GLOO_SOCKET_IFNAME`` names one.

    Where none can be found (a name that does not resolve, a system without this call) gloo chooses: the interface of
    the address that the host's own name resolves to.
    """
    if os.environ.get(_VARIABLE):
        return
    name = _interface_of(_local_address(host))
    if name:
        os.environ[_VARIABLE] = name


def _local_address(host: str) -> str:
    """The IPv4 address that this machine has towards `host`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
