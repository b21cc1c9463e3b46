"""Translates the section `optimizer` into `optim`, and `scheduler` into `schedule`.

[Note: defaults that are not ours]
An absent key means DeepSpeed's default, or torch's if DeepSpeed builds torch's optimizer. If Plait's own default
differs, the run description gets DeepSpeed's value, so that the run is the same. DeepSpeed applies weight decay to
every parameter, biases and norms included; so `no_decay` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.config import choose, show
from plait.frontends import honoured_as, refused_unless, unneeded
from plait.frontends.deepspeed.config.keys import (
    COUNT,
    FLAG,
    NUMBER,
    PAIR,
    SECTION,
    SIZE,
    TEXT,
    WHOLE,
    DeepSpeedSettings,
    Key,
    Table,
    ValueType,
    one_of,
    refused_if_on,
    setting,
)

_LR = setting("optim.lr", NUMBER, if_auto="left open: the rate that the script sets, or DeepSpeed's default")
_BETAS = setting("optim.betas", PAIR)
_EPS = setting("optim.eps", NUMBER)
_DECAY = Key(NUMBER, lambda settings, key, value: _decay(settings, key, value))
_CLIP = Key(
    NUMBER,
    refused_unless("DeepSpeed refuses it too: write `gradient_clipping` beside `optimizer`", 0, why="no clipping here"),
)
_SAME = "only how the update is computed, not what comes out"
_BIAS = Key(
    FLAG, refused_unless("moments are always corrected: leave it out", True, why="moments are corrected here too")
)
_IMPLEMENTATION = "optim.implementation"
_FOREACH = Key(FLAG, honoured_as(_IMPLEMENTATION, {True: "foreach", False: "loop"}.get, "how it is computed"))
_FUSED = Key(FLAG, honoured_as(_IMPLEMENTATION, {True: "fused", False: "auto"}.get, "how it is computed"))
_TORCH: Table = {
    "foreach": _FOREACH,
    "fused": _FUSED,
    "maximize": refused_if_on("write the loss with the other sign"),
    "differentiable": refused_if_on("leave it out"),
    "capturable": Key(FLAG, unneeded(_SAME)),
}
_COMMON: Table = {"lr": _LR, "weight_decay": _DECAY, "max_grad_norm": _CLIP}
_ADAM: Table = {
    **_COMMON,
    **_TORCH,
    "betas": _BETAS,
    "eps": _EPS,
    "amsgrad": setting("optim.amsgrad", FLAG),
    "bias_correction": _BIAS,
    "adam_w_mode": Key(FLAG, lambda settings, key, value: _adam_mode(settings, key, value)),
    "torch_adam": Key(FLAG, unneeded(f"torch's own Adam is what runs here; {_SAME}")),
    "set_grad_none": Key(FLAG, unneeded(_SAME)),
    "fp32_optimizer_states": Key(
        FLAG, refused_unless("states are fp32 beside fp32 weights: leave it out", True, why="states are fp32 here")
    ),
}
_LAMB: Table = {
    **_COMMON,
    "betas": _BETAS,
    "eps": _EPS,
    "bias_correction": _BIAS,
    "eps_inside_sqrt": refused_if_on("leave it out"),
    "amsgrad": refused_if_on("LAMB has no such variant: leave it out"),
    "max_coeff": setting("optim.max_trust", NUMBER),
    "min_coeff": setting("optim.min_trust", NUMBER),
}
_LION: Table = {**_COMMON, "betas": _BETAS, "set_grad_none": Key(FLAG, unneeded(_SAME))}
_ADAGRAD: Table = {
    **_COMMON,
    **_TORCH,
    "eps": _EPS,
    "lr_decay": setting("optim.lr_decay", NUMBER),
    "amsgrad": refused_if_on("Adagrad has no such variant: leave it out"),
    "initial_accumulator_value": Key(
        NUMBER, refused_unless("sums start at 0: leave it out", 0, why="sums start at 0 here")
    ),
    "fp32_optimizer_states": _ADAM["fp32_optimizer_states"],
}
_SGD: Table = {
    **_COMMON,
    **_TORCH,
    "momentum": setting("optim.momentum", NUMBER),
    "nesterov": setting("optim.nesterov", FLAG),
    "dampening": Key(
        NUMBER, refused_unless("momentum is not dampened: leave it out", 0, why="momentum is not dampened here")
    ),
}
_ADAFACTOR: Table = {
    **_COMMON,
    "foreach": Key(FLAG, unneeded(_SAME)),
    "maximize": _TORCH["maximize"],
    "beta2_decay": setting("optim.beta2_decay", NUMBER),
    "d": setting("optim.clip_threshold", NUMBER),
}


def _shared_rate(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    """Set `lr` as the rate of Muon, and of the AdamW that updates its other parameters, unless they have their own."""
    for half, rate in (("lr", "muon_lr"), ("adam_lr", "adam_lr")):
        if settings.given(f"optimizer.params.{rate}") is None:
            settings.set(f"optim.{half}", value, key)
    settings.honoured(key, value, f"optim.lr and optim.adam_lr: {show(value)}, where they have no rate of their own")


_MUON: Table = {
    **_COMMON,
    "lr": Key(NUMBER, _shared_rate, _LR.if_auto),
    "muon_lr": setting("optim.lr", NUMBER),
    "adam_lr": setting("optim.adam_lr", NUMBER),
    "momentum": setting("optim.momentum", NUMBER),
    "betas": setting("optim.adam_betas", PAIR),
    "eps": setting("optim.adam_eps", NUMBER),
    "adam_w_mode": Key(
        FLAG,
        refused_unless("the AdamW half decouples its decay: leave it out", True, why="decay is decoupled here too"),
    ),
    "torch_adam": _ADAM["torch_adam"],
    "fp32_optimizer_states": _ADAM["fp32_optimizer_states"],
    "ns_method": Key(one_of("gram", "standard"), unneeded("two ways to compute one iteration; here the classic one")),
    "ns_steps": setting("optim.ns_steps", COUNT),
    "per_head_muon": refused_if_on("matrices are taken whole: leave it out"),
}


@dataclass(frozen=True, slots=True)
class _OptimizerType:
    name: str
    """Its name in `optim.type`."""
    table: Table
    """The keys of its `params`."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of DeepSpeed that are not Plait's. [Note: defaults that are not ours]"""


