"""What every benchmark here shares: child processes, one clock, the machine in words, markdown tables.

No torch in this file: the parent of a benchmark only starts children and does sums, so that it neither warms
nor disturbs what they measure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPLY = "PLAIT_BENCH_REPLY"
"""Under this name a child finds the file to leave its result in: stdout belongs to the frameworks."""

Result = dict[str, Any]


# ---- the clock


class Stopwatch:
    """Ticks once a step, from inside whatever every framework has to call: wall and CPU seconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def tick(self) -> None:
        """A step begins."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def steps(self, skip: int) -> tuple[list[float], list[float]]:
        """Wall and CPU seconds of each step, without the first `skip`."""
        return _differences(self.wall[skip:]), _differences(self.cpu[skip:])


def _differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def memory_mib(field: str) -> float:
    """A field of /proc/self/status, such as VmHWM or RssAnon; nan where the system has no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), float("nan"))


def forget_peak() -> bool:
    """Let VmHWM start over from what is held now; False where the kernel does not offer it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# ---- children


def run_child(
    arguments: Sequence[str], *, limit: float, ranks: int = 1, env: Mapping[str, str] | None = None
) -> Result:
    """Run a command in its own processes and return what each left with `reply`, merged under `ranks`.

    With several ranks each process gets the variables of torchrun. Whatever goes wrong (no such package, a
    crash, a hang) comes back as `{"error": reason}`.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below takes the children along
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        port = str(_free_port())
        children: list[_Child] = []
        try:
            for rank in range(ranks):
                children.append(_Child(arguments, Path(folder), rank, ranks, port, env or {}))
            ended = _wait(children, limit)
        finally:
            for child in children:
                child.end()
        if not ended:
            return {"error": f"no end after {limit:g} s; last words: {children[0].last_words()}"}
        results = [child.result() for child in children]
        broken = [child for child, found in zip(children, results, strict=True) if "error" in found]
        # The first to speak has the cause; the others fail because it did.
        return min(broken, key=_Child.spoke_at).result() if broken else {"ranks": results}


def run_side_by_side(commands: Sequence[Sequence[str]], *, limit: float) -> list[Result]:
    """Run commands at the same time, a process each, and return what each left with `reply`; for what is not timed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        children: list[_Child] = []
        try:
            for index, arguments in enumerate(commands):
                home = Path(folder) / str(index)
                home.mkdir()
                children.append(_Child(arguments, home, rank=0, ranks=1, port=str(_free_port()), env={}))
            deadline = time.monotonic() + limit
            while any(child.running for child in children) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for child in children:
                child.end()
        return [child.result() for child in children]


def _wait(children: Sequence[_Child], limit: float) -> bool:
    """Until all children ended, or one failed; False where they took longer than `limit`."""
    deadline = time.monotonic() + limit
    while any(child.running for child in children):
        if any(child.failed for child in children):
            time.sleep(5)  # the others may still say why; without it they would wait for ever
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class _Child:
    def __init__(
        self, arguments: Sequence[str], folder: Path, rank: int, ranks: int, port: str, env: Mapping[str, str]
    ) -> None:
        self._home = folder / f"rank{rank}"
        self._home.mkdir()
        self._reply = folder / f"reply{rank}.json"
        self._log_path = folder / f"log{rank}"
        self._log = self._log_path.open("wb")
        self._process = subprocess.Popen(
            arguments,
            cwd=self._home,  # what frameworks leave lying about goes with the folder
            env=_environment(rank, ranks, port) | {REPLY: str(self._reply)} | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def failed(self) -> bool:
        return self._process.poll() not in (None, 0)

    def end(self) -> None:
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def result(self) -> Result:
        if self._reply.exists():
            found: Result = json.loads(self._reply.read_text())
            return found
        return {"error": f"exit code {self._process.returncode}; last words: {self.last_words()}"}

    def spoke_at(self) -> float:
        return self._reply.stat().st_mtime if self._reply.exists() else float("inf")

    def last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "none"


def environment() -> dict[str, str]:
    """Of a child: it finds this Plait, and says nothing but what matters."""
    own = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),  # ninja
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    return dict(os.environ) | own


def other_tree(folder: str) -> dict[str, str]:
    """What to give a child besides, so that it finds the Plait of another checkout (`--before`)."""
    src = Path(folder).resolve() / "src"
    if not (src / "plait" / "__init__.py").exists():
        raise SystemExit(f"--before: {folder} is no checkout of Plait: it has no src/plait")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(src), os.environ.get("PYTHONPATH"))))}


def commit(folder: str | Path = ROOT) -> str:
    """The commit of a checkout, in short; `?` where it is none."""
    asked = subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip() or "?"


def plait_of_child(env: Mapping[str, str] = MappingProxyType({})) -> str:
    """The folder that a child imports Plait from, which an installed one must not hide."""
    code = "import pathlib, plait; print(pathlib.Path(plait.__file__).resolve().parents[2])"
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, env=environment() | dict(env), cwd="/", text=True).strip()


BEFORE = ", before"
"""Behind the name of a row that was measured with the Plait of `--before`."""


def with_before(names: Sequence[str], before: str | None) -> list[tuple[str, str, dict[str, str]]]:
    """Label, row and environment of what is run in a round: Plait's rows twice where there is another tree."""
    if before is None:
        return [(name, name, {}) for name in names]
    env = other_tree(before)
    for folder, found in ((ROOT, plait_of_child()), (Path(before).resolve(), plait_of_child(env))):
        if found != str(folder):
            raise SystemExit(f"--before: {found} would be measured in place of {folder}")
    runs: list[tuple[str, str, dict[str, str]]] = []
    for name in names:
        runs.append((name, name, {}))
        if name.startswith("plait") or name == "help":
            runs.append((name + BEFORE, name, env))
    return runs


