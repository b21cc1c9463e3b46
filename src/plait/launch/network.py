"""Addresses, network interfaces and ports: whether a host name means this host, and how this host reaches rank 0."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from plait.errors import WorldError

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def resolve(host: str) -> str:
    """Return the address of a host; `user@` before the name is ignored."""
    name = host.rpartition("@")[2]
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WorldError(
            f"the host {name!r} has no address here: {error}; correct the name, or add it to DNS"
        ) from error
    # IPv4 first: a name often has both, and a link-local IPv6 address needs its interface.
    addresses = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def is_this_host(host: str) -> bool:
    """Return whether a name is this host's, tested by binding a socket to its address."""
    try:
        address = resolve(host)
        with _datagrams(address) as probe:
            probe.bind((address, 0))
    except (WorldError, OSError):
        return False
    return True


def source_address(target: str) -> str:
    """Return the local address that a connection to `target` would have. Nothing is sent."""
    with _datagrams(target) as probe:
        probe.connect((target, 9))
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this local address; None if none has."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def route_to(address: str) -> str | None:
    """Return the interface over which this host reaches `address`; None without a route."""
    try:
        return interface_of(source_address(address))
    except OSError:
        return None


def interface_variables(address: str, present: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set gloo's and NCCL's interface, unless the user has set them.

    By default gloo takes the interface of the address that the host's own name resolves to. On many systems that is the
    loopback interface; ranks on different hosts then wait for each other at 127.0.1.1.
    """
    absent = [name for name in _INTERFACE_VARIABLES if name not in present]
    interface = route_to(address) if absent else None
    return dict.fromkeys(absent, interface) if interface else {}


def _datagrams(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)


# Ports: a free one, or which process holds one that is in use.


DEFAULT_PORT = 29500
"""The default port of torchrun and DeepSpeed."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free TCP port."""
    with _socket(address) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    """Return whether rank 0, which listens on all addresses of its host, could use this port."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104  # as torch will; closed at once
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
    return True


_TAKEN = {errno.EADDRINUSE, errno.EACCES}


def check_port(port: int, *, asked_by: str = "--master_port") -> int:
    """Return the port if it is free on this host. Else raise an error that names the process that holds it.

    `asked_by` is the flag or variable that set the port, for the message.
    """
    if not 0 < port < 1 << 16:
        raise WorldError(f"{asked_by} {port}: a port is a number from 1 to 65535")
    if port_is_free(port):
        return port
    raise WorldError(
        f"{asked_by} {port} is in use: {port_holder(port)} has it; end that, or leave {asked_by} out "
        "and a free port is taken"
    )


def port_holder(port: int) -> str:
    """Return a text about the process that listens on a port of this host, as far as this user may see it."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & _sockets(process):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"process {process.name} ({' '.join(command.split())[:80]})"
    return "a process of another user" if inodes else "a process that cannot be seen from here"


def _sockets(process: Path) -> set[str]:
    """Return the inodes of a process's sockets; none for another user's process."""
    inodes = set()
    with suppress(OSError):
        for fd in (process / "fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                inodes.update(_SOCKET.findall(str(fd.readlink())))
    return inodes


_SOCKET = re.compile(r"socket:\[(\d+)\]")


def _listening(table: str, port: int) -> list[str]:
    """Return the inodes of the sockets that listen on a port, from the kernel's table."""
    try:
        lines = Path("/proc/net", table).read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    listen = "0A"
    return [row[9] for row in rows if row[3] == listen and int(row[1].rpartition(":")[2], 16) == port]


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
