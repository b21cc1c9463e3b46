"""A run that the Hugging Face Trainer began goes on with PlaitTrainer: optimizer, schedule, random numbers and all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.refusals import refused

from plait.errors import CheckpointError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
STEPS, SAVED = 6, 3
pytestmark = pytest.mark.usefixtures("no_state_left")


@pytest.fixture
def no_state_left() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def model(**changes: Any) -> Any:
    torch.manual_seed(8)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.3, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=1, **changes,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", seed=3, logging_steps=1,
        max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=2e-2,
        warmup_steps=2, weight_decay=0.1, lr_scheduler_type="cosine",
        **{"save_steps": SAVED, "load_best_model_at_end": False, **options},
    )  # fmt: skip


def history(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """A run of the Trainer itself with a checkpoint in its middle, and its data: other ones each time."""
    folder = tmp_path_factory.mktemp("began")
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (40, 12))]
    transformers.Trainer(model(), arguments(folder), train_dataset=data).train()
    return folder / f"checkpoint-{SAVED}", data


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_it_goes_on_as_the_trainer_itself_would(began: Any, tmp_path: Path, optim: str) -> None:
    from plait.frontends.transformers import PlaitTrainer

    checkpoint, data = began
    stories = []
    for kind in (transformers.Trainer, PlaitTrainer):
        trainer = kind(model(), arguments(tmp_path / kind.__name__, optim=optim), train_dataset=data)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        stories.append({key: history(trainer, key) for key in ("loss", "grad_norm", "learning_rate")})
    theirs, ours = stories
    assert len(ours["loss"]) == STEPS
    for key, values in theirs.items():
        assert ours[key] == pytest.approx(values, rel=1e-5), key
    assert (tmp_path / "PlaitTrainer" / f"checkpoint-{STEPS}" / "plait").is_dir()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"optim": "sgd"}, ["SGD", "amsgrad", "`optim`"]),
        ({"frozen": True}, ["[6, 10]", "[5, 10]"]),
        ({"missing": True}, ["optimizer.pt", "resume_from_checkpoint"]),
    ],
    ids=["optimizer", "parameters", "weights alone"],
)
def test_what_does_not_fit_is_said(began: Any, tmp_path: Path, change: dict[str, Any], names: list[str]) -> None:
    from plait.frontends.transformers import PlaitTrainer

    checkpoint, data = began
    net, change = model(), dict(change)
    if change.pop("frozen", False):
        net.transformer.wpe.weight.requires_grad_(False)
    if change.pop("missing", False):
        checkpoint = Path(shutil.copytree(checkpoint, tmp_path / "weights"))
        (checkpoint / "optimizer.pt").unlink()
    trainer = PlaitTrainer(net, arguments(tmp_path, **change), train_dataset=data)
    with refused(CheckpointError, checkpoint, *names):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_state_of_another_shape_is_said_with_its_name(began: Any, tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer

    checkpoint = Path(shutil.copytree(began[0], tmp_path / "changed"))
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(state, checkpoint / "optimizer.pt")
    trainer = PlaitTrainer(model(), arguments(tmp_path), train_dataset=began[1])
    with refused(CheckpointError, checkpoint, ".exp_avg", "(3,)"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_code_in_the_state_of_a_schedule_is_not_executed(began: Any, tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer

    checkpoint = Path(shutil.copytree(began[0], tmp_path / "evil"))
    torch.save(Harmful(tmp_path / "harmed"), checkpoint / "scheduler.pt")
    trainer = PlaitTrainer(model(), arguments(tmp_path), train_dataset=began[1])
    with refused(CheckpointError, checkpoint / "scheduler.pt", "posix.system"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not (tmp_path / "harmed").exists()


def test_code_in_the_state_of_a_scaler_is_not_executed(tmp_path: Path) -> None:
    from plait.frontends.transformers.trainer import load_scale

    torch.save({"scale": Harmful(tmp_path / "harmed")}, tmp_path / "scaler.pt")
    accelerator: Any = SimpleNamespace(engine=SimpleNamespace(scaler=object()))
    with refused(CheckpointError, tmp_path / "scaler.pt", "posix.system"):
        load_scale(accelerator, tmp_path)
    assert not (tmp_path / "harmed").exists()
