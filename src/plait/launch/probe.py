"""Reports the facts about a host that the preflight checks. Loads no torch: its version is read from its files.

python -m plait.launch.probe        a question on stdin, the facts on stdout, a line of JSON each
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from plait.launch.job import find_program
from plait.launch.network import free_port, port_holder, port_is_free, route_to

MARK = "PLAIT-FACTS "
"""The start of the line with the facts, which tells it from other output, such as a login shell's."""
_MOST_FILES = 5000


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The request of the launcher."""

    folder: str | None = None
    code: str | None = None
    """The folder or file whose Python code must be the same on all hosts."""
    words: Sequence[str] = ()
    """The program's arguments. Scripts, settings and modules that they name must be the same on all hosts."""
    marker: str | None = None
    """A file that the launcher has just made. A host that sees it shares the folder with the launcher's host."""
    address: str | None = None
    """The address of rank 0."""
    port: int | None = None
    """The port of rank 0; None if rank 0 is not on this host."""
    program: str = ""
    """The program of the ranks."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The answer of a host."""

    python: str
    torch: str | None
    cuda: str | None
    plait: str | None
    code: str
    program: str | None
    """The path of the ranks' program; None if it does not exist."""
    memory: int
    """Free bytes of the host's memory."""
    gpus: int
    gpu_memory: int | None
    """Free bytes of the GPU with the least free memory."""
    interface: str | None
    reached_at: str | None
    """The address at which the ssh connection reached this host."""
    shared: bool
    port_free: bool
    port_holder: str
    other_port: int
    clock: float


def answer(question: ProbeRequest) -> HostFacts:
    """Return the facts about this host that the request asks for."""
    import psutil

    gpus = gpu_memory()
    taken = question.port is not None and not port_is_free(question.port)
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return HostFacts(
        python=platform.python_version(),
        torch=_version("torch"),
        cuda=torch_cuda(),
        plait=_version("plait"),
        code=code_hash(Path(question.code), question.words) if question.code else "",
        program=find_program(question.program, folder=question.folder) if question.program else "",
        memory=psutil.virtual_memory().available,
        gpus=len(gpus),
        gpu_memory=min(gpus, default=None),
        interface=route_to(question.address) if question.address else None,
        reached_at=connection[2] if len(connection) == 4 else None,
        shared=question.marker is not None and Path(question.marker).exists(),
        port_free=not taken,
        port_holder=port_holder(question.port) if taken and question.port else "",
        other_port=free_port(),
        clock=time.time(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, read from its files; None for a build without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def gpu_memory() -> list[int]:
    """Return the free bytes of each GPU that a process started here would see."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return []
    free = [int(line) << 20 for line in listing.stdout.split()] if listing.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return free
    chosen = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [free[int(name)] if name.isdecimal() and int(name) < len(free) else min(free) for name in chosen if free]


def code_hash(code: Path, arguments: Sequence[str] = ()) -> str:
    """Return a hash of all Python files in a folder, of Plait itself, and of the files that a command's arguments name.

    Hosts with the same hash run the same code, with the same settings.
    """
    digest = hashlib.blake2b(digest_size=6)
    files = [path for path in map(Path, _values(arguments)) if path.suffix.lower() in _READ_BY_RANKS]
    texts = [*arguments, *(path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())]
    for root in (code, Path(__file__).parents[1], *files, *_modules(texts)):
        for path in _sources(root):
            digest.update(str(path.relative_to(root)).encode(errors="surrogateescape"))
            try:
                digest.update(path.read_bytes())
            except OSError:
                digest.update(b"unreadable")
    return digest.hexdigest()


_READ_BY_RANKS = (".py", ".yaml", ".yml", ".toml", ".json", ".jsonc", ".json5")
_TARGET = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*")


def _values(arguments: Sequence[str]) -> Iterator[str]:
    """Yield each argument, and of an argument such as `--config=run.yaml` also the value."""
    return (value for argument in arguments for value in dict.fromkeys((argument, argument.partition("=")[2])) if value)


def _modules(texts: Sequence[str]) -> list[Path]:
    """Return the paths of user packages that texts name (`target: package.module:Name`). Skip installed packages."""
    names = {name for text in texts for name in _TARGET.findall(text)}
    folders = []
    for name in sorted(names - sys.stdlib_module_names - {"plait"}):
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            continue
        locations = [] if spec is None else list(spec.submodule_search_locations or filter(None, [spec.origin]))
        folders += [Path(location) for location in locations if "site-packages" not in Path(location).parts]
    return folders


def _sources(root: Path) -> list[Path]:
    if root.is_file() or not root.exists():
        return [root]
    files = []
    for path in _walk(root):
        files.append(path)
        if len(files) > _MOST_FILES:
            break
    return sorted(files)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, without hidden ones, installed packages and virtual environments."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("__pycache__", "site-packages", "node_modules")
            and not Path(path, name, "pyvenv.cfg").exists()
        )
        yield from (Path(path, name) for name in sorted(files) if name.endswith(".py"))


def main() -> None:
    """Read the request from stdin, and print the facts."""
    facts = answer(ProbeRequest(**json.loads(sys.stdin.readline())))
    print(MARK + json.dumps(asdict(facts)), flush=True)


if __name__ == "__main__":
    main()
