"""The examples of tasks beside the next token learn, and refuse what does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.config import check, parse
from plait.errors import ConfigError
from plait.trainer import Hook, Runner

TASKS = Path(__file__).parents[3] / "examples" / "tasks"
RUNS = sorted(path.stem for path in TASKS.glob("*.yaml"))
pytest.importorskip("transformers")
pytest.importorskip("PIL")


class Losses(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, runner: Any, result: Any) -> None:
        self.losses.append(float(result.loss))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    spec = importlib.util.spec_from_file_location("make_data", TASKS / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(folder / "data")
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def losses_of(name: str, work_dir: Path, *settings: str) -> list[float]:
    hook = Losses()
    with Runner.from_config(TASKS / f"{name}.yaml", [f"work_dir={work_dir}", *settings], hooks=[hook]) as runner:
        runner.train()
    return hook.losses


@pytest.mark.parametrize("name", RUNS)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    losses = losses_of(name, tmp_path, "train.max_steps=12")
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3]), losses


def test_a_resumed_run_hides_the_same(tmp_path: Path) -> None:
    settings = ("train.max_steps=6", "checkpoint.every=3")
    whole = losses_of("bert", tmp_path / "whole", *settings)
    first = losses_of("bert", tmp_path / "cut", *settings, "train.stop_after=3")
    rest = losses_of("bert", tmp_path / "cut", *settings, "checkpoint.resume=auto")
    assert [*first, *rest] == whole


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("bert", ["data.objective=null"], "model.task"),
        ("bert", ["model.task=causal-lm"], "model.task"),
        ("t5", ["data.objective={type: masked}"], "model.task"),
        ("vit", ["model.task=masked-image-modeling"], "model.task"),
        ("translation", ["data.document_mask=false"], "data.document_mask"),
        ("clip", ["data.drop_last=false"], "data.drop_last"),
        ("clip", ["batch.micro=4"], "batch.micro"),
        ("bert", ["model.num_labels=3"], "model.num_labels"),
        ("bert", ["strategy.layout.cp=2"], "strategy.layout.cp"),
        ("clip", ["strategy.layout.pp=2"], "strategy.layout.pp"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_built(name: str, settings: list[str], key: str) -> None:
    with refused(ConfigError, key):
        check(parse(TASKS / f"{name}.yaml", settings).config, has_val=False, require_length=True)


@pytest.mark.parametrize(
    ("name", "setting", "key"),
    [
        ("bert", "model.config.pad_token_id=5", "model.config.pad_token_id: 0"),
        ("vit", "model.num_labels=3", "model.num_labels: 4"),
        ("classification", "data.seq_len=6", "seq_len"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(name: str, setting: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=key):
        losses_of(name, tmp_path, setting)


def test_validation_has_the_objective_of_training() -> None:
    config = parse(TASKS / "bert.yaml", ["val_data={type: text, path: data/texts.txt, seq_len: 48}"]).config
    assert config.val_data.objective == config.data.objective  # type: ignore[union-attr]
