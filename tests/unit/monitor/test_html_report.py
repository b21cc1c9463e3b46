from __future__ import annotations

import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from plait.monitor.events import Event, EventKind
from plait.monitor.files import JsonlSink
from plait.monitor.report import write_report


def report(events: list[Event], tmp_path: Path, **more: Any) -> tuple[str, ElementTree.Element]:
    out = tmp_path / "deep" / "report.html"
    write_report(events, out, "a <small> run & more", **more)
    text = out.read_text(encoding="utf-8")
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    return text, ElementTree.fromstring(text)


def words(node: ElementTree.Element) -> str:
    return " ".join("".join(node.itertext()).split())


def found(root: ElementTree.Element, tag: str, kind: str) -> list[ElementTree.Element]:
    return [node for node in root.iter(tag) if kind in node.get("class", "").split()]


def chart(root: ElementTree.Element, title: str) -> ElementTree.Element:
    (svg,) = [node for node in root.iter("svg") if node.get("aria-label") == f"{title} over steps"]
    return svg


def test_the_page_is_well_formed_and_brings_everything_with_it(tmp_path: Path, make_run: Any) -> None:
    text, root = report(make_run(0, 30, tokens_per_s=1e4, grad_norm=1.0, mfu=0.4), tmp_path)
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?://|url\(|@import", text)
    assert {node.tag for node in root.iter()}.isdisjoint({"script", "link", "img", "iframe"})
    assert not any({"src", "href"} & set(node.attrib) for node in root.iter())
    assert "prefers-color-scheme: dark" in text
    assert words(root.find(".//h1")) == "a <small> run & more"  # type: ignore[arg-type]


def test_the_first_numbers_are_the_ones_asked_for_first(tmp_path: Path, make_run: Any) -> None:
    run = make_run(0, 12, tokens_per_s=12_300.0)
    _, root = report(run, tmp_path)
    facts = {words(div[0]): words(div[1]) for div in found(root, "dl", "facts")[0]}
    loss = [e.data["loss"] for e in run if e.kind is EventKind.TRAIN][-1]
    best = next(e.data["metrics"]["loss"] for e in run if e.kind is EventKind.VALIDATE)
    assert facts["Final loss"] == f"{loss:.4f}"
    assert facts["Best validation loss"] == (f"{best:.4f}" if best >= 1e-3 else f"{best:.4e}")
    assert (facts["Steps"], facts["Training time"]) == ("12", "0:00:06")
    assert (facts["Throughput"], facts["Peak memory"]) == ("12.3k", "970.0 MiB")


@pytest.mark.parametrize("title", ["Loss", "Learning rate", "Gradient norm", "Step time", "Throughput", "Peak memory"])
def test_every_measurement_has_a_chart_with_axes_and_a_curve(title: str, tmp_path: Path, make_run: Any) -> None:
    _, root = report(make_run(0, 30, grad_norm=1.0), tmp_path)
    svg = chart(root, title)
    assert len(found(svg, "line", "grid")) >= 2
    assert len(found(svg, "text", "tick")) >= 5
    assert found(svg, "path", "line")
    titles = [words(node) for stop in found(svg, "g", "stop") for node in stop.iter("title")]
    assert len(titles) == 30
    assert all(text.startswith("step ") for text in titles)


def test_what_was_not_measured_has_no_chart(tmp_path: Path, make_run: Any) -> None:
    text, _ = report(make_run(0, 5), tmp_path)
    assert "Gradient norm" not in text
    assert "FLOPs" not in text


def test_a_resumed_run_goes_on_in_another_colour_after_a_marker(tmp_path: Path, make_run: Any) -> None:
    events = [*make_run(0, 10, segment="zero3 · 2 ranks"), *make_run(10, 20, segment="ddp · 2 ranks")]
    _, root = report(events, tmp_path)
    svg = chart(root, "Loss")
    (first,) = [p for p in found(svg, "path", "c0") if "dashed" not in p.get("class", "")]
    (second,) = [p for p in found(svg, "path", "c1") if "dashed" not in p.get("class", "")]
    assert second.get("d", "").startswith("M" + first.get("d", "").split("L")[-1].strip()), "the curve continues"
    (caption,) = found(svg, "text", "caption")
    assert words(caption) == "resumed at step 10 as ddp · 2 ranks"
    (marker,) = found(svg, "line", "resume")
    assert marker.get("x1") == first.get("d", "").split("L")[-1].split()[0], "it stands at the last step kept"
    legend = words(found(root, "ul", "legend")[0])
    assert "zero3 · 2 ranks steps 1 – 10" in legend
    assert "ddp · 2 ranks steps 11 – 20" in legend


def test_steps_that_were_made_again_are_pale_and_do_not_count(tmp_path: Path, make_run: Any) -> None:
    lost, again = make_run(0, 10, end=False), make_run(6, 12)
    better = Event(EventKind.VALIDATE, 9, 1, {"metrics": {"loss": -5.0}}, lost[-1].time)
    text, root = report([*lost, better, *again], tmp_path)
    assert found(chart(root, "Loss"), "path", "pale")
    facts = {words(div[0]): words(div[1]) for div in found(root, "dl", "facts")[0]}
    assert facts["Best validation loss"] != "-5.0000"
    assert "no end recorded" in text


