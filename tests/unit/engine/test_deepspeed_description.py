"""The ds_config that DeepSpeed gets says what the run description says."""

from __future__ import annotations

from typing import Any

from plait.config import parse_sections
from plait.engine.deepspeed import describe


def described(ranks: int = 2, accumulation: int = 1, **sections: Any) -> dict[str, Any]:
    return describe(parse_sections(**sections).config, ranks, accumulation)


def ds(**keys: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "config": keys}


def test_what_is_left_out_is_filled_from_the_run() -> None:
    found = described(
        4,
        2,
        strategy={"engine": "deepspeed", "zero": 2},
        batch={"micro": 3, "accumulation": 2},
        train={"clip_norm": 0.5},
    )
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (24, 3)
    assert found["gradient_accumulation_steps"] == 2
    assert found["gradient_clipping"] == 0.5
    assert found["zero_optimization"]["stage"] == 2
    assert not found["bf16"]["enabled"]
    assert not found["fp16"]["enabled"]


def test_clipping_is_off_unless_it_is_asked_for() -> None:
    assert described(strategy=ds())["gradient_clipping"] == 0.0


def test_auto_is_as_good_as_absent() -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 10}
    found = described(strategy=ds(zero_optimization=zero, train_batch_size="auto"), batch={"micro": 2})
    assert "reduce_bucket_size" not in found["zero_optimization"]
    assert found["zero_optimization"]["stage3_max_live_parameters"] == 10
    assert found["train_batch_size"] == 4


def test_formats_and_the_loss_scaler_are_those_of_the_run() -> None:
    scaler = {"initial_power": 7, "window": 5, "hysteresis": 3, "minimum": 0.5}
    precision = {"compute": "fp16", "reduce": "fp16", "scaler": scaler}
    found = described(strategy=ds(zero_optimization={"stage": 1}), precision=precision)
    assert found["fp16"]["enabled"]
    assert found["fp16"]["initial_scale_power"] == 7
    assert (found["fp16"]["loss_scale_window"], found["fp16"]["hysteresis"]) == (5, 3)
    assert found["fp16"]["min_loss_scale"] == 0.5
    assert found["communication_data_type"] == "fp16"
    assert found["data_types"] == {"grad_accum_dtype": "fp16"}


def test_the_optimizer_is_not_repeated() -> None:
    found = described(strategy=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-3}}))
    assert "optimizer" not in found
