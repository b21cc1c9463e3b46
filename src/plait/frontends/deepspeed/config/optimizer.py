"""`optimizer`: what DeepSpeed would build, as `optim`.

[Note: defaults that are not ours]
An absent key means DeepSpeed's default, or torch's where DeepSpeed builds torch's optimizer. Where Plait's own default
is another, it is written out, so that the run is the same. DeepSpeed decays every parameter it is given, biases and
norms included; so `no_decay` is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.config import choose, show
from plait.frontends.deepspeed.config.keys import off, only, to, unneeded
from plait.frontends.deepspeed.config.kinds import COUNT, FLAG, NUMBER, PAIR, SECTION, TEXT, one_of
from plait.frontends.deepspeed.config.work import Key, Table, Work

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
TABLE: Table = {
    "optimizer": Key(SECTION, _optimizer),
    "zero_allow_untested_optimizer": unneeded(FLAG, "any optimizer can be sharded here"),
    "zero_force_ds_cpu_optimizer": unneeded(FLAG, _CPU),
}
