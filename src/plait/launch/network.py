"""Addresses and network interfaces: which host is this one, and which way leads to rank 0."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from plait.errors import WorldError

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def resolve(host: str) -> str:
    """The address of a host; `user@` before it is left out."""
    name = host.rpartition("@")[2]
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WorldError(
            f"the host {name!r} has no address here: {error}; correct the name, or add it to DNS"
        ) from error
    # IPv4 first: a name often has both, and a link-local IPv6 address leads nowhere without its interface.
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def is_this_host(host: str) -> bool:
    """Whether a name means the host we are on: only then one of our sockets can have its address."""
    try:
        address = resolve(host)
        with _datagrams(address) as probe:
            probe.bind((address, 0))
    except (WorldError, OSError):
        return False
    return True


def source_address(target: str) -> str:
    """The address of ours that a connection to `target` would have. Sends nothing."""
    with _datagrams(target) as probe:
        probe.connect((target, 9))
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this host."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def route_to(address: str) -> str | None:
    """The interface over which this host reaches `address`; None where there is no way."""
    try:
        return interface_of(source_address(address))
    except OSError:
        return None


def interface_variables(address: str, present: Mapping[str, str]) -> dict[str, str]:
    """Tell gloo and NCCL which interface to use, unless the user did.

    Left alone, gloo takes the one that the host's own name leads to. On many systems that is the loopback
    interface, and ranks on different hosts then wait for each other at 127.0.1.1.
    """
    absent = [name for name in _INTERFACE_VARIABLES if name not in present]
    interface = route_to(address) if absent else None
    return dict.fromkeys(absent, interface) if interface else {}


def _datagrams(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
