"""Configurations with something wrong in them: each is refused as `ConfigError`, or means what it says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from tests.unit.fuzz.mutate import ODD, SNIPPETS, bounded, draws, mutated, spoiled

from plait.config import check, parse, to_dict, to_yaml
from plait.errors import PlaitError
from plait.frontends.accelerate.config import translate as from_accelerate
from plait.frontends.deepspeed.config import translate as from_deepspeed
from plait.frontends.deepspeed.config.read import read_config

EXAMPLES = Path(__file__).parents[3] / "examples"
RUNS: list[dict[str, Any]] = [
    *(yaml.safe_load((EXAMPLES / name).read_text()) for name in ("gpt.yaml", "hf_finetune.yaml")),
    {
        "model": {"type": "llama", "vocab_size": 64, "dim": 16, "layers": 2, "heads": 2},
        "data": {"type": "tokens", "path": "t.bin", "seq_len": 16},
        "optim": {"type": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "no_decay": ["*.bias"]},
        "train": {"max_steps": 3},
        "strategy": {"zero": 3, "offload": {"optimizer": "cpu"}, "layout": {"tp": 2}},
        "precision": {"compute": "fp16", "scaler": {"initial_power": 12}},
        "hooks": [{"type": "ema", "decay": 0.99}, {"type": "early_stop", "metric": "loss"}],
    },
]
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1e9},
    "activation_checkpointing": {"partition_activations": True},
}
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False},
}


def of_plait(path: Path, random: Random) -> None:
    overrides = [f"{random.choice(KEYS)}={random.choice(VALUES)}"] if random.random() < 0.3 else []
    parsed = parse(path, overrides)
    again = to_dict(parsed.config)
    assert parse(again).config == parsed.config, "a description that is accepted is read back as it was"
    copy = path.with_name("again.yaml")
    copy.write_text(to_yaml(parsed.config), encoding="utf-8")
    assert parse(copy).config == parsed.config
    check(parsed.config, has_val=True, require_length=True)


def of_deepspeed(path: Path, random: Random) -> None:
    translation = from_deepspeed(read_config(path), world_size=random.choice((1, 2)))
    translation.report.raise_refusals()
    parse(dict(translation.sections))


def of_accelerate(path: Path, random: Random) -> None:
    translation = from_accelerate(path)
    translation.report.raise_refusals()
    parse(dict(translation.sections))


KEYS = (
    "optim.lr",
    "strategy.zero",
    "hooks.0.decay",
    "model.dim.x",
    "a",
    "",
    "data",
    "model",
    "hooks",
    "-x",
    "batch.total",
)
VALUES = (*SNIPPETS, *(str(value) for value in ODD if value != "\ud800"), "[1, 2", "{a: b}", "!!int x", "&a [*a]")
KINDS = {
    "plait": (RUNS, of_plait),
    "deepspeed": ([DEEPSPEED], of_deepspeed),
    "accelerate": ([ACCELERATE], of_accelerate),
}


def written(content: Any, path: Path, random: Random) -> Path:
    """In one of the forms in which people write it."""
    if random.random() < 0.5:
        content = mutated(content, random)
        whole = True
    else:
        whole = False
    ending = random.choice((".yaml", ".json"))
    text = yaml.safe_dump(content) if ending == ".yaml" else json.dumps(content, indent=1)
    data = text.encode("utf-8", errors="replace")
    target = path.with_suffix(ending)
    target.write_bytes(data if whole else spoiled(data, random))
    return target


def test_no_configuration_ends_in_a_traceback(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for name, random in draws(request, "config", 120, 400):
        kind = random.choices(sorted(KINDS), (1, 2, 3))[0]
        contents, read = KINDS[kind]
        path = written(random.choice(contents), tmp_path / "run", random)
        try:
            with bounded():
                read(path, random)
        except PlaitError as error:
            str(error).encode()  # can be written to a terminal
            seen["refused"] += 1
        except BaseException:
            print(f"{name}: {kind} {path.name}: {path.read_bytes()!r:.2000}")
            raise
        else:
            seen["accepted"] += 1
    assert min(seen["refused"], seen["accepted"]) > 4
