"""What another engine cannot honour is an error that names the key; what two configurations say must agree."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.config import parse_sections, to_dict
from plait.config.engines import TESTED, as_native, check_library
from plait.config.parse import check_complete
from plait.config.rules import violations
from plait.errors import ConfigError, MissingExtraError, PlaitError, WorldError


def problems(**sections: Any) -> dict[str, str]:
    """Path → message and remedy of every rule that is broken."""
    config = parse_sections(**sections).config
    found = violations(config, has_val=False, require_length=False)
    return {problem.path: f"{problem.message} {problem.remedy}" for problem in found}


def deepspeed(**keys: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "config": keys}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stage_is_read_from_the_ds_config(stage: int) -> None:
    strategy = parse_sections(strategy=deepspeed(zero_optimization={"stage": stage})).config.strategy
    assert strategy.stage == stage
    assert problems(strategy=deepspeed(zero_optimization={"stage": stage})) == {}


def test_a_ds_config_may_be_a_file_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, // shards\n "train_micro_batch_size_per_gpu": "auto",}')
    config = parse_sections(strategy={"engine": "deepspeed", "config": str(path)}).config
    assert config.strategy.stage == 2
    assert parse_sections(**to_dict(config)).config == config
    json.dumps(to_dict(config))


def test_a_ds_config_that_is_not_there_is_named() -> None:
    with refused(ConfigError, "`config`", "'nowhere.json'", key="strategy"):
        parse_sections(strategy={"engine": "deepspeed", "config": "nowhere.json"})


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"layout": {"tp": 2}}, "strategy.layout.tp"),
        ({"layout": {"pp": 2}}, "strategy.layout.pp"),
        ({"layout": {"cp": 2}}, "strategy.layout.cp"),
        ({"layout": {"ep": 2}}, "strategy.layout.ep"),
        ({"layout": {"dp_replicate": 2, "dp_shard": 2}}, "strategy.layout.dp_replicate"),
        ({"compile": True}, "strategy.compile.enabled"),
        ({"recompute": "auto"}, "strategy.recompute.mode"),
        ({"wrap": {"names": ["layers.*"]}}, "strategy.wrap.names"),
        ({"reshard_after_forward": True}, "strategy.reshard_after_forward"),
        ({"forward_prefetch": 1}, "strategy.forward_prefetch"),
        ({"meta_init": False}, "strategy.meta_init"),
        ({"offload": "cpu"}, "strategy.offload.optimizer"),
        ({"plugin": "gemini"}, "strategy.plugin"),
        ({"zero": 1}, "strategy.zero"),
    ],
)
def test_a_key_that_deepspeed_cannot_honour_is_refused_by_name(extra: dict[str, Any], path: str) -> None:
    assert path in problems(strategy={**deepspeed(zero_optimization={"stage": 3}), **extra})


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"optim": {"type": "Lamb"}}, "optim.type"),
        ({"optim": {"type": "Adagrad"}}, "optim.type"),
        ({"train": {"clip_value": 1.0}}, "train.clip_value"),
        ({"train": {"guard": {"enabled": False}}}, "train.guard.enabled"),
        ({"precision": {"compute": "bf16", "master": False}}, "precision.master"),
    ],
)
def test_other_engines_have_fewer_ways_to_update(sections: dict[str, Any], path: str) -> None:
    assert path in problems(strategy=deepspeed(zero_optimization={"stage": 2}), **sections)


@pytest.mark.parametrize(
    ("keys", "sections", "path", "other"),
    [
        ({"gradient_clipping": 1.0}, {}, "gradient_clipping", "train.clip_norm"),
        ({"train_batch_size": 8}, {"batch": {"total": 16}}, "train_batch_size", "batch.total"),
        ({"train_micro_batch_size_per_gpu": 2}, {}, "train_micro_batch_size_per_gpu", "batch.micro"),
        ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps", "batch.accumulation"),
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled", "precision.compute"),
        ({"fp16": {"enabled": False}}, {"precision": "fp16"}, "fp16.enabled", "precision.compute"),
        ({"optimizer": {"type": "SGD"}}, {}, "optimizer.type", "optim.type"),
        ({"optimizer": {"params": {"lr": 0.5}}}, {}, "optimizer.params.lr", "optim.lr"),
    ],
)
def test_two_settings_that_disagree_are_an_error_that_names_both(
    keys: dict[str, Any], sections: dict[str, Any], path: str, other: str
) -> None:
    found = problems(strategy=deepspeed(zero_optimization={"stage": 1}, **keys), **sections)
    assert other in found[f"strategy.config.{path}"]


def test_two_settings_that_agree_are_fine() -> None:
    keys = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95]}},
        "fp16": {"enabled": "auto"},
    }
    sections = {
        "batch": {"total": 8},
        "train": {"clip_norm": 0.5},
        "precision": "bf16",
        "optim": {"lr": 0.1, "betas": [0.9, 0.95]},
    }
    assert problems(strategy=deepspeed(zero_optimization={"stage": 2}, **keys), **sections) == {}


def test_a_key_that_deepspeed_would_read_over_is_an_error_with_a_suggestion() -> None:
    found = problems(strategy=deepspeed(zero_optimisation={"stage": 3}))
    assert "`zero_optimization`" in found["strategy.config.zero_optimisation"]


@pytest.mark.parametrize("key", ["scheduler", "tensorboard", "checkpoint", "autotuning", "elasticity", "amp"])
def test_a_key_that_belongs_elsewhere_says_where(key: str) -> None:
    assert f"strategy.config.{key}" in problems(strategy=deepspeed(**{key: {}}))


def test_half_precision_without_zero_says_how_gradients_are_added() -> None:
    assert "precision.reduce" in problems(strategy=deepspeed(), precision="bf16")
    assert problems(strategy=deepspeed(), precision={"compute": "bf16", "reduce": "bf16"}) == {}
    assert "precision.compute" in problems(strategy=deepspeed(), precision="fp16")


def test_options_of_an_engine_need_the_engine() -> None:
    found = problems(strategy={"config": {"a": 1}, "plugin": "gemini"})
    assert set(found) == {"strategy.config", "strategy.plugin"}


@pytest.mark.parametrize(
    ("strategy", "sections", "path"),
    [
        ({}, {}, "strategy.plugin"),
        ({"plugin": "low_level_zero", "zero": 3}, {}, "strategy.zero"),
        ({"plugin": "torch_fsdp", "zero": 1}, {}, "strategy.zero"),
        ({"plugin": "hybrid", "zero": 1}, {}, "precision.compute"),
        ({"plugin": "hybrid", "config": {"tp_size": 2}}, {}, "strategy.config.tp_size"),
        ({"plugin": "gemini"}, {"precision": "bf16", "batch": {"accumulation": 2}}, "batch.accumulation"),
        ({"plugin": "low_level_zero"}, {"precision": "fp16"}, "precision.compute"),
        ({"plugin": "low_level_zero", "recompute": "full"}, {}, "strategy.recompute.mode"),
    ],
)
def test_a_plugin_says_what_it_cannot(strategy: dict[str, Any], sections: dict[str, Any], path: str) -> None:
    assert path in problems(strategy={"engine": "colossalai", **strategy}, **sections)


@pytest.mark.parametrize(
    ("plugin", "stage"), [("low_level_zero", 1), ("gemini", 3), ("hybrid", 0), ("torch_ddp", 0), ("torch_fsdp", 3)]
)
def test_a_plugin_is_planned_as_the_stage_that_it_is(plugin: str, stage: int) -> None:
    config = parse_sections(strategy={"engine": "colossalai", "plugin": plugin}).config
    native = as_native(config)
    assert (native.strategy.engine, native.strategy.stage) == ("native", stage)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("engine", "error", "names"),
    [
        ("deepspeed", MissingExtraError, ["pip install 'plait[deepspeed]'"]),
        ("colossalai", WorldError, ["colossalai", "pip install --no-deps colossalai==0.5.0 && pip install "]),
    ],
)
def test_a_missing_library_is_one_error_with_its_remedy_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, engine: Any, error: type[PlaitError], names: list[str]
) -> None:
    installed(monkeypatch)
    strategy = {"engine": engine, **({"plugin": "torch_ddp"} if engine == "colossalai" else {})}
    model = {"type": "gpt", "vocab_size": 300, "dim": 8, "layers": 1, "heads": 1, "seq_len": 8}
    data = {"type": "text", "path": "stdlib", "seq_len": 8, "vocab_size": 300}
    parsed = parse_sections(strategy=strategy, model=model, data=data, train={"max_steps": 1})
    with refused(error, *names):
        check_complete(parsed, require_length=True)


def test_versions_that_do_not_go_together_are_told_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, colossalai=TESTED["colossalai"], transformers="5.22.2", peft="0.13.2")
    with refused(WorldError, "transformers 5.22.2", "4.51.3") as caught:
        check_library("colossalai")
    page = Path(__file__).parents[3] / "docs" / "engines.md"
    *_, alone, others = re.search(r"```\n(pip install plait\n.*?)\n```", page.read_text(), re.DOTALL)[1].splitlines()
    assert f"{alone} && {others}" in str(caught.value)
