"""`optimizer`: what DeepSpeed would build, as `optim`.

[Note: defaults that are not ours]
An absent key means DeepSpeed's default, or torch's where DeepSpeed builds torch's optimizer. Where Plait's own default
is another, it is written out, so that the run is the same. DeepSpeed decays every parameter it is given, biases and
norms included; so `no_decay` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.config import choose, show
from plait.frontends.deepspeed.config.work import (
    COUNT,
    FLAG,
    NUMBER,
    PAIR,
    SECTION,
    SIZE,
    TEXT,
    WHOLE,
    Key,
    Table,
    ValueKind,
    Work,
    off,
    one_of,
    only,
    to,
    unneeded,
)

_LR = to("optim.lr", NUMBER, if_open="left open: the rate that the script sets, or DeepSpeed's default")
_BETAS = to("optim.betas", PAIR)
_EPS = to("optim.eps", NUMBER)
_DECAY = Key(NUMBER, lambda work, key, value: _decay(work, key, value))
_CLIP = only(0, NUMBER, "no clipping here", "DeepSpeed refuses it too: write `gradient_clipping` beside `optimizer`")
_SAME = "only how the update is computed, not what comes out"
_BIAS = only(True, FLAG, "moments are corrected here too", "moments are always corrected: leave it out")
_FOREACH = to("optim.implementation", FLAG, "how it is computed", turned=lambda value: "foreach" if value else "loop")
_FUSED = to("optim.implementation", FLAG, "how it is computed", turned=lambda value: "fused" if value else "auto")
_TORCH: Table = {
    "foreach": _FOREACH,
    "fused": _FUSED,
    "maximize": off("write the loss with the other sign"),
    "differentiable": off("leave it out"),
    "capturable": unneeded(FLAG, _SAME),
}
_COMMON: Table = {"lr": _LR, "weight_decay": _DECAY, "max_grad_norm": _CLIP}
_ADAM: Table = {
    **_COMMON,
    **_TORCH,
    "betas": _BETAS,
    "eps": _EPS,
    "amsgrad": to("optim.amsgrad", FLAG),
    "bias_correction": _BIAS,
    "adam_w_mode": Key(FLAG, lambda work, key, value: _adam_mode(work, key, value)),
    "torch_adam": unneeded(FLAG, f"torch's own Adam is what runs here; {_SAME}"),
    "set_grad_none": unneeded(FLAG, _SAME),
    "fp32_optimizer_states": only(
        True, FLAG, "states are fp32 here", "states are fp32 beside fp32 weights: leave it out"
    ),
}
_LAMB: Table = {
    **_COMMON,
    "betas": _BETAS,
    "eps": _EPS,
    "bias_correction": _BIAS,
    "eps_inside_sqrt": off("leave it out"),
    "amsgrad": off("LAMB has no such variant: leave it out"),
    "max_coeff": to("optim.max_trust", NUMBER),
    "min_coeff": to("optim.min_trust", NUMBER),
}
_LION: Table = {**_COMMON, "betas": _BETAS, "set_grad_none": unneeded(FLAG, _SAME)}
_ADAGRAD: Table = {
    **_COMMON,
    **_TORCH,
    "eps": _EPS,
    "lr_decay": to("optim.lr_decay", NUMBER),
    "amsgrad": off("Adagrad has no such variant: leave it out"),
    "initial_accumulator_value": only(0, NUMBER, "sums start at 0 here", "sums start at 0: leave it out"),
    "fp32_optimizer_states": _ADAM["fp32_optimizer_states"],
}
_SGD: Table = {
    **_COMMON,
    **_TORCH,
    "momentum": to("optim.momentum", NUMBER),
    "nesterov": to("optim.nesterov", FLAG),
    "dampening": only(0, NUMBER, "there is none here", "momentum is not dampened: leave it out"),
}
_ADAFACTOR: Table = {
    **_COMMON,
    "foreach": unneeded(FLAG, _SAME),
    "maximize": _TORCH["maximize"],
    "beta2_decay": to("optim.beta2_decay", NUMBER),
    "d": to("optim.clip_threshold", NUMBER),
}


def _shared_rate(work: Work, key: str, value: Any) -> None:
    """One rate for both halves, unless a half has its own."""
    for half, own in (("lr", "muon_lr"), ("adam_lr", "adam_lr")):
        if work.look(f"optimizer.params.{own}") is None:
            work.put(f"optim.{half}", value, key)
    work.honour(key, value, f"optim.lr and optim.adam_lr: {show(value)}, where they have no rate of their own")


_MUON: Table = {
    **_COMMON,
    "lr": Key(NUMBER, _shared_rate, _LR.if_open),
    "muon_lr": to("optim.lr", NUMBER),
    "adam_lr": to("optim.adam_lr", NUMBER),
    "momentum": to("optim.momentum", NUMBER),
    "betas": to("optim.adam_betas", PAIR),
    "eps": to("optim.adam_eps", NUMBER),
    "adam_w_mode": only(True, FLAG, "decay is decoupled here too", "the AdamW half decouples its decay: leave it out"),
    "torch_adam": _ADAM["torch_adam"],
    "fp32_optimizer_states": _ADAM["fp32_optimizer_states"],
    "ns_method": unneeded(one_of("gram", "standard"), "two ways to compute one iteration; here the classic one"),
    "ns_steps": to("optim.ns_steps", COUNT),
    "per_head_muon": off("matrices are taken whole: leave it out"),
}


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    """What `optim.type` calls it."""
    table: Table
    """Its `params`."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Those of DeepSpeed that are not Plait's. [Note: defaults that are not ours]"""


