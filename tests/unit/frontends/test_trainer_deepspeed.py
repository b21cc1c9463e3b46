"""`TrainingArguments(deepspeed=…)` as people have it: optimizer and schedule in the file, most values left open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch.optim.lr_scheduler import LambdaLR

from plait.errors import ConfigError, ModelError

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")  # TrainingArguments asks for it
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("no_group_left", "no_state_left")
AUTO = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "last_batch_iteration": -1,
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
STEPS, RATE = 6, 2e-2
RISE = (0.0, 0.0, 1.0, 1.0, 0.75, 0.5)  # DeepSpeed's rates: two steps of warm-up, and its count begins one late


@pytest.fixture
def no_state_left() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def model() -> Any:
    torch.manual_seed(8)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def arguments(folder: Path, *, kind: Any = transformers.TrainingArguments, **options: Any) -> Any:
    return kind(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, seed=1, logging_steps=1, max_steps=STEPS,
        per_device_train_batch_size=2, learning_rate=RATE, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5,
        adam_beta2=0.95, log_level="error", **{"save_strategy": "no", **options},
    )  # fmt: skip


def history(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def samples(count: int = 16) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (count, 12))]


def test_optimizer_and_schedule_of_the_file_are_those_of_the_run(tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer

    data = samples()
    plain = model()
    adam = torch.optim.AdamW(plain.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    given = (adam, LambdaLR(adam, lambda step: RISE[min(step, STEPS - 1)]))
    theirs = transformers.Trainer(plain, arguments(tmp_path / "plain"), train_dataset=data, optimizers=given)
    theirs.train()
    args = arguments(tmp_path / "ours", deepspeed=AUTO, save_strategy="steps", save_steps=3)
    ours = PlaitTrainer(model(), args, train_dataset=data)
    ours.train()
    assert history(ours, "learning_rate") == pytest.approx([RATE * each for each in RISE])
    for key in ("loss", "grad_norm", "learning_rate"):
        assert history(ours, key) == pytest.approx(history(theirs, key), rel=1e-4, abs=1e-6)
    answered = {entry.key for entry in ours.key_report.entries}
    assert {"optimizer", "scheduler", "gradient_clipping", "zero_optimization.stage"} <= answered
    again = PlaitTrainer(model(), args, train_dataset=data)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert history(again, "loss") == pytest.approx(history(ours, "loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "key", "names"),
    [
        ({"gradient_clipping": 1.0}, "deepspeed", ["gradient_clipping=1.0", "max_grad_norm=0.5"]),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"lr": RATE}}},
            "optimizer.type",
            ["'OneBitAdam'", "Adam", "Lamb"],
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
            "deepspeed",
            ["scheduler.params.warmup_num_steps=5", "warmup_steps=2"],
        ),
    ],
    ids=["disagreeing", "refused", "disagreeing later"],
)
def test_a_file_that_cannot_be_followed_is_an_error_that_says_why(
    tmp_path: Path, change: dict[str, Any], key: str, names: list[str]
) -> None:
    from plait.frontends.transformers import PlaitTrainer

    with refused(ConfigError, *names, key=key):
        PlaitTrainer(model(), arguments(tmp_path, deepspeed={**AUTO, **change}), train_dataset=samples(4)).train()


def test_an_optimizer_is_described_or_given_and_not_both(tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer

    net = model()
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = PlaitTrainer(net, arguments(tmp_path, deepspeed=AUTO), train_dataset=samples(4), optimizers=(own, None))
    with refused(ConfigError, "`optimizers`", key="deepspeed.optimizer"):
        trainer.train()


def test_a_model_that_is_loaded_after_the_arguments_is_not_cut_by_deepspeed(tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer, TrainingArguments

    model().save_pretrained(tmp_path / "start")
    given = {**AUTO, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}
    args = arguments(tmp_path, kind=TrainingArguments, deepspeed=given)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    trainer = PlaitTrainer(loaded, args, train_dataset=samples(16))
    trainer.train()
    assert trainer.accelerator.config.strategy.stage == 3
    assert len(history(trainer, "loss")) == STEPS


def test_a_model_that_deepspeed_has_cut_is_refused(tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer

    cut = model()
    next(cut.parameters()).ds_id = 0
    with refused(ModelError, "TrainingArguments", "plait.frontends.transformers"):
        PlaitTrainer(cut, arguments(tmp_path), train_dataset=samples(4))


def test_a_file_with_comments_is_read_as_everywhere(tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer, TrainingArguments

    path = tmp_path / "ds_config.json"
    path.write_text(
        "// stage 2 is enough\n" + json.dumps({**AUTO, "zero_optimization": {"stage": 2}})[:-1] + ",} # end"
    )
    args = arguments(tmp_path / "out", kind=TrainingArguments, deepspeed=str(path))
    trainer = PlaitTrainer(model(), args, train_dataset=samples(4))
    assert trainer.accelerator.config.strategy.stage == 2
    path.write_text("{ broken")
    with refused(ConfigError, path):
        arguments(tmp_path / "out", kind=TrainingArguments, deepspeed=str(path))


LEFT_OPEN, ON, OFF = {"enabled": "auto"}, {"enabled": True}, {"enabled": False}
SCALED = {**LEFT_OPEN, "loss_scale": 0, "initial_scale_power": 16}


def described(folder: Path, asked: str, fp16: dict[str, Any] | None, bf16: dict[str, Any] | None) -> Any:
    """The run description of arguments that ask for a format beside these two sections."""
    from plait.frontends.transformers.arguments import config_of

    sections = {name: dict(found) for name, found in (("fp16", fp16), ("bf16", bf16)) if found is not None}
    rest = {key: value for key, value in AUTO.items() if key != "bf16"}
    flags = {} if asked == "no" else {asked: True}
    return config_of(arguments(folder, deepspeed={**rest, **sections}, **flags), None)[0]


@pytest.mark.parametrize("fp16", [None, SCALED, OFF], ids=["absent", "auto", "off"])
@pytest.mark.parametrize("bf16", [None, LEFT_OPEN, OFF, ON], ids=["absent", "auto", "off", "on"])
@pytest.mark.parametrize("asked", ["no", "bf16"])
def test_the_format_of_the_arguments_is_computed_in_whatever_sections_there_are(
    tmp_path: Path, asked: str, fp16: dict[str, Any] | None, bf16: dict[str, Any] | None
) -> None:
    if (asked == "bf16" and bf16 == OFF) or (asked == "no" and bf16 == ON):
        with refused(ConfigError, f"bf16.enabled={bf16 == ON}", key="deepspeed"):
            described(tmp_path, asked, fp16, bf16)
        return
    precision = described(tmp_path, asked, fp16, bf16).precision
    if asked == "no":
        assert precision.compute == "fp32"
    else:  # as DeepSpeed's own section has it
        assert (precision.compute, precision.reduce, precision.autocast) == ("bf16", "bf16", False)
        assert precision.cast_inputs


@pytest.mark.parametrize("bf16", [None, LEFT_OPEN, OFF], ids=["absent", "auto", "off"])
@pytest.mark.parametrize("fp16", [None, SCALED, ON], ids=["absent", "auto", "on"])
def test_fp16_is_added_like_bf16(tmp_path: Path, fp16: dict[str, Any] | None, bf16: dict[str, Any] | None) -> None:
    assert described(tmp_path, "fp16", fp16, bf16).precision.compute == "fp16"


@pytest.mark.parametrize(
    ("asked", "fp16", "bf16", "key", "name"),
    [
        ("bf16", ON, None, "deepspeed", "fp16.enabled=True"),
        ("fp16", None, ON, "deepspeed", "bf16.enabled=True"),
        ("fp16", OFF, None, "deepspeed", "fp16.enabled=False"),
        ("bf16", None, {}, "deepspeed.bf16.enabled", "bf16=True"),
        ("fp16", {"loss_scale": 0}, None, "deepspeed.fp16.enabled", "fp16=True"),
    ],
)
def test_a_section_that_contradicts_the_format_of_the_arguments_is_refused(
    tmp_path: Path, asked: str, fp16: dict[str, Any] | None, bf16: dict[str, Any] | None, key: str, name: str
) -> None:
    with refused(ConfigError, name, key=key):
        described(tmp_path, asked, fp16, bf16)


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.add(x.dtype)
        found = self.layer(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def test_inputs_are_cast_as_the_trainer_casts_them_under_deepspeed(tmp_path: Path) -> None:
    from plait.frontends.transformers import PlaitTrainer

    torch.manual_seed(3)
    data = [{"x": x, "labels": x.sum().unsqueeze(0)} for x in torch.randn(16, 4)]
    given = {key: value for key, value in AUTO.items() if key != "bf16"} | {"fp16": SCALED}
    net = Regression()
    PlaitTrainer(net, arguments(tmp_path, deepspeed=given, bf16=True, save_strategy="no"), train_dataset=data).train()
    assert net.seen == {torch.bfloat16}