TYPES = {
    "adam": _OptimizerType("AdamW", _ADAM),
    "adamw": _OptimizerType("AdamW", _ADAM),
    "lamb": _OptimizerType("Lamb", _LAMB, (("weight_decay", 0.0), ("eps", 1e-8), ("min_trust", 0.01))),
    "lion": _OptimizerType("Lion", _LION, (("lr", 1e-3), ("betas", [0.9, 0.999]))),
    "adagrad": _OptimizerType("Adagrad", _ADAGRAD),
    "sgd": _OptimizerType("SGD", _SGD, (("lr", 1e-3),)),
    "adafactor": _OptimizerType("Adafactor", _ADAFACTOR),
    "muon": _OptimizerType(
        "Muon", _MUON, (("weight_decay", 0.0), ("adam_eps", 1e-10), ("adam_patterns", ["*embed*", "*lm_head*"]))
    ),
}

_UNSUPPORTED = {
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"),
        "gradients are not compressed to one bit, and DeepSpeed has removed it too: write Adam or Lamb",
    ),
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"),
        "muP (rates by width) is not supported: build mup's optimizer and give it to `initialize`",
    ),
}


def _requested_type(settings: DeepSpeedSettings) -> _OptimizerType | None:
    name = settings.given("optimizer.type")
    return TYPES.get(name.lower()) if isinstance(name, str) else None


def _is_coupled_adam(settings: DeepSpeedSettings) -> bool:
    """Whether decay is added to the gradient: DeepSpeed's `Adam` is AdamW unless `adam_w_mode` is false."""
    name = settings.given("optimizer.type")
    return isinstance(name, str) and name.lower() == "adam" and settings.given("optimizer.params.adam_w_mode") is False


def _decay(settings: DeepSpeedSettings, key: str, value: float) -> None:
    settings.set("optim.weight_decay", value, key)
    if value:
        settings.set("optim.no_decay", [], key)
    settings.honoured(
        key, value, f"optim.weight_decay: {show(value)}" + (", of every parameter: no_decay: []" if value else "")
    )


def _adam_mode(settings: DeepSpeedSettings, key: str, value: bool) -> None:
    if str(settings.given("optimizer.type")).lower() == "adamw" and not value:
        settings.unneeded(key, value, "`type: AdamW` is AdamW in DeepSpeed too")
    else:
        settings.honoured(key, value, f"optim.type: {'AdamW' if value else 'Adam'}")


def _type(settings: DeepSpeedSettings, key: str, value: str) -> None:
    optimizer = _requested_type(settings)
    if optimizer is not None:
        name = "Adam" if _is_coupled_adam(settings) else optimizer.name
        settings.set("optim.type", name, key)
        decoupled = " (DeepSpeed's Adam decouples weight decay unless `adam_w_mode` is false)"
        settings.honoured(
            key, value, f"optim.type: {name}" + (decoupled if value.lower() == "adam" and name == "AdamW" else "")
        )
    elif value.lower() in _UNSUPPORTED:
        settings.refused(key, value, _UNSUPPORTED[value.lower()])
    else:
        others = choose(value, [known.name for known in TYPES.values() if known is not TYPES["adam"]], "optimizer")
        settings.refused(key, value, f"{others} Any other: build it and give it to `initialize` as `optimizer`.")


