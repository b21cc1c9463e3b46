"""The README's first table: one run under many strategies, and the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from plait import Runner
from tests.multi.ranks import RankPool

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", README, flags=re.MULTILINE)


def described() -> str:
    """The `run.yaml` that the README shows."""
    found = re.search(r"^```yaml\n(# run\.yaml\n.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def train(rank: int, size: int, file: str, strategy: str, folder: str) -> None:
    with Runner.from_config(file, [f"strategy={strategy}", f"work_dir={folder}"]) as runner:
        runner.train()


def last_step(folder: Path, strategy: str, ranks: int) -> tuple[float, float]:
    """The loss and the gradient norm of the last step."""
    file = folder / "run.yaml"
    file.write_text(described(), encoding="utf-8")
    pool = RankPool(ranks)
    try:
        pool.run(train, str(file), strategy, str(folder / "run"))
    finally:
        pool.close()
    events = [json.loads(line) for line in (folder / "run" / "events-rank0.jsonl").read_text().splitlines()]
    last = [event["data"] for event in events if event["kind"] == "train"][-1]
    return last["loss"], last["grad_norm"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    return last_step(tmp_path_factory.mktemp("alone"), "single", 1)


def test_the_table_shows_the_same_numbers_in_every_row() -> None:
    assert len(ROWS) >= 9
    assert len({(loss, norm) for _, _, loss, norm in ROWS}) == 1


@pytest.mark.parametrize(("strategy", "ranks"), [row[:2] for row in ROWS if row[0] != "single"])
def test_each_strategy_of_the_table_trains_as_one_process_does(
    strategy: str, ranks: str, alone: tuple[float, float], tmp_path: Path
) -> None:
    if "deepspeed" in strategy:
        pytest.importorskip("deepspeed")
    loss, norm = last_step(tmp_path, strategy, int(ranks))
    # Not the numbers of the table themselves: the text is the standard library, which each Python has its own of.
    assert loss == pytest.approx(alone[0], rel=1e-6)
    assert norm == pytest.approx(alone[1], rel=1e-4)
