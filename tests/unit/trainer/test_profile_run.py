"""A run with a section `profile`: what it finds, what it writes, and that it changes nothing."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multi.toys import Classifier, Points, Trace
from tests.refusals import missing
from torch import Tensor, nn
from torch.utils.data import Dataset

from plait import Runner
from plait.config import parse_sections
from plait.errors import ConfigError
from plait.profile.hook import Profile
from plait.profile.marks import named_modules
from plait.profile.report import Report

SEQUENCE = 16
MODEL = {"type": "llama", "vocab_size": 64, "dim": 64, "layers": 3, "heads": 2, "seq_len": SEQUENCE}


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    seq_len = SEQUENCE

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "model": MODEL,
        "data": Tokens(),
        "train": {"max_steps": 8},
        "batch": {"total": 8, "micro": 4},
        "profile": {"start": 7, "steps": 2},
        "work_dir": folder,
        "checkpoint": {"last": False},
        "log": {"console": "none", "sinks": ["jsonl"]},
        "plan": "off",
        "device": "cpu",
    }
    return {**common, **sections}


def profiled(folder: Path, **sections: Any) -> tuple[Report, Runner]:
    with Runner(**settings(folder, **sections)) as runner:
        runner.train()
    (hook,) = [hook for hook in runner.hooks.hooks if isinstance(hook, Profile)]
    assert hook.report is not None
    return hook.report, runner


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    folder = tmp_path_factory.mktemp("profiled")
    return profiled(folder)[0], folder / "profile"


def test_every_moment_of_a_step_has_a_kind_and_together_they_are_the_clocks_step(plain: tuple[Report, Path]) -> None:
    report, _ = plain
    assert sum(use.ms for use in report.time.kinds.values()) == pytest.approx(report.time.ms)
    assert report.covered == pytest.approx(1.0, abs=0.5)
    assert {"matmul", "attention", "elementwise", "optimizer", "data", "idle"} <= set(report.time.kinds)
    assert {"forward", "backward", "step"} <= set(report.time.phases)
    assert set(report.time.phases["step"]) == {"optimizer", "idle"}
    assert report.plain_ms is not None


def test_the_counted_arithmetic_is_that_of_the_models_formula(plain: tuple[Report, Path]) -> None:
    report, _ = plain
    assert report.formula_flops is not None
    assert report.counted_flops == pytest.approx(report.formula_flops, rel=0.01)
    by_name = {row.name: row for row in report.modules}
    tokens, width = 8 * SEQUENCE, 64
    assert by_name["blocks.*.attention.q"].flops.forward == 3 * 2 * tokens * width * width
    assert by_name["blocks.*.attention.q"].flops.backward == 3 * 4 * tokens * width * width
    assert by_name["Llama"].flops.total == report.counted_flops
    assert by_name["blocks.*.attention"].backward_ms > 0


def test_the_trace_is_json_with_all_phases_and_modules_in_it(plain: tuple[Report, Path]) -> None:
    names = {event["name"] for event in json.loads((plain[1] / "trace-rank0.json").read_text())["traceEvents"]}
    assert {f"phase: {phase}" for phase in ("forward", "backward", "reduce", "step")} <= names
    assert {"module: Llama", "module: blocks.2.ffn.up", "data loading"} <= names


def test_the_page_is_whole_and_the_figures_are_beside_it(plain: tuple[Report, Path]) -> None:
    report, folder = plain
    page = ElementTree.fromstring((folder / "profile.html").read_text().partition("\n")[2])
    titles = [(heading.text or "").strip() for heading in page.iter("h2")]
    assert len(titles) >= 2
    assert all(titles)
    ElementTree.parse(folder / "step.svg")
    figures = json.loads((folder / "profile.json").read_text())
    assert figures["counted_flops"] == report.counted_flops
    assert figures["modules"][0]["count"] == 1


def test_memory_at_the_peak_is_known_by_owner(plain: tuple[Report, Path], tmp_path: Path) -> None:
    memory = plain[0].memory
    with Runner(**settings(tmp_path, profile=None)) as runner:
        runner.setup()
        numbers = sum(param.numel() for param in runner.engine.model.parameters())
    assert memory.by_owner["parameters"] == 4 * numbers
    assert memory.by_owner["optimizer"] == pytest.approx(8 * numbers, rel=0.01)
    assert memory.by_owner["gradients"] <= 4 * numbers
    assert memory.by_owner["activations"] > 0
    assert sum(memory.by_owner.values()) == memory.counted
    assert plain[0].messages.rows == []


def test_a_profiled_run_learns_what_a_plain_one_learns(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    losses, graphs = [], []
    strategy = {"recompute": "full", "compile": {"backend": "eager", "scope": "block"}}
    for index, profile in enumerate(({"start": 4, "steps": 2}, None)):
        torch._dynamo.reset()
        counters.clear()
        trace = Trace()
        sections = settings(tmp_path / str(index), profile=profile, strategy=strategy, hooks=[trace])
        with Runner(**sections) as runner:
            runner.train()
        losses.append(trace.losses)
        graphs.append(counters["stats"]["unique_graphs"])
    assert losses[0] == losses[1]
    assert graphs[0] == graphs[1] > 0  # nothing was compiled anew
    report = json.loads((tmp_path / "0" / "profile" / "profile.json").read_text())
    rows = {row["name"]: row for row in report["modules"]}
    # Of a compiled block there is one time, and arithmetic by parts all the same.
    assert rows["blocks.*"]["forward_ms"] > 0
    assert rows["blocks.*.ffn"]["forward_ms"] == 0
    # The last product of a block has a result that nobody needs on the way back.
    block, last = (rows[name]["flops"] for name in ("blocks.*", "blocks.*.ffn.down"))
    assert block["again"] == block["forward"] - last["forward"]
    assert report["memory"]["uncompiled"]


def test_a_profile_leaves_nothing_behind_in_the_model(tmp_path: Path) -> None:
    _, runner = profiled(tmp_path, profile={"start": 4, "steps": 1})
    for module in runner.engine.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert runner.loader.epoch.__name__ == "epoch"


def test_an_offloaded_update_is_seen_on_the_thread_that_it_runs_on(tmp_path: Path) -> None:
    report, _ = profiled(tmp_path, strategy={"offload": {"optimizer": "cpu"}})
    trace = json.loads((tmp_path / "profile" / "trace-rank0.json").read_text())
    threads = {event["tid"] for event in trace["traceEvents"] if event["name"] == "aten::_fused_adamw_"}
    steps = {event["tid"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")}
    assert threads
    assert not threads & steps
    assert report.time.kinds["update"].ms > 0
    assert report.covered == pytest.approx(1.0, abs=0.5)


def test_a_validation_between_recorded_steps_shows_as_one(tmp_path: Path) -> None:
    report, _ = profiled(tmp_path, val_data=Tokens(), train={"max_steps": 8, "val_every": 7, "val_batches": 2})
    assert report.time.kinds["evaluate"].ms > 0
    assert sum(use.ms for use in report.time.kinds.values()) == pytest.approx(report.time.ms)


def test_a_model_that_is_not_a_language_model_is_profiled_too(tmp_path: Path) -> None:
    report, _ = profiled(tmp_path, model=Classifier(), data=Points(64))
    assert report.formula_flops is None
    assert report.counted_flops > 0
    assert {row.name for row in report.modules} >= {"Classifier", "hidden", "out"}


def test_a_run_that_ends_too_early_says_so(tmp_path: Path) -> None:
    start = random.randint(20, 90)
    sections = settings(tmp_path, model=Classifier(), data=Points(8), train={"max_epochs": 2}, profile={"start": start})
    with Runner(**sections) as runner:
        runner.train()
    told = [
        json.loads(line)["data"].get("text", "") for line in (tmp_path / "events-rank0.jsonl").read_text().splitlines()
    ]
    assert any(not missing(text, "2 steps", start, start + 2, "profile.start") for text in told)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"start": 3}, "profile.start"),
        ({"steps": 0}, "profile.steps"),
        ({"stpes": 2}, "steps"),
        ({"start": 7, "steps": 5}, "Write `profile.start: 4`"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, profile: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Runner(**settings(tmp_path, profile=profile))
    assert words in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runner = Runner(**settings(tmp_path, profile={"start": 4, "steps": 1, "folder": tmp_path / "file" / "inside"}))
    with runner, pytest.raises(ConfigError, match=r"profile\.folder"):
        runner.train()


def test_without_the_section_no_hook_is_there() -> None:
    assert parse_sections().config.profile is None


def test_names_that_a_model_has_for_itself_mean_nothing_to_a_profile() -> None:
    model = nn.Linear(2, 2)
    model.parts = 3
    assert list(named_modules(model)) == [("Linear", model)]
