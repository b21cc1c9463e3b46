"""How long a launcher takes to the first line of the script: two local ranks, `plait launch` beside the others.

    python benchmarks/launch.py --rounds 5

The script notes the time on its first line and imports nothing that its launcher has loaded before. From the start
of the command to the first line of the last rank; also to the end of the command, which is what a script of no
length costs in all. In rounds over all launchers; the first round only fills the caches.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
from common import Result, median

SCRIPT = """import time; now = time.time()
import os
open(os.path.join(os.environ["FIRST_LINE"], os.environ["RANK"]), "w").write(repr(now))
"""
BIN = Path(sys.executable).parent
COMMANDS = {
    "plait launch": [sys.executable, "-m", "plait", "launch", "--nproc_per_node", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--no_local_rank"],
}
RANKS = 2


def measure(command: list[str], limit: float) -> Result:
    """One launch."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        out = Path(folder, "out")
        out.mkdir()
        environment = {**os.environ, "FIRST_LINE": str(out), "DS_ACCELERATOR": "cpu"}
        began = time.time()
        try:
            done = subprocess.run(
                [*command, str(script)], env=environment, capture_output=True, text=True, timeout=limit, cwd=folder
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
        ended = time.time()
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
        lines = [float((out / str(rank)).read_text()) for rank in range(RANKS)]
    return {"first_line": max(lines) - began, "whole": ended - began}


def compare(rounds: int, limit: float) -> dict[str, list[Result]]:
    """Every launcher once a round; what each took."""
    found: dict[str, list[Result]] = {name: [] for name in COMMANDS}
    for turn in range(rounds + 1):
        for name, results in found.items():
            result = measure(COMMANDS[name], limit)
            if turn:
                results.append(result)
                common.show(row=name, round=turn - 1, **result)
    return found


def as_table(found: dict[str, list[Result]]) -> str:
    """Medians over rounds, and their range."""
    lines = []
    for name, results in found.items():
        if broken := next((one["error"] for one in results if "error" in one), None):
            lines.append([name, f"did not run: {broken}", ""])
        else:
            lines.append([name, *(_spread([one[key] for one in results]) for key in ("first_line", "whole"))])
    return common.table(["launcher", "to the first line, ms", "whole command, ms"], lines)


def _spread(seconds: list[float]) -> str:
    low, middle, high = (1e3 * value for value in (min(seconds), median(seconds), max(seconds)))
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--limit", type=float, default=120.0, help="seconds that one launch may take")
    options.add_argument("--json", metavar="PATH", help="write all numbers here too")
    given = options.parse_args()
    where = common.machine()
    found = compare(given.rounds, given.limit)
    title = f"{common.say_machine(where)}; {RANKS} local ranks, median (range) of {given.rounds} rounds"
    common.finish(given.json, {"machine": where, "results": found}, f"{title}.\n\n{as_table(found)}")


if __name__ == "__main__":
    main()
