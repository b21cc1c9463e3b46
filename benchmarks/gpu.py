"""One GPU: tokens a second, share of the peak and memory, Plait beside raw torch and every peer that is installed.

    python benchmarks/gpu.py                                       # Llama 1B, every row
    python benchmarks/gpu.py --rows raw-model,plait-compile --sizes 1b,8b
    python benchmarks/gpu.py --sizes 32k,128k,resnet50 --steps 2 --warmup 2
    python benchmarks/gpu.py --losses --text shakespeare.txt       # does it learn as plain torch does?
    python benchmarks/gpu.py --tiny                                # does every row work? on CPU, in a minute

bf16 compute on fp32 weights, AdamW, no clipping; each row in a process of its own, with a time limit, and a row that
fails says why while the others go on. Rows with `plain` in the column `model` share one plain Llama; `plait` is the
one that Plait brings, the same network with a loss that never holds all logits. Every row runs some steps that are
waited for one by one (`waited`, their median), then as many without waiting in between, as a loop runs that reads no
number off the device (`tokens/s`, and what follows from it). `ready` is the time from the start to the end of the
first step: imports, building, compiling. Numbers go to gpu.json too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import common
import gpu_losses
from common import Result
from gpu_job import CASES, TINY, Case, Job, Settings
from gpu_rows import ROWS, USUAL


def measure(name: str, settings: Settings) -> Result:
    """In the child: train, and tell. What was printed meanwhile is told too: a compiler that gave up says so."""
    row = ROWS[name]
    job = Job(settings, row.whose)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        row.run(job)
    print(said.getvalue())
    result = job.measured()
    if name.startswith("plait") and said.getvalue().strip():
        result["said"] = said.getvalue().strip()[:300]
    return result


def settings_of(given: argparse.Namespace, case: Case) -> Settings:
    """How the rows of a case are run."""
    if given.tiny:
        return Settings(case, 1, "cpu", "eager", given.recompute, warmup=1)
    return Settings(case, given.steps, given.device, "inductor", given.recompute, warmup=given.warmup)


def import_once() -> None:
    """What the rows need, before they are forked off."""
    for name in ("torch._dynamo", "plait.models", "plait.engine"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork


def forked(work: Callable[[], Result], limit: float) -> Result:
    """A process that begins with what this one has imported: seconds are saved, and no GPU is touched."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_tell, args=(work, there))
    process.start()
    there.close()
    found: Result = {"error": f"no end after {limit:g} s"}
    if here.poll(limit):
        try:
            found = here.recv()
        except EOFError:
            found = {"error": "it ended without a word"}
    process.kill()
    process.join()
    return found


def _tell(work: Callable[[], Result], there: Any) -> None:
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        there.send(work())
    except BaseException as error:
        there.send({"error": common.reason(error)})
    os._exit(0)


def run_row(name: str, size: str, given: argparse.Namespace) -> Result:
    """One row of one size, in its own process."""
    if given.tiny:
        settings = settings_of(given, TINY[size])
        return forked(lambda: measure(name, settings), given.limit)
    options = ["--sizes", size, "--device", given.device, "--recompute", given.recompute]
    options += ["--steps", str(given.steps), "--warmup", str(given.warmup)]
    said = common.run_child(common.itself(__file__, "--child", name, *options), limit=given.limit)
    found: Result = said if "error" in said else said["ranks"][0]
    return found


def as_table(found: dict[str, Result], unit: str) -> str:
    """One line a row."""
    lines: list[Sequence[str]] = []
    for name, one in found.items():
        start = [ROWS[name].label, ROWS[name].whose if unit == "tokens" else "plait"]
        if "error" in one:
            lines.append([*start, *"–" * 6, f"did not run: {one['error']}"])
            continue
        mfu = "–" if one["mfu"] is None else f"{one['mfu']:.3f}"
        speeds = [f"{one['per_s']:,}", f"{one['waited_per_s']:,}"]
        rest = [f"{one['peak_gib']:.1f}", f"{one['ready_s']:.0f}", f"{one['loss']:.3f}"]
        lines.append([*start, f"{one['ms']:.1f}", *speeds, mfu, *rest])
    head = ["row", "model", "ms", f"{unit}/s", "waited", "MFU", "peak GiB", "ready s", "last loss"]
    said = [f"{ROWS[name].label}: {one['said']}" for name, one in found.items() if "said" in one]
    return "\n\n".join([common.table(head, lines), *said])


def parse() -> argparse.Namespace:
    """The options."""
    options = common.parser(__doc__, list(ROWS))
    options.add_argument("--sizes", default="1b", help=f"comma-separated, of {', '.join(CASES)}; or `all`")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--steps", type=int, default=10, help="steps waited for, and as many again without")
    options.add_argument("--warmup", type=int, default=4, help="steps before those that count")
    options.add_argument("--recompute", default="auto", help="which way Plait recomputes, where a size asks for it")
    options.add_argument("--limit", type=float, default=200.0, help="seconds that one row may take")
    options.add_argument("--losses", action="store_true", help="compare losses on a text instead of speeds")
    options.add_argument("--text", default=gpu_losses.TEXT, help="what --losses trains on")
    options.add_argument("--tiny", action="store_true", help="small networks on CPU: does everything run?")
    given = options.parse_args()
    if given.tiny:
        given.device = "cpu"
    if given.tiny and given.json is None:
        given.json = os.devnull
    given.json = given.json or "gpu.json"
    given.sizes = list(CASES) if given.sizes == "all" else given.sizes.split(",")
    if unknown := sorted(set(given.sizes) - set(CASES)):
        raise SystemExit(f"--sizes: there is no {', '.join(unknown)}; there are {', '.join(CASES)}")
    return given


def main() -> None:
    given = parse()
    where = common.machine()
    if given.tiny:
        import_once()
    if given.losses:
        gpu_losses.main(given, where, forked)
        return
    if given.child is not None:
        common.reply(lambda: measure(given.child, settings_of(given, CASES[given.sizes[0]])))
    cases = TINY if given.tiny else CASES
    everything: dict[str, dict[str, Result]] = {}
    tables = []
    for size in given.sizes:
        found = everything.setdefault(size, {})
        for name in common.chosen(given.rows, list(ROWS)) if given.rows is not None else USUAL[size]:
            found[name] = run_row(name, size, given)
            common.show(size=size, row=name, **found[name])
        device = next((one["device"] for one in found.values() if "device" in one), given.device)
        tables.append(f"{device}; {cases[size]}; MFU of 989 TFLOP/s.\n\n{as_table(found, cases[size].unit)}")
    text = f"{common.say_machine(where)}\n\n" + "\n\n".join(tables)
    common.finish(given.json, {"machine": where, "sizes": everything}, text)


if __name__ == "__main__":
    main()
