"""ResNet-50 under the three strategies of MMEngine's example, as its script has them, beside the logs of the original.

    python benchmarks/flexible.py                              # two gloo ranks, or a rank for every GPU
    python benchmarks/flexible.py --batch 128 --samples 5120   # as many images a rank as the original

`examples/mmengine_flexible.py` is started as a user would, once for each strategy and round. What is read is what its
log says: `time` of a step (the median, without each run's first lines) and `memory`. The original's logs, of two cards
with 128 images each, are those of MMEngine with real DeepSpeed, FSDP and ColossalAI; machines differ, so the ratio
between strategies is what to compare, on GPUs: a CPU has no fast fp16, which two of the three ask for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from statistics import median

import common

SCRIPT = common.ROOT / "examples" / "mmengine_flexible.py"
LOGGED = {"deepspeed": (0.199, 970), "fsdp": (0.067, 954), "colossalai": (0.110, 597)}
"""Seconds a step and MiB of a card, in the steady part of the original's logs."""
LINE = re.compile(r"Epoch\(train\).* time: ([\d.]+).* memory: (\d+)")


def measure(strategy: str, *, ranks: int, arguments: list[str], limit: float) -> common.Result:
    """One run of the script."""
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        try:
            done = subprocess.run(
                [*command, str(SCRIPT), f"--use-{strategy}", *arguments],
                cwd=folder,
                env=common.environment(),
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {limit:g} s"}
    found = [(float(time), int(memory)) for time, memory in LINE.findall(done.stdout + done.stderr)]
    if done.returncode != 0 or len(found) < 2:
        return {"error": f"exit code {done.returncode}; {_reason(done.stdout + done.stderr)}"}
    times = [time for time, _ in found[1:]]  # the first line has the warm-up
    return {"time": median(times), "memory": max(memory for _, memory in found)}


def _reason(said: str) -> str:
    """The last line that names an error: torchrun goes on talking after it."""
    lines = [line.strip() for line in said.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    named = [line for line in lines if "ChildFailedError" not in line]
    return f"last error: {(named or lines)[-1][:300]}" if lines else "it named no error"


def as_table(found: dict[str, list[common.Result]]) -> str:
    """A line for each strategy; times as multiples of FSDP's too."""
    times = {name: median([run["time"] for run in runs]) for name, runs in found.items()}
    lines = []
    for name, (seconds, mib) in LOGGED.items():
        if name not in times:
            continue
        own = f"{times[name] / times['fsdp']:.2f}" if "fsdp" in times else "–"
        memory = max(run["memory"] for run in found[name])
        cells = [f"{times[name] * 1e3:.1f}", own, str(memory)]
        lines.append(
            [f"`--use-{name}`", *cells, f"{seconds * 1e3:.0f}", f"{seconds / LOGGED['fsdp'][0]:.2f}", str(mib)]
        )
    heads = ["strategy", "Plait, ms a step", "÷ FSDP", "MiB", "original's log, ms", "÷ FSDP", "MiB"]
    return common.table(heads, lines)


def main() -> None:
    options = common.parser(__doc__, list(LOGGED))
    options.add_argument("--ranks", type=int, help="absent: 2, or as many as there are GPUs")
    options.add_argument("--batch", type=int, default=8, help="images of a rank a step")
    options.add_argument("--samples", type=int, default=320, help="images of an epoch")
    options.add_argument("--depth", type=int, default=50)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--limit", type=float, default=900.0, help="seconds that one run may take")
    given = options.parse_args()
    ranks = given.ranks or _gpus() or 2
    arguments = ["--epochs", "1", "--depth", str(given.depth)]
    arguments += ["--batch", str(given.batch), "--samples", str(given.samples)]
    where = common.machine()
    found: dict[str, list[common.Result]] = {}
    for _ in range(given.rounds):
        for name in common.chosen(given.rows, list(LOGGED)):
            run = measure(name, ranks=ranks, arguments=arguments, limit=given.limit)
            print({"row": name, **run}, flush=True)
            if "error" not in run:
                found.setdefault(name, []).append(run)
    title = f"{common.say_machine(where)}; ResNet-{given.depth}, {ranks} ranks, {given.batch} images each"
    common.finish(given.json, {"machine": where, "results": found}, f"{title}.\n\n{as_table(found)}")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