def _environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    own = environment()
    if ranks > 1:
        own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return own


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_alone() -> None:
    """Make this process rank 0 of 1, for frameworks that insist on a process group."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(_free_port()))


def reply(measure: Callable[[], Result]) -> None:
    """In a child: leave the result of `measure`, or the reason why there is none, and end the process."""
    target = Path(os.environ[REPLY])
    try:
        result, code = measure(), 0
    except BaseException as error:
        traceback.print_exc()
        result, code = {"error": reason(error)}, 1
    target.write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # frameworks' exit handlers may hang, and measure nothing


def reason(error: BaseException) -> str:
    """An exception in one line, with the place that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = last.filename.rpartition("site-packages/")[2]
    text = " ".join(str(error).split())[:240]
    return f"{type(error).__name__}: {text} ({Path(where).name if where == last.filename else where}:{last.lineno})"


def itself(script: str, *arguments: str) -> list[str]:
    """The command that runs a benchmark script as a child."""
    return [sys.executable, str(Path(script).resolve()), *arguments]


# ---- words and numbers


def machine() -> Result:
    """Where and when this was measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def say_machine(found: Mapping[str, Any]) -> str:
    """The machine in one line."""
    return (
        f"{found['date']}, {found['cpu']}, {found['cores']} cores (load {found['load_before']} before the start), "
        f"Python {found['python']}, torch {found['torch']}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def version(package: str) -> str:
    """The installed version of a package, or `not installed`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def median(values: Sequence[float]) -> float:
    """The median; nan of nothing."""
    return statistics.median(values) if values else float("nan")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table, columns aligned so that it reads well as text too."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in cells]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])


def show(**result: Any) -> None:
    """One JSON line, as soon as there is something to say."""
    print(json.dumps(result), flush=True)


def finish(path: str | None, found: Result, text: str) -> None:
    """Print the tables, and write everything as JSON where that was asked for."""
    print(f"\n{text}", flush=True)
    if path is not None:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def parser(description: str | None, known: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rows", help=f"comma-separated; absent: all of {', '.join(known)}")
    made.add_argument("--json", metavar="PATH", help="write all numbers here too")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def add_before(options: argparse.ArgumentParser) -> None:
    """The option for a comparison with an earlier commit."""
    help = "a checkout of an earlier commit (`git worktree add FOLDER COMMIT`): Plait's rows run with it too"
    options.add_argument("--before", metavar="FOLDER", help=help)


def chosen(text: str | None, known: Sequence[str]) -> list[str]:
    """The rows that `--rows` names, in the order in which they are known."""
    if text is None:
        return list(known)
    wanted = [name.strip() for name in text.split(",")]
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(f"--rows: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if name in wanted]