def _params(settings: DeepSpeedSettings, key: str, value: dict[str, Any]) -> None:
    optimizer = _requested_type(settings)
    if optimizer is not None:
        settings.read(value, optimizer.table, key)
    else:
        settings.unneeded(key, value, "it belongs to an optimizer that is refused")


_OPTIMIZER: Table = {
    "type": Key(TEXT, _type),
    "params": Key(SECTION, _params),
    "legacy_fusion": Key(FLAG, unneeded(_SAME)),
}


def _optimizer(settings: DeepSpeedSettings, key: str, value: dict[str, Any]) -> None:
    if settings.given("optimizer.type") is None:
        settings.wrong("optimizer.type", "it is absent, and DeepSpeed would then build no optimizer", "Write AdamW.")
    settings.read(value, _OPTIMIZER, key)
    optimizer = _requested_type(settings)
    if optimizer is not None:
        _set_defaults(settings, optimizer)


def _set_defaults(settings: DeepSpeedSettings, optimizer: _OptimizerType) -> None:
    defaults = dict(optimizer.defaults)
    if optimizer.table is _ADAM and not _is_coupled_adam(settings):
        is_torchs = settings.is_on("optimizer.params.torch_adam")
        defaults |= {"weight_decay": 0.01, "no_decay": []} if is_torchs else {"weight_decay": 0.0}
    for name, default in defaults.items():
        if name not in settings.sections["optim"]:
            settings.set(f"optim.{name}", default, f"optimizer.params.{name}")
            settings.implied(f"optimizer.params.{name}", f"optim.{name}: {show(default)} is DeepSpeed's default")


_OFFLOADED_UPDATE = "the optimizer that is given also updates what is offloaded"
OPTIMIZER_TABLE: Table = {
    "optimizer": Key(SECTION, _optimizer),
    "zero_allow_untested_optimizer": Key(FLAG, unneeded("any optimizer can be sharded here")),
    "zero_force_ds_cpu_optimizer": Key(FLAG, unneeded(_OFFLOADED_UPDATE)),
}

# `scheduler`: DeepSpeed's five schedules have the same names and keys in `schedule`.


_OPEN = "left open: as the script sets it, or the default"


def _schedule_keys(takes: ValueType, *names: str) -> dict[str, Key]:
    return {name: setting(f"schedule.{name}", takes, if_auto=_OPEN) for name in names}


def _warmup_steps(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    """Translate 0 as 1, which Plait needs: with both, DeepSpeed's warm-up has two steps."""
    length = max(1, int(value))
    settings.set("schedule.warmup_num_steps", length, key)
    settings.honoured(key, value, f"schedule.warmup_num_steps: {length}")


_LENGTHS = {
    "warmup_num_steps": Key(SIZE, _warmup_steps, _OPEN),
    "total_num_steps": setting("schedule.total_num_steps", COUNT, if_auto="left open: the length of the run"),
}
_WARMUP = {
    **_schedule_keys(NUMBER, "warmup_min_lr", "warmup_max_lr"),
    **_schedule_keys(one_of("log", "linear"), "warmup_type"),
    "warmup_num_steps": _LENGTHS["warmup_num_steps"],
    "last_batch_iteration": Key(
        WHOLE,
        refused_unless(
            "a run resumes where its checkpoint ends: leave it out", -1, why="a run starts at its first step"
        ),
    ),
}
SCHEDULER_TYPES: dict[str, Table] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, "total_num_steps": _LENGTHS["total_num_steps"]},
    "WarmupCosineLR": {
        **_LENGTHS,
        **_schedule_keys(NUMBER, "warmup_min_ratio", "cos_min_ratio"),
        "warmup_type": _WARMUP["warmup_type"],
        "last_batch_iteration": _WARMUP["last_batch_iteration"],
    },
    "OneCycle": {
        **_schedule_keys(NUMBER, "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "decay_mom_rate"),
        **_schedule_keys(NUMBER, "cycle_min_mom", "cycle_max_mom"),
        **_schedule_keys(COUNT, "cycle_first_step_size", "cycle_second_step_size"),
        **_schedule_keys(SIZE, "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size"),
        **_schedule_keys(FLAG, "cycle_momentum"),
        "last_batch_iteration": _WARMUP["last_batch_iteration"],
    },
    "LRRangeTest": {
        **_schedule_keys(NUMBER, "lr_range_test_min_lr", "lr_range_test_step_rate"),
        **_schedule_keys(COUNT, "lr_range_test_step_size"),
        **_schedule_keys(FLAG, "lr_range_test_staircase"),
        "last_batch_iteration": _WARMUP["last_batch_iteration"],
    },
}
_DEFAULTS: dict[str, tuple[str, Any]] = {
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_momentum", True),
}
"""Defaults of DeepSpeed that are not Plait's."""
_NEEDED = {"OneCycle": ("cycle_min_lr", "cycle_max_lr")}


