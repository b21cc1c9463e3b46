"""Does a run survive that its ranks are killed, and how long does it take to go on?

    python benchmarks/elastic.py --kills 20

Four ranks train under `plait launch --elastic_training`; in each attempt one of them is killed after a random number
of steps. The losses of all steps are compared with those of one process that nobody disturbs. Recovery is the time
from the last step before a kill to the first step after it, on rank 0: noticing, ending the others, starting Python
and torch again, loading the checkpoint, a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VICTIM = str(ROOT / "tests" / "multi" / "victim.py")
sys.path.insert(0, str(ROOT))


def losses(work_dir: Path) -> list[tuple[int, int, int, float, float]]:
    """Attempt, ranks, step, loss, time."""
    return [tuple(json.loads(line)) for line in (work_dir / "losses").read_text().splitlines()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    from tests.multi import victim

    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), str(given.steps)
        victim.train(str(folder / "alone"), steps=steps)
        command = [sys.executable, "-m", "plait", "launch", "--elastic_training"]
        command += ["--nproc_per_node", str(given.ranks), VICTIM, str(folder / "run"), f"SIGKILL*{given.kills}"]
        done = subprocess.run([*command, str(given.seed), "0", "300", steps], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        expected = {step: loss for _, _, step, loss, _ in losses(folder / "alone")}
        found = losses(folder / "run")
    report(found, expected, done.stderr.count("starting again from"))


def report(found: list[tuple[int, int, int, float, float]], expected: dict[int, float], kills: int) -> None:
    pairs = itertools.pairwise(found)
    waits = [after[4] - before[4] for before, after in pairs if after[0] != before[0]]
    final = {step: loss for _, _, step, loss, _ in found}
    worst = max(abs(loss - expected[step]) / abs(expected[step]) for _, _, step, loss, _ in found)
    print(f"kills {kills}, attempts that took a step {len({row[0] for row in found})}, ranks {found[0][1]}")
    print(f"steps {len(final)} of {len(expected)}, done again {len(found) - len(final)}")
    print(f"largest relative difference of a loss from the undisturbed run {worst:.1e}")
    print(f"recovery: median {statistics.median(waits):.1f} s, {min(waits):.1f} to {max(waits):.1f} s")


if __name__ == "__main__":
    main()
