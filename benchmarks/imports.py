"""What importing a framework costs once torch is there, and whether `plait --help` does without torch.

    python benchmarks/imports.py                  # the same as overhead.py --imports
    python benchmarks/imports.py --before FOLDER  # Plait's rows with the Plait of another checkout too

Every import in fresh processes, in rounds over all of them; the first round only fills the caches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import common
from common import Result, Stopwatch, median

STATEMENTS = {
    "plait": "import plait",
    "plait-prepare": "from plait import prepare",
    "plait-runner": "from plait import Runner",
    "accelerate": "from accelerate import Accelerator",
    "fabric": "from lightning.fabric import Fabric",
    "lightning": "from lightning import Trainer",
    "hf": "from transformers import Trainer",
    "deepspeed": "import deepspeed",
    "mmengine": "from mmengine.runner import Runner",
}
KNOWN = ("torch", "help", *STATEMENTS)


def measure(name: str) -> Result:
    """In the child: what one import costs."""
    if name == "torch":
        return _timed(lambda: exec("import torch", {}))
    if name == "help":
        return {**_timed(_plait_help), "torch": "torch" in sys.modules}
    import torch  # noqa: F401

    return _timed(lambda: exec(STATEMENTS[name], {}))


def _timed(action: Callable[[], None]) -> Result:
    watch = Stopwatch()
    watch.tick()
    action()
    watch.tick()
    (wall,), (cpu,) = watch.steps(skip=0)
    return {"wall": wall, "cpu": cpu}


def _plait_help() -> None:
    from plait.cli.main import main

    sys.argv = ["plait", "--help"]
    try:
        main()
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise RuntimeError(f"plait --help ended with {ended.code}") from ended


def compare(rounds: int, limit: float, names: list[str], before: str | None = None) -> dict[str, list[Result]]:
    """Every import once a round; what each said. With `before`, Plait's twice, in turns first and second."""
    runs = common.with_before(names, before)
    found: dict[str, list[Result]] = {label: [] for label, _, _ in runs}
    for turn in range(rounds + 1):
        for label, name, tree in runs if turn % 2 == 0 else runs[::-1]:
            command = common.itself(__file__, "--child", name)
            said = common.run_child(command, limit=limit, env={"DS_ACCELERATOR": "cpu"} | tree)
            if turn:
                found[label].append(said if "error" in said else said["ranks"][0])
                common.show(row=label, round=turn - 1, **found[label][-1])
    return found


def as_table(found: dict[str, list[Result]]) -> str:
    """Medians over rounds."""
    lines = []
    for name, results in found.items():
        plain = name.removesuffix(common.BEFORE)
        label = _label(plain, results) + name[len(plain) :]
        if broken := next((one["error"] for one in results if "error" in one), None):
            lines.append([label, "–", f"did not run: {broken}"])
        else:
            lines.append([label, *(f"{1e3 * median([one[key] for one in results]):.0f}" for key in ("wall", "cpu"))])
    return common.table(["import", "wall ms", "CPU ms"], lines)


def _label(name: str, results: list[Result]) -> str:
    if name == "torch":
        return "`import torch`, alone"
    if name == "help":
        return f"`plait --help`, {'which loads torch' if any(one.get('torch') for one in results) else 'without torch'}"
    return f"`{STATEMENTS[name]}`, after torch"


def run(given: argparse.Namespace) -> None:
    """Measure and print."""
    where = common.machine()
    found = compare(given.rounds, given.limit, common.chosen(given.rows, KNOWN), given.before)
    title = f"{common.say_machine(where)}; median of {given.rounds} rounds"
    if given.before is not None:
        title += f"; Plait at {common.commit()}, before at {common.commit(given.before)}"
    common.finish(given.json, {"machine": where, "results": found}, f"{title}.\n\n{as_table(found)}")


def main() -> None:
    options = common.parser(__doc__, KNOWN)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--limit", type=float, default=300.0, help="seconds that one child may take")
    common.add_before(options)
    given = options.parse_args()
    if given.child is not None:
        common.reply(lambda: measure(given.child))
    run(given)


if __name__ == "__main__":
    main()