def test_settings_of_the_segments_stand_side_by_side(tmp_path: Path, make_run: Any) -> None:
    events = [*make_run(0, 3, segment="zero3"), *make_run(3, 6, segment="ddp")]
    _, root = report(events, tmp_path)
    rows = {words(row[0]): row for row in root.iter("tr") if len(row) == 3}
    assert [words(cell) for cell in rows["Strategy"][1:]] == ["zero3", "ddp"]
    assert rows["Strategy"].get("class") == "differs"
    assert rows["Model"].get("class") is None
    assert [words(cell) for cell in rows["Steps"][1:]] == ["1 – 3", "4 – 6"]


def test_a_loss_that_is_no_number_breaks_the_line_and_is_marked(tmp_path: Path, make_run: Any) -> None:
    events = [
        Event(e.kind, e.step, e.epoch, {**e.data, "loss": math.nan}) if e.kind is EventKind.TRAIN and e.step == 5 else e
        for e in make_run(0, 10)
    ]
    _, root = report(events, tmp_path)
    svg = chart(root, "Loss")
    assert len(found(svg, "path", "c0")) == 2 + 1  # two stretches of training, one of validation
    assert [words(node) for node in found(svg, "text", "bad")] == ["×step 5: train is nan"]
    assert "nan" not in "".join(path.get("d", "") for path in svg.iter("path"))


def test_messages_checkpoints_and_samples_are_listed_and_escaped(tmp_path: Path, make_run: Any) -> None:
    evil = "<script>alert('x')</script>\x00 & done"
    message = Event(EventKind.MESSAGE, 3, 1, {"level": "warning", "text": evil, "rank": 2})
    text, root = report([*make_run(), message], tmp_path, samples=[("prompt <a>", "def f():\n    return 1 < 2")])
    assert "<script" not in text
    rows = [words(row) for row in root.iter("tr")]
    assert any(
        "warning" in row and "<script>alert('x')</script>\ufffd & done" in row and "rank 2" in row for row in rows
    )
    assert any("work/step-5" in row and "3.0 MiB" in row and "1.50 s" in row for row in rows)
    (pre,) = root.iter("pre")
    assert pre.text == "def f():\n    return 1 < 2"


def test_no_text_of_an_event_sample_or_answer_becomes_markup(tmp_path: Path, make_run: Any) -> None:
    evil = "</style></script>\"'><img src=x onerror=alert(1)><script>alert(1)</script>]]>"
    rows, samples = [(evil, evil)], [(evil, evil)]
    opening = {"segment": evil, "title": evil, "rows": rows, "config": {evil: evil}, evil: evil}
    ending = {"reason": evil, "summary": rows, "pipeline": {evil: evil}, evil: evil}
    strange = {
        EventKind.RUN_START: opening,
        EventKind.TRAIN: {evil: 1.0, "text": evil, "phase": evil},
        EventKind.VALIDATE: {"metrics": {evil: 1.0, "loss": 2.0}, evil: evil},
        EventKind.TEST: {"metrics": {evil: 1.0}, evil: evil},
        EventKind.SAVE: {"path": evil, "bytes": evil, "seconds": evil},
        EventKind.MESSAGE: {"level": evil, "text": evil, "rank": evil},
        EventKind.RUN_END: ending,
    }
    events = [Event(e.kind, e.step, e.epoch, {**e.data, **strange[e.kind]}, e.time) for e in make_run(0, 4)]
    events[1:1] = [Event(kind, 1, 1, strange[kind], events[0].time) for kind in (EventKind.MESSAGE, EventKind.TEST)]
    answer = {"step": 1, "prompt": evil, "answer": evil, "reward": evil}
    (tmp_path / "samples.jsonl").write_text(json.dumps(answer) + "\n", encoding="utf-8")
    text, root = report(events, tmp_path, samples=samples, folder=tmp_path)
    assert "<script" not in text
    assert "<img" not in text
    assert not any(name.startswith("on") for node in root.iter() for name in node.attrib)
    assert sum(evil in "".join(node.itertext()) for node in root.iter("pre")) == 3


def test_the_files_of_a_run_give_the_same_page_as_its_events(tmp_path: Path, make_run: Any) -> None:
    events = make_run(0, 8, grad_norm=math.inf)
    sink = JsonlSink(tmp_path, 0)
    for event in events:
        sink.write(event)
    sink.close()
    for name, source in (("a.html", events), ("b.html", [tmp_path / "events-rank0.jsonl"])):
        write_report(source, tmp_path / name, "run")
    pages = [re.sub(r"<footer>.*?</footer>", "", (tmp_path / name).read_text()) for name in ("a.html", "b.html")]
    assert pages[0] == pages[1]


def test_a_page_goes_into_a_pipe_and_does_not_take_its_place(tmp_path: Path, make_run: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as reader:
        read = reader.submit(pipe.read_text)
        write_report(make_run(0, 8), pipe, "run")
        assert read.result(timeout=60).startswith("<!DOCTYPE html>")
    assert pipe.is_fifo()


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path: Path, make_run: Any) -> None:
    short, _ = report(make_run(0, 2_000), tmp_path)
    long, _ = report(make_run(0, 20_000), tmp_path)
    assert len(long) < 1.5 * len(short)


def test_a_run_without_events_still_has_a_page(tmp_path: Path) -> None:
    text, _ = report([], tmp_path)
    assert "no end recorded" in text
