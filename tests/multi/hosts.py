"""Hosts on one machine: a network namespace each, joined by a bridge, with a real sshd in every one of them."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DRAW = random.SystemRandom()  # names must differ between workers, also where a test before has seeded `random`


@dataclass
class Hosts:
    """Reached from here by `addresses`, with the ssh configuration `config`."""

    folder: Path
    prefix: str
    names: list[str]
    addresses: list[str]
    addresses6: list[str]
    config: Path

    def hostfile(self, *slots: int, names: list[str] | None = None) -> str:
        lines = [f"{host} slots={count}\n" for host, count in zip(names or self.addresses, slots, strict=True)]
        path = self.folder / f"hosts{DRAW.randrange(10**9)}"
        path.write_text("# who takes part\n" + "".join(lines))
        return str(path)

    def ssh(self) -> list[str]:
        """Flags that let the launcher in."""
        return ["--launcher_args", f"-F {self.config}"]

    def unplug(self, number: int) -> None:
        run("ip", "link", "set", f"{self.prefix}{number}", "down")

    def crash(self, number: int) -> None:
        """What runs there ends without a word, as does its network; nobody on the other side is told."""
        self.unplug(number)
        inside = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=True)
        subprocess.run(["kill", "-9", *inside.stdout.split()], check=False, capture_output=True)

    def plug_in(self, number: int) -> None:
        run("ip", "link", "set", f"{self.prefix}{number}", "up")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if _sshd() is None:
        return "sshd is not installed"
    return _no_network()


def _no_network() -> str | None:
    """Tries what `hosts` will do: some kernels have namespaces but no bridges."""
    name = f"pl{DRAW.randrange(10**6)}t"
    steps = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", f"{name}b", "type", "bridge"],
        ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name],
        ["ip", "link", "set", name, "master", f"{name}b", "up"],
    ]
    try:
        for words in steps:
            tried = subprocess.run(words, capture_output=True, text=True, check=False)
            if tried.returncode:
                return f"`{' '.join(words)}` fails here: {tried.stderr.strip()}"
        return None
    finally:
        for words in (["netns", "del", name], ["link", "del", name], ["link", "del", f"{name}b"]):
            subprocess.run(["ip", *words], check=False, capture_output=True)


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def hosts(count: int, folder: Path, *, disk: tuple[Path, Path] | None = None) -> Iterator[Hosts]:
    """So many hosts, gone again afterwards with all that ran in them.

    They share all folders. With `disk`, the first of the two, its `{}` replaced by the host's number, is what a
    host sees at the second.
    """
    folder.mkdir(exist_ok=True)
    net6 = f"fd{DRAW.randrange(16, 256):x}:{DRAW.randrange(1, 9999)}:"
    net = f"10.{DRAW.randrange(60, 250)}.{DRAW.randrange(250)}"
    prefix = f"pl{DRAW.randrange(10**6)}n"
    bridge, names = f"{prefix}b", [f"{prefix}{index}" for index in range(count)]
    addresses = [f"{net}.{index + 1}" for index in range(count)]
    addresses6 = [f"{net6}:{index + 1}" for index in range(count)]
    folder.chmod(0o755)
    for key in ("user", "host"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    config = folder / "ssh_config"
    aliases = "".join(f"Host worker-{i}\n  HostName {address}\n" for i, address in enumerate(addresses))
    config.write_text(
        f"{aliases}Host *\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
        f"  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "addr", "add", f"{net}.254/24", "dev", bridge)
        run("ip", "addr", "add", f"{net6}:fe/64", "dev", bridge, "nodad")
        run("ip", "link", "set", bridge, "up")
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", name, "master", bridge, "up")
            six = f"addr add {addresses6[index]}/64 dev eth0 nodad"
            for words in (f"addr add {address}/24 dev eth0", six, "link set eth0 up", "link set lo up"):
                run("ip", "-n", name, *words.split())
            mount = f"mount --bind {str(disk[0]).format(index)} {disk[1]} && " if disk else ""
            daemons.append(_daemon(name, folder, mount))
        for address in addresses:
            _wait_for(address)
        yield Hosts(folder, prefix, names, addresses, addresses6, config)
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for name in names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            subprocess.run(["kill", "-9", *inside.stdout.split()], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def _daemon(name: str, folder: Path, mount: str) -> subprocess.Popen[bytes]:
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = folder / f"{name}.sshd"
    settings.write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n"
    )
    # `ip netns exec` gives it a mount table of its own too, so a mount stays on its host.
    command = ["ip", "netns", "exec", name, "sh", "-c", f"{mount}exec {_sshd()} -D -e -f {settings}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection((address, 22), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"no sshd at {address}"
            time.sleep(0.05)
