"""Optim wrappers and what strategies and wrappers are translated into."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from plait.distributed import Ranks
from plait.errors import ConfigError, WorldError
from plait.frontends.key_report import KeyOutcome, TranslatedSettings
from plait.frontends.mmengine.optim import build_optim_wrapper
from plait.frontends.mmengine.registry import STRATEGIES
from plait.frontends.mmengine.runner.runner import check_launcher, finish, read_compile, read_environment, read_wrapper


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.BatchNorm2d(3))
        self.head = nn.Linear(3, 2)


def rates(cfg: dict[str, Any], **paramwise: Any) -> dict[str, tuple[float, float]]:
    """Of each parameter its rate and decay, where its group has them."""
    net = Net()
    optimizer = {"type": "SGD", "lr": 1.0, "weight_decay": 0.1, **cfg}
    wrapper = build_optim_wrapper({"optimizer": optimizer, "paramwise_cfg": paramwise}, net)
    names = {param: name for name, param in net.named_parameters()}
    return {
        names[param]: (group["lr"], group["weight_decay"])
        for group in wrapper.optimizer.param_groups
        for param in group["params"]
    }


def test_parameters_get_their_own_rate_and_decay() -> None:
    found = rates({}, bias_lr_mult=2.0, bias_decay_mult=0.0, norm_decay_mult=0.5, dwconv_decay_mult=3.0)
    assert found == {
        "backbone.0.weight": (1.0, pytest.approx(0.3)),
        "backbone.0.bias": (2.0, 0.0),
        "backbone.1.weight": (1.0, 0.05),
        "backbone.1.bias": (1.0, 0.05),
        "head.weight": (1.0, 0.1),
        "head.bias": (2.0, 0.0),
    }
    custom = rates({}, custom_keys={"backbone": {"lr_mult": 0.1}, "backbone.1": {"decay_mult": 0.0}})
    assert custom["backbone.0.weight"] == (pytest.approx(0.1), 0.1)
    assert custom["backbone.1.weight"] == (1.0, 0.0)
    assert custom["head.weight"] == (1.0, 0.1)


@pytest.mark.parametrize(
    ("cfg", "key", "names"),
    [
        ({"paramwise_cfg": {"bias_lr_multi": 1}}, "optim_wrapper.paramwise_cfg.bias_lr_multi", ["`bias_lr_mult`"]),
        ({"clip_grad": {"max_nrom": 1.0}}, "optim_wrapper.clip_grad", ["max_nrom", "`max_norm`"]),
        ({"clip_grad": {"max_norm": 1.0, "norm_type": 1}}, "optim_wrapper.clip_grad.norm_type", [1, 2]),
        ({"accumulative_counts": 0}, "optim_wrapper.accumulative_counts", [0]),
        ({"accumulative_counts": True}, "optim_wrapper.accumulative_counts", [True]),
        ({"accumulative_counts": 2.5}, "optim_wrapper.accumulative_counts", [2.5]),
        ({"clip_grad": {"max_norm": 0}}, "optim_wrapper.clip_grad.max_norm", [0]),
        ({"clip_grad": {"max_norm": -1.0}}, "optim_wrapper.clip_grad.max_norm", [-1.0]),
        ({"clip_grad": {"max_norm": float("nan")}}, "optim_wrapper.clip_grad.max_norm", ["nan"]),
        ({"clip_grad": {"max_norm": True}}, "optim_wrapper.clip_grad.max_norm", [True]),
        ({"accumulative_count": 2}, "optim_wrapper.OptimWrapper.accumulative_count", ["`accumulative_counts`"]),
        ({"type": "ApexOptimWrapper"}, "optim_wrapper.type", ["ApexOptimWrapper", "AmpOptimWrapper"]),
        ({"type": "AmpOptimWrapper", "dtype": "float64"}, "optim_wrapper.dtype", ["'float64'", "'float16'"]),
        (
            {"type": "AmpOptimWrapper", "loss_scale": {"init_scale": 100.0}},
            "optim_wrapper.loss_scale.init_scale",
            [100.0],
        ),
        ({"optimizer": {"type": "AdmaW"}}, "optimizer.type", ["'AdmaW'", "`AdamW`"]),
        (
            {"optimizer": {"type": "HybridAdam", "nvme_offload_fraction": 0.5}},
            "optimizer.nvme_offload_fraction",
            ["Adam"],
        ),
    ],
)
def test_what_is_wrong_with_a_wrapper_is_said(cfg: dict[str, Any], key: str, names: list[object]) -> None:
    with refused(ConfigError, *names, key=key):
        build_optim_wrapper({"optimizer": {"type": "SGD", "lr": 0.1}, **cfg}, Net())


def test_hybrid_adam_is_adamw_without_decay() -> None:
    made = build_optim_wrapper({"optimizer": {"type": "HybridAdam", "lr": 0.1}}, Net()).optimizer
    assert type(made) is torch.optim.AdamW
    assert made.param_groups[0]["weight_decay"] == 0.0
    plain = {"type": "FusedAdam", "adam_w_mode": False}
    assert type(build_optim_wrapper({"optimizer": plain}, Net()).optimizer) is torch.optim.Adam


def described(strategy: dict[str, Any], wrapper: dict[str, Any] | None = None, **more: Any) -> Any:
    """The run description of a strategy and a wrapper."""
    made = STRATEGIES.build(strategy)
    found = made.translate(2)
    settings = TranslatedSettings()
    settings.sections, settings.report = dict(found.sections), found.report
    read_compile(more.pop("compile", False), settings)
    options = {"type": made.default_wrapper, "optimizer": {"type": "SGD", "lr": 0.1}, **(wrapper or {})}
    read_wrapper(build_optim_wrapper(options, Net()), made, settings, torch.device("cpu"))
    return finish(settings, **more)


def fsdp(**wrapper: Any) -> dict[str, Any]:
    return {"type": "FSDPStrategy", "model_wrapper": wrapper}


def test_fsdps_words_become_keys_of_the_strategy() -> None:
    sized = described(fsdp(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=1e7))).strategy
    assert (sized.sharding, sized.wrap.min_params, sized.stage) == ("FULL_SHARD", 10_000_000, 3)
    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    for policy in (
        by_class,
        ModuleWrapPolicy([nn.Linear]),
        {"type": "transformer_auto_wrap_policy", **by_class.keywords},
    ):
        assert described(fsdp(auto_wrap_policy=policy)).strategy.wrap.classes == ("Linear",)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = described(
        fsdp(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=mixed, forward_prefetch=True)
    )
    assert (found.strategy.stage, found.strategy.forward_prefetch) == (2, 1)
    assert (found.precision.compute, found.precision.reduce) == ("bf16", "fp32")
    assert described(fsdp(cpu_offload=CPUOffload(offload_params=True))).strategy.offload.params == "cpu"
    with refused(
        ConfigError, "always_wrap_policy", "transformer_auto_wrap_policy", key="strategy.model_wrapper.auto_wrap_policy"
    ):
        described(fsdp(auto_wrap_policy=always_wrap_policy))
    with refused(ConfigError, "`auto_wrap_policy`", key="strategy.model_wrapper.auto_wrap_polic"):
        described(fsdp(auto_wrap_polic=None))


def test_colossalais_plugins_are_stages_in_fp16() -> None:
    gemini = described({"type": "ColossalAIStrategy"})
    assert (gemini.strategy.stage, gemini.precision.compute, gemini.precision.scaler.initial_power) == (3, "fp16", 16)
    low = described({"type": "ColossalAIStrategy", "plugin": "lowlevel-zero", "mixed_precision": "bf16"})
    assert (low.strategy.stage, low.precision.compute) == (1, "bf16")
    options = {"type": "LowLevelZeroPlugin", "stage": 2, "max_norm": 1.5, "initial_scale": 256, "cpu_offload": True}
    full = described({"type": "ColossalAIStrategy", "plugin": options})
    assert (full.strategy.stage, full.train.clip_norm, full.precision.scaler.initial_power) == (2, 1.5, 8)
    with refused(ConfigError, 3, "'gemini'", key="strategy.plugin.stage"):
        described({"type": "ColossalAIStrategy", "plugin": {"type": "LowLevelZeroPlugin", "stage": 3}})
    with refused(ConfigError, "'hybrid'", "gemini", key="strategy.plugin"):
        described({"type": "ColossalAIStrategy", "plugin": "hybrid"})


def test_deepspeeds_keys_go_through_its_own_front_end() -> None:
    keys = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
    found = described({"type": "DeepSpeedStrategy", "config": keys, "gradient_clipping": 0.5})
    assert (found.strategy.stage, found.precision.compute, found.train.clip_norm) == (2, "bf16", 0.5)
    with refused(
        ConfigError, "AmpOptimWrapper", "DeepSpeedStrategy", "DeepSpeedOptimWrapper", key="optim_wrapper.type"
    ):
        described({"type": "DeepSpeedStrategy"}, {"type": "AmpOptimWrapper"})
    with refused(ConfigError, "`optim_wrapper`", key="strategy.optimizer"):
        described({"type": "DeepSpeedStrategy", "config": {"optimizer": {"type": "Adam"}}})
    with refused(ConfigError, "`zero_optimization`", key="strategy.DeepSpeedStrategy.zero_optimisation"):
        described({"type": "DeepSpeedStrategy", "zero_optimisation": {}})


def test_mixed_precision_and_clipping_come_from_the_wrapper() -> None:
    amp = {"type": "AmpOptimWrapper", "dtype": "float16", "loss_scale": 512.0, "clip_grad": {"max_norm": 2.0}}
    found = described({"type": "DDPStrategy"}, amp)
    assert (found.precision.compute, found.precision.scaler.static, found.train.clip_norm) == ("fp16", 512.0, 2.0)
    value = {"clip_grad": {"type": "value", "clip_value": 0.1}}
    assert described({"type": "DDPStrategy"}, value).train.clip_value == 0.1
    default = described({"type": "DDPStrategy"}, {"type": "AmpOptimWrapper"})
    assert default.precision.compute == "bf16"  # what torch.autocast takes on CPU
    with refused(ConfigError, "bf16", "fp16", key="optim_wrapper.dtype"):
        described(fsdp(mixed_precision={"param_dtype": "float16"}), {"type": "AmpOptimWrapper", "dtype": "bfloat16"})


def test_compile_takes_what_torch_takes() -> None:
    found = described({"type": "DDPStrategy"}, compile={"backend": "inductor", "mode": "max-autotune"}).strategy
    assert (found.compile.enabled, found.compile.backend, found.compile.mode) == (True, "inductor", "max-autotune")
    assert described({"type": "DDPStrategy"}, compile=True).strategy.compile.enabled
    with refused(ConfigError, "'train_step'", "`forward`", key="compile.target"):
        described({"type": "DDPStrategy"}, compile={"target": "train_step"})


def test_the_environment_is_read_and_every_key_answered() -> None:
    settings = TranslatedSettings()
    env_cfg = {
        "cudnn_benchmark": False,
        "mp_cfg": {"mp_start_method": "fork", "opencv_num_threads": 0},
        "dist_cfg": {"backend": "gloo", "timeout": timedelta(minutes=2)},
        "resource_limit": 4096,
    }
    assert read_environment(env_cfg, settings) == "fork"
    assert settings.sections == {"backend": "gloo", "timeout_s": 120.0}
    assert len(settings.report.entries) == 6
    assert not list(settings.report.of(KeyOutcome.REFUSED))
    with refused(ConfigError, "`dist_cfg`", key="env_cfg.dist_cgf"):
        read_environment({"dist_cgf": {}}, TranslatedSettings())


def test_the_launcher_must_fit_how_the_process_was_started() -> None:
    alone, many = Ranks(0, 1, 0, 1, "none"), Ranks(0, 2, 0, 2, "torchrun")
    for launcher, ranks in (("none", alone), (None, many), ("pytorch", many), ("slurm", Ranks(0, 2, 0, 2, "slurm"))):
        check_launcher(launcher, ranks)
    with refused(WorldError, "launcher='none'", "torchrun", 2, "--launcher pytorch"):
        check_launcher("none", many)
    with refused(WorldError, "launcher='slurm'", "srun"):
        check_launcher("slurm", alone)
    with refused(ConfigError, "'pytroch'", "`pytorch`", key="launcher"):
        check_launcher("pytroch", alone)