TYPES = {
    "adam": _Type("AdamW", _ADAM),
    "adamw": _Type("AdamW", _ADAM),
    "lamb": _Type("Lamb", _LAMB, (("weight_decay", 0.0), ("eps", 1e-8), ("min_trust", 0.01))),
    "lion": _Type("Lion", _LION, (("lr", 1e-3), ("betas", [0.9, 0.999]))),
    "adagrad": _Type("Adagrad", _ADAGRAD),
    "sgd": _Type("SGD", _SGD, (("lr", 1e-3),)),
    "adafactor": _Type("Adafactor", _ADAFACTOR),
    "muon": _Type(
        "Muon", _MUON, (("weight_decay", 0.0), ("adam_eps", 1e-10), ("adam_patterns", ["*embed*", "*lm_head*"]))
    ),
}

_SPECIAL = {
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"),
        "gradients are not compressed to one bit, and DeepSpeed has dropped it too: write Adam or Lamb",
    ),
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"),
        "rates by width (muP) are not known: build mup's optimizer and give it to `initialize`",
    ),
}


def _known(work: Work) -> _Type | None:
    word = work.look("optimizer.type")
    return TYPES.get(word.lower()) if isinstance(word, str) else None


def _plain_adam(work: Work) -> bool:
    """Whether decay goes into the gradient. DeepSpeed's `Adam` is AdamW unless it is told otherwise."""
    word = work.look("optimizer.type")
    return isinstance(word, str) and word.lower() == "adam" and work.look("optimizer.params.adam_w_mode") is False


def _decay(work: Work, key: str, value: float) -> None:
    work.put("optim.weight_decay", value, key)
    if value:
        work.put("optim.no_decay", [], key)
    work.honour(
        key, value, f"optim.weight_decay: {show(value)}" + (", of every parameter: no_decay: []" if value else "")
    )


def _adam_mode(work: Work, key: str, value: bool) -> None:
    if str(work.look("optimizer.type")).lower() == "adamw" and not value:
        work.leave(key, value, "AdamW is AdamW, in DeepSpeed too")
    else:
        work.honour(key, value, f"optim.type: {'AdamW' if value else 'Adam'}")


def _type(work: Work, key: str, value: str) -> None:
    found = _known(work)
    if found is not None:
        name = "Adam" if _plain_adam(work) else found.name
        work.put("optim.type", name, key)
        decoupled = " (DeepSpeed's Adam decouples weight decay unless `adam_w_mode` is false)"
        work.honour(
            key, value, f"optim.type: {name}" + (decoupled if value.lower() == "adam" and name == "AdamW" else "")
        )
    elif value.lower() in _SPECIAL:
        work.refuse(key, value, _SPECIAL[value.lower()])
    else:
        others = choose(value, [each.name for each in TYPES.values() if each is not TYPES["adam"]], "optimizer")
        work.refuse(key, value, f"{others} Any other: build it and give it to `initialize` as `optimizer`.")


