"""Rules for the phases after pretraining."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.model import ResNetConfig
from plait.config.online import ONLINE
from plait.config.posttrain import PHASES
from plait.config.rules.facts import Facts, given, idle
from plait.errors import Problem

_SECTIONS = ("posttrain", "lora", "rollout", *PHASES)


def sections_belong_to_a_phase(facts: Facts) -> Iterator[Problem]:
    """Plain training would not look at them."""
    if facts.config.phase is None:
        for name in given(facts.config, *_SECTIONS):
            message = f"this section has no effect: the run is none of {', '.join(PHASES)}"
            yield Problem(name, message, f"Start it with {', '.join(f'`plait {phase}`' for phase in PHASES)}.")


def a_phase_has_its_own_data(facts: Facts) -> Iterator[Problem]:
    """Examples are not rows of tokens."""
    if facts.config.phase is not None:
        for name in given(facts.config, "data", "val_data", "test_data"):
            yield Problem(name, f"has no effect in phase {facts.config.phase}", "Write `posttrain.data` instead.")


def a_phase_has_its_own_loss(facts: Facts) -> Iterator[Problem]:
    """What is learned is what the phase is."""
    config = facts.config
    if config.phase is not None and config.train.loss is not None:
        yield Problem(
            "train.loss", f"has no effect in phase {config.phase}, which has a loss of its own", "Leave it out."
        )
    if config.phase in ONLINE and config.metrics:
        message = f"has no effect in phase {config.phase}, which measures rewards"
        yield Problem("metrics", message, "Leave it out.")


def examples_are_named(facts: Facts) -> Iterator[Problem]:
    """Nothing is trained on that nobody asked for."""
    posttrain = facts.config.posttrain
    if facts.config.phase is not None and (posttrain is None or not posttrain.data):
        yield no_examples()


def no_examples() -> Problem:
    """What is said where a phase has no examples."""
    remedy = "Write `posttrain.data: [{type: file, path: rows.jsonl}]`, or `{type: task}` for made-up questions."
    return Problem("posttrain.data", "there is none", remedy)


def answers_stay_on_one_rank(facts: Facts) -> Iterator[Problem]:
    """A pair, a reward or the next token is of a whole answer; ranks that have parts of it cannot compute it."""
    layout = facts.config.strategy.layout
    for axis in ("cp", "pp"):
        if facts.config.phase not in (None, "sft") and (getattr(layout, axis) or 1) > 1:
            what = "writing and judging need" if facts.config.phase in ONLINE else "the loss of a pair needs"
            message = f"{getattr(layout, axis)}, but {what} whole answers on one rank"
            yield Problem(f"strategy.layout.{axis}", message, f"Use `strategy.layout.{axis}: 1` with tp or ZeRO.")


def language_models_answer(facts: Facts) -> Iterator[Problem]:
    """Others have no tokens."""
    if facts.config.phase is not None and isinstance(facts.config.model, ResNetConfig):
        yield Problem("model.type", "resnet is no language model", "Use gpt, llama, moe or hf.")


def reference_without_adapter_needs_one(facts: Facts) -> Iterator[Problem]:
    """Otherwise it would be the model itself."""
    dpo = facts.config.dpo
    if facts.config.phase == "dpo" and dpo is not None and dpo.reference == "base" and facts.config.lora is None:
        yield Problem("dpo.reference", "`base` is the model without its adapter, and there is none", "Add `lora`.")


def settings_of_other_losses_are_idle(facts: Facts) -> Iterator[Problem]:
    """Each loss has its own settings."""
    dpo = facts.config.dpo
    if dpo is None:
        return
    reason, remedy = f"the loss is {dpo.loss}", "Leave it out."
    if dpo.loss != "dpo":
        yield from idle("dpo", dpo, ("label_smoothing",), reason, remedy)
    if dpo.loss != "kto":
        yield from idle("dpo", dpo, ("desirable", "undesirable"), reason, remedy)


def words_of_other_templates_are_idle(facts: Facts) -> Iterator[Problem]:
    """Only `marked` turns have marks and role words."""
    posttrain = facts.config.posttrain
    if posttrain is not None and (kind := posttrain.template.kind) != "marked":
        words = ("start", "end", "system", "user", "assistant")
        reason = f"`kind` is {kind}"
        yield from idle("posttrain.template", posttrain.template, words, reason, "Write `kind: marked`.")


def small_matrices_are_not_cut(facts: Facts) -> Iterator[Problem]:
    """A matrix in 4 or 8 bits is no parameter, so nothing cuts it."""
    lora, tp = facts.config.lora, facts.config.strategy.layout.tp or 1
    if lora is not None and lora.base != "full" and tp > 1:
        message = f"{lora.base} with strategy.layout.tp {tp}: ranks cannot share a matrix in so few bits"
        yield Problem("lora.base", message, "Use ZeRO, or `base: full`.")


def a_phase_says_how_it_is_spread(facts: Facts) -> Iterator[Problem]:
    """The search plans rows of tokens, not examples."""
    if facts.config.phase is not None and facts.config.strategy.auto:
        remedy = "Write a strategy; `plait plan --search` finds one for plain training of the same model."
        yield Problem("strategy.auto", f"has no answer for phase {facts.config.phase}", remedy)


def own_validation_keeps_nothing_back(facts: Facts) -> Iterator[Problem]:
    """There is one way to say what is validated on."""
    posttrain = facts.config.posttrain
    if posttrain is not None and posttrain.val_data:
        reason, remedy = "there is `posttrain.val_data`", "Leave one of them out."
        yield from idle("posttrain", posttrain, ("val_fraction",), reason, remedy)


def phases_run_on_the_native_engine(facts: Facts) -> Iterator[Problem]:
    """Other engines build and fill models in their own way."""
    if facts.config.phase is not None and (engine := facts.config.strategy.engine) != "native":
        message = f"{engine} cannot run phase {facts.config.phase}"
        yield Problem("strategy.engine", message, "Use the native engine; `zero` and `layout` say the same there.")


RULES = (
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