def _scheduler_type(settings: DeepSpeedSettings, key: str, value: str) -> None:
    if value in SCHEDULER_TYPES:
        settings.set("schedule.type", value, key)
        settings.honoured(key, value, f"schedule.type: {value}")
    else:
        remedy = choose(value, SCHEDULER_TYPES, "schedule")
        settings.refused(
            key, value, f"{remedy} Any other: give it to `initialize` as `lr_scheduler`, or write `schedule`."
        )


def _scheduler_params(settings: DeepSpeedSettings, key: str, value: dict[str, Any]) -> None:
    table = SCHEDULER_TYPES.get(str(settings.given("scheduler.type")))
    if table is not None:
        others = {name: _schedules_with(name) for name in value if name not in table and _schedules_with(name)}
        for name, types in others.items():
            remedy = f"{' and '.join(types)} {'have' if len(types) > 1 else 'has'} it: change `type`, or leave it out."
            settings.wrong(f"{key}.{name}", f"{settings.given('scheduler.type')} has no such key", remedy)
        settings.read({name: param for name, param in value.items() if name not in others}, table, key)
    else:
        settings.unneeded(key, value, "it belongs to a schedule that is refused")


def _schedules_with(name: str) -> list[str]:
    """Return the names of the schedules that have a key."""
    return [schedule for schedule, table in SCHEDULER_TYPES.items() if name in table]


_SCHEDULER: Table = {"type": Key(TEXT, _scheduler_type), "params": Key(SECTION, _scheduler_params)}


def _scheduler(settings: DeepSpeedSettings, key: str, value: dict[str, Any]) -> None:
    name = settings.given("scheduler.type")
    if name is None:
        settings.wrong("scheduler.type", "it is absent, and DeepSpeed would then build no schedule", "Write WarmupLR.")
    settings.read(value, _SCHEDULER, key)
    if not isinstance(name, str) or name not in SCHEDULER_TYPES:
        return
    for param in _NEEDED.get(name, ()):
        if settings.given(f"scheduler.params.{param}") is None:
            settings.wrong(f"scheduler.params.{param}", f"{name} needs it", "Write a rate.")
    param, default = _DEFAULTS.get(name, ("", None))
    params = value.get("params")
    if param and not (isinstance(params, Mapping) and params.get(param) is not None):  # `auto`: the optimizer's rate
        settings.set(f"schedule.{param}", default, f"scheduler.params.{param}")
        settings.implied(f"scheduler.params.{param}", f"schedule.{param}: {show(default)} is DeepSpeed's default")


SCHEDULER_TABLE: Table = {"scheduler": Key(SECTION, _scheduler)}

# Gradient clipping and other keys about gradients.


CLIPPING = "gradient_clipping"
_DEFAULT_CLIPPING = 1.0
_MEAN = "gradients are always averaged over ranks; it only decides when they are divided"


def _clip(settings: DeepSpeedSettings, key: str, value: float) -> None:
    if value == 0:
        settings.honoured(key, value, "no clipping")
    else:
        settings.set("train.clip_norm", value, key)
        settings.honoured(key, value, f"train.clip_norm: {show(value)}")


def clip_by_default(settings: DeepSpeedSettings) -> None:
    """Clip at 1 where the key is absent, as DeepSpeed 0.19 does."""
    if settings.given(CLIPPING) is None:
        settings.set("train.clip_norm", _DEFAULT_CLIPPING, CLIPPING)
        settings.implied(CLIPPING, "train.clip_norm: 1.0 is DeepSpeed's default; 0 there switches it off")


GRADIENTS_TABLE: Table = {
    CLIPPING: Key(NUMBER, _clip),
    "prescale_gradients": Key(FLAG, unneeded(_MEAN)),
    "gradient_predivide_factor": Key(NUMBER, unneeded(_MEAN)),
    "gradient_allreduce_op": Key(
        one_of("mean", "sum"),
        refused_unless("gradients are averaged: multiply the loss by the number of ranks", "mean", why=_MEAN),
    ),
    "disable_allgather": Key(FLAG, unneeded("how updated weights reach the other ranks does not change them")),
}