def _params(work: Work, key: str, value: dict[str, Any]) -> None:
    found = _known(work)
    if found is not None:
        work.walk(key, value, found.table)
    else:
        work.leave(key, value, "it belongs to an optimizer that is refused")


_OPTIMIZER: Table = {
    "type": Key(TEXT, _type),
    "params": Key(SECTION, _params),
    "legacy_fusion": unneeded(FLAG, _SAME),
}


def _optimizer(work: Work, key: str, value: dict[str, Any]) -> None:
    if work.look("optimizer.type") is None:
        work.wrong("optimizer.type", "there is none, and DeepSpeed would then build no optimizer", "Write AdamW.")
    work.walk(key, value, _OPTIMIZER)
    found = _known(work)
    if found is not None:
        _write_defaults(work, found)


def _write_defaults(work: Work, kind: _Type) -> None:
    defaults = dict(kind.defaults)
    if kind.table is _ADAM and not _plain_adam(work):
        torchs = work.on("optimizer.params.torch_adam")
        defaults |= {"weight_decay": 0.01, "no_decay": []} if torchs else {"weight_decay": 0.0}
    for name, default in defaults.items():
        if name not in work.sections["optim"]:
            work.put(f"optim.{name}", default, f"optimizer.params.{name}")
            work.imply(f"optimizer.params.{name}", f"optim.{name}: {show(default)} is its default there")


_CPU = "whichever optimizer is asked for also updates what is offloaded"
OPTIMIZER_TABLE: Table = {
    "optimizer": Key(SECTION, _optimizer),
    "zero_allow_untested_optimizer": unneeded(FLAG, "any optimizer can be sharded here"),
    "zero_force_ds_cpu_optimizer": unneeded(FLAG, _CPU),
}

# `scheduler`: DeepSpeed's five schedules have the same names and keys in `schedule`.


_OPEN = "left open: as the script sets it, or the default"


def _keys(kind: ValueKind, *names: str) -> dict[str, Key]:
    return {name: to(f"schedule.{name}", kind, if_open=_OPEN) for name in names}


def _warmup_steps(work: Work, key: str, value: Any) -> None:
    """DeepSpeed's warm-up is two steps long at least, so 0 and 1 are the same to it."""
    length = max(1, int(value))
    work.put("schedule.warmup_num_steps", length, key)
    work.honour(key, value, f"schedule.warmup_num_steps: {length}")


