"""The report of a run that learns from rewards or preferences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from plait.monitor.events import Event, EventKind
from plait.monitor.report import MOST_EACH, MOST_STEPS, read_answers, write_report
from plait.monitor.svg import image

ONLINE = ("reward", "kl", "length", "entropy", "clip_fraction", "policy_loss", "value_loss", "accuracy", "beta")
TITLES = ("Reward", "KL", "Length", "Entropy", "Clipped", "Policy loss", "Value loss", "Accuracy", "Weight of the KL")


def held_out(step: int, **metrics: float) -> Event:
    return Event(EventKind.VALIDATE, step, 1, {"metrics": metrics, "batches": 1, "time": 0.1}, 0.0)


def report(events: list[Event], folder: Path) -> ElementTree.Element:
    write_report(events, folder / "report.html", "run", folder=folder)
    return ElementTree.fromstring((folder / "report.html").read_text(encoding="utf-8"))


def charts(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {node.get("aria-label", "").removesuffix(" over steps"): node for node in root.iter("svg")}


def facts(root: ElementTree.Element) -> dict[str, str]:
    found = next(node for node in root.iter("dl") if node.get("class") == "facts")
    return {"".join(div[0].itertext()): "".join(div[1].itertext()) for div in found}


def said(root: ElementTree.Element) -> list[list[str]]:
    tables = [node for node in root.iter("table") if node.get("class") == "said"]
    return [["".join(cell.itertext()) for cell in row] for table in tables for row in table.iter("tr")][1:]


def test_every_measure_of_reinforcement_learning_has_a_chart(tmp_path: Path, make_run: Any) -> None:
    measured = {key: random.uniform(0.1, 0.9) for key in ONLINE}
    root = report([*make_run(0, 6, **measured), held_out(3, reward=-0.5), held_out(6, reward=1.25)], tmp_path)
    assert set(TITLES) <= set(charts(root))
    assert facts(root)["Held-out reward"] == "1.2500"
    reward = charts(root)["Reward"]
    circles = [node for node in reward.iter("circle") if "dot" in node.get("class", "")]
    assert len(circles) == 2, "held-out rewards stand in the chart of training"


def test_pairs_are_shown_by_accuracy_margin_and_the_picture_of_calibration(tmp_path: Path, make_run: Any) -> None:
    (tmp_path / "calibration.svg").write_text(image(10, 10, ["<circle/>"], label="x"))
    root = report([*make_run(0, 4), held_out(4, accuracy=0.75, margin=-0.2)], tmp_path)
    assert {"Accuracy", "Margin"} <= set(charts(root))
    (picture,) = root.iter("img")
    assert picture.get("src", "").startswith("data:image/svg+xml;base64,")
    assert picture.get("alt")
    assert "Held-out accuracy" not in facts(root), "of a run without rewards, the loss comes first"


def test_answers_are_shown_over_time_and_as_text(tmp_path: Path, make_run: Any) -> None:
    lines = [
        {"step": step, "prompt": f"<b>{number}</b>", "answer": "<script>&", "reward": step / 10}
        for step in range(40)
        for number in range(MOST_EACH + 2)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "prom'
    (tmp_path / "samples.jsonl").write_text(text)
    rows = said(report(make_run(0, 4), tmp_path))
    assert len(rows) == MOST_STEPS * MOST_EACH
    assert rows[0] == ["0", "<b>0</b>", "<script>&", "0.0000"]
    assert rows[-1][0] == "39"


def test_answers_after_a_checkpoint_that_a_run_went_back_to_do_not_count(tmp_path: Path) -> None:
    steps = [1, 2, 3, 4, 3, 4, 5]
    rows = [{"step": step, "prompt": "p", "answer": str(at), "reward": None} for at, step in enumerate(steps)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.answer for each in read_answers(tmp_path)] == ["0", "1", "4", "5", "6"]