_LENGTHS = {
    "warmup_num_steps": Key(SIZE, _warmup_steps, _OPEN),
    "total_num_steps": to("schedule.total_num_steps", COUNT, if_open="left open: the length of the run"),
}
_RISE = {
    **_keys(NUMBER, "warmup_min_lr", "warmup_max_lr"),
    **_keys(one_of("log", "linear"), "warmup_type"),
    "warmup_num_steps": _LENGTHS["warmup_num_steps"],
    "last_batch_iteration": only(
        -1, WHOLE, "a run starts at its first step", "a run goes on where its checkpoint ends: leave it out"
    ),
}
SCHEDULER_TYPES: dict[str, Table] = {
    "WarmupLR": _RISE,
    "WarmupDecayLR": {**_RISE, "total_num_steps": _LENGTHS["total_num_steps"]},
    "WarmupCosineLR": {
        **_LENGTHS,
        **_keys(NUMBER, "warmup_min_ratio", "cos_min_ratio"),
        "warmup_type": _RISE["warmup_type"],
        "last_batch_iteration": _RISE["last_batch_iteration"],
    },
    "OneCycle": {
        **_keys(NUMBER, "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "decay_mom_rate"),
        **_keys(NUMBER, "cycle_min_mom", "cycle_max_mom"),
        **_keys(COUNT, "cycle_first_step_size", "cycle_second_step_size"),
        **_keys(SIZE, "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size"),
        **_keys(FLAG, "cycle_momentum"),
        "last_batch_iteration": _RISE["last_batch_iteration"],
    },
    "LRRangeTest": {
        **_keys(NUMBER, "lr_range_test_min_lr", "lr_range_test_step_rate"),
        **_keys(COUNT, "lr_range_test_step_size"),
        **_keys(FLAG, "lr_range_test_staircase"),
        "last_batch_iteration": _RISE["last_batch_iteration"],
    },
}
_DEFAULTS: dict[str, tuple[str, Any]] = {
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_momentum", True),
}
"""Defaults of DeepSpeed that are not Plait's."""
_NEEDED = {"OneCycle": ("cycle_min_lr", "cycle_max_lr")}


def _scheduler_type(work: Work, key: str, value: str) -> None:
    if value in SCHEDULER_TYPES:
        work.put("schedule.type", value, key)
        work.honour(key, value, f"schedule.type: {value}")
    else:
        remedy = choose(value, SCHEDULER_TYPES, "schedule")
        work.refuse(key, value, f"{remedy} Any other: give it to `initialize` as `lr_scheduler`, or write `schedule`.")


def _scheduler_params(work: Work, key: str, value: dict[str, Any]) -> None:
    table = SCHEDULER_TYPES.get(str(work.look("scheduler.type")))
    if table is not None:
        others = {name: _with(name) for name in value if name not in table and _with(name)}
        for name, types in others.items():
            remedy = f"{' and '.join(types)} {'have' if len(types) > 1 else 'has'} it: change `type`, or leave it out."
            work.wrong(f"{key}.{name}", f"{work.look('scheduler.type')} has no such key", remedy)
        work.walk(key, {name: each for name, each in value.items() if name not in others}, table)
    else:
        work.leave(key, value, "it belongs to a schedule that is refused")


def _with(name: str) -> list[str]:
    """The schedules that have a key."""
    return [word for word, table in SCHEDULER_TYPES.items() if name in table]


_SCHEDULER: Table = {"type": Key(TEXT, _scheduler_type), "params": Key(SECTION, _scheduler_params)}


def _scheduler(work: Work, key: str, value: dict[str, Any]) -> None:
    word = work.look("scheduler.type")
    if word is None:
        work.wrong("scheduler.type", "there is none, and DeepSpeed would then build no schedule", "Write WarmupLR.")
    work.walk(key, value, _SCHEDULER)
    if not isinstance(word, str) or word not in SCHEDULER_TYPES:
        return
    for name in _NEEDED.get(word, ()):
        if work.look(f"scheduler.params.{name}") is None:
            work.wrong(f"scheduler.params.{name}", f"{word} needs it", "Write a rate.")
    name, default = _DEFAULTS.get(word, ("", None))
    params = value.get("params")
    if name and not (isinstance(params, Mapping) and params.get(name) is not None):  # `auto` is the optimizer's rate
        work.put(f"schedule.{name}", default, f"scheduler.params.{name}")
        work.imply(f"scheduler.params.{name}", f"schedule.{name}: {show(default)} is DeepSpeed's default")


SCHEDULER_TABLE: Table = {"scheduler": Key(SECTION, _scheduler)}

# What happens to gradients between the backward pass and the update.


CLIPPING = "gradient_clipping"
_DEFAULT_CLIPPING = 1.0
_MEAN = "gradients are averaged over ranks in any case; it only says when they are divided"


def _clip(work: Work, key: str, value: float) -> None:
    if value == 0:
        work.honour(key, value, "no clipping")
    else:
        work.put("train.clip_norm", value, key)
        work.honour(key, value, f"train.clip_norm: {show(value)}")


def clip_by_default(work: Work) -> None:
    """DeepSpeed 0.19 clips at 1 where it is told nothing."""
    if work.look(CLIPPING) is None:
        work.put("train.clip_norm", _DEFAULT_CLIPPING, CLIPPING)
        work.imply(CLIPPING, "train.clip_norm: 1.0 is DeepSpeed's default; 0 there switches it off")


GRADIENTS_TABLE: Table = {
    CLIPPING: Key(NUMBER, _clip),
    "prescale_gradients": unneeded(FLAG, _MEAN),
    "gradient_predivide_factor": unneeded(NUMBER, _MEAN),
    "gradient_allreduce_op": only(
        "mean", one_of("mean", "sum"), _MEAN, "gradients are averaged: multiply the loss by the number of ranks"
    ),
    "disable_allgather": unneeded(FLAG, "how updated weights reach the other ranks does not change them"),
}
