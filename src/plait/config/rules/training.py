"""Rules for `model`, `data`, `precision`, `train`, `optim`, `checkpoint`, `log` and other sections of training."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.base import Section
from plait.config.data import (
    CUSTOM_DATA,
    IMAGE_DATA,
    SMALLEST_BPE,
    TEXT_DATA,
    Cifar10Data,
    DataSource,
    ImageChatData,
    ImageFolderData,
    ImageTextData,
    JsonlData,
    MixtureData,
    SpeechData,
    TextClassificationData,
    TextData,
    TokensData,
    leaf_sources,
    text_sources,
)
from plait.config.model import GptConfig, HFConfig, LlamaConfig, MoeConfig, ResNetConfig
from plait.config.objective import (
    CustomObjective,
    DenoisingObjective,
    MaskedImageObjective,
    MaskedObjective,
    Seq2SeqObjective,
    SpanCorruptionObjective,
)
from plait.config.optim import SGDConfig
from plait.config.posttrain import ONLINE
from plait.config.rules.facts import RunFacts, keys_set, without_effect
from plait.config.text import show
from plait.config.train import EARLIEST, EarlyStopConfig, RollbackConfig
from plait.errors import Problem


def heads_divide_the_width(facts: RunFacts) -> Iterator[Problem]:
    """Every head has the same share of `dim`."""
    model = facts.config.model
    if isinstance(model, (GptConfig, LlamaConfig)) and model.dim % model.heads:
        down, up = model.dim // model.heads * model.heads, -(-model.dim // model.heads) * model.heads
        message = f"{model.dim} ÷ {model.heads} heads = {model.dim / model.heads:g}, not a whole number"
        near = f"`model.dim: {up}`" if down == 0 else f"`model.dim: {down}` or `{up}`"
        yield Problem("model.dim", message, f"Write {near}, or other `model.heads`.")


def kv_heads_divide_the_heads(facts: RunFacts) -> Iterator[Problem]:
    """Each key/value head serves the same number of heads."""
    model = facts.config.model
    if isinstance(model, LlamaConfig) and model.kv_heads is not None and model.heads % model.kv_heads:
        fit = [str(n) for n in range(1, model.heads + 1) if model.heads % n == 0]
        message = f"{model.heads} heads ÷ {model.kv_heads} = {model.heads / model.kv_heads:g}, not a whole number"
        yield Problem("model.kv_heads", message, f"Write a divisor of {model.heads}: {', '.join(fit)}.")


def rotary_heads_are_even(facts: RunFacts) -> Iterator[Problem]:
    """RoPE rotates pairs of a head's entries."""
    model = facts.config.model
    if isinstance(model, LlamaConfig) and model.dim % model.heads == 0 and model.dim // model.heads % 2:
        message = f"{model.dim} ÷ {model.heads} heads = {model.dim // model.heads}, but RoPE needs an even head size"
        up, down = model.dim + model.heads, model.dim - model.heads
        near = f"`model.dim: {down}` or `{up}`" if down else f"`model.dim: {up}`"
        yield Problem("model.dim", message, f"Write {near}, or other `model.heads`.")


def hf_model_has_one_source(facts: RunFacts) -> Iterator[Problem]:
    """A `transformers` model comes from a folder or from a config; only a folder has weights."""
    model = facts.config.model
    if not isinstance(model, HFConfig):
        return
    if model.path is not None and model.config is not None:
        message = f"`model.config` and `model.path` ({model.path!r}) are both set"
        yield Problem("model.config", message, "Leave one of the two out.")
    elif model.path is None and model.config is None:
        remedy = "Write `model.path` (a folder), or `model.config` (with `model_type`)."
        yield Problem("model", "an hf model needs `path` or `config`", remedy)
    elif model.path is None and keys_set(model, "pretrained") and model.pretrained:
        reason = "`model.config` has no weights, they are initialized at random"
        remedy = "Leave it out, or give a folder with weights as `model.path`."
        yield from without_effect("model", model, ("pretrained",), reason, remedy)


def only_classifiers_have_labels(facts: RunFacts) -> Iterator[Problem]:
    """`num_labels` is the number of outputs of a classifier."""
    model = facts.config.model
    if isinstance(model, HFConfig) and not model.task.endswith("-classification"):
        reason = f"`model.task` is {model.task}"
        yield from without_effect("model", model, ("num_labels",), reason, "Leave it out.")


def choices_are_experts(facts: RunFacts) -> Iterator[Problem]:
    """A token is routed to some of the experts, which are weighted by their scores."""
    model = facts.config.model
    if not isinstance(model, MoeConfig):
        return
    if model.top_k > model.experts:
        message = f"{model.top_k} experts per token, but `model.experts` is {model.experts}"
        yield Problem("model.top_k", message, f"Write at most {model.experts}.")
    elif model.top_k == 1 < model.experts and model.normalize:
        message = "true with `model.top_k: 1` makes every weight 1: the router would get no gradient"
        yield Problem("model.normalize", message, "Write `model.normalize: false`.")
    if model.moe_every > model.layers:
        message = f"{model.moe_every} is more than the {model.layers} layers: there would be no experts"
        yield Problem("model.moe_every", message, f"Write at most {model.layers}, or use `model.type: llama`.")


# Rules for `data`, `val_data` and `test_data`, alone and together with `model`.


_ROLES = ("data", "val_data", "test_data")


def _sources(facts: RunFacts) -> Iterator[tuple[str, DataSource]]:
    for path in _ROLES:
        for key, source in leaf_sources(path, getattr(facts.config, path)):
            if not isinstance(source, CUSTOM_DATA):  # the keys of custom data are not known here
                yield key, source


def sources_of_a_mixture_fit_together(facts: RunFacts) -> Iterator[Problem]:
    """Samples of all sources are in one batch, and share one tokenizer."""
    for path in _ROLES:
        mixture = getattr(facts.config, path)
        if not isinstance(mixture, MixtureData):
            continue
        if mixture.weights and len(mixture.weights) != len(mixture.sources):
            message = f"{len(mixture.weights)} weights for {len(mixture.sources)} sources"
            yield Problem(f"{path}.weights", message, "Write one per source, in their order.")
        for key, source in leaf_sources(path, mixture):
            names, reason = (
                ("shuffle", "workers", "pin_memory", "drop_last", "collate"),
                f"`{path}` as a whole is loaded",
            )
            yield from without_effect(key, source, names, reason, f"Write it beside `{path}.sources`.")
            length = getattr(source, "seq_len", None)
            if length is not None and length != mixture.seq_len:
                message = f"{length}, but `seq_len` of the first source is {mixture.seq_len}"
                yield Problem(f"{key}.seq_len", message, f"Write `seq_len: {mixture.seq_len}`.")
        tokenized = text_sources(path, mixture)
        for key, text in tokenized[1:]:
            first = tokenized[0]
            if text.tokenizer not in (None, first[1].tokenizer):
                message = f"{text.tokenizer!r}, but the mixture uses the tokenizer of `{first[0]}`"
                yield Problem(f"{key}.tokenizer", message, "Leave it out, or name the same one in both.")
            elif text.tokenizer is None:
                yield from without_effect(
                    key, text, ("vocab_size",), f"the tokenizer is that of `{first[0]}`", "Leave it out."
                )


def own_tokenizer_has_its_own_size(facts: RunFacts) -> Iterator[Problem]:
    """`vocab_size` is the size of a tokenizer that is trained."""
    for path, source in _sources(facts):
        if isinstance(source, (TextData, JsonlData)) and source.tokenizer is not None:
            reason = f"the tokenizer {source.tokenizer!r} has a size of its own"
            yield from without_effect(path, source, ("vocab_size",), reason, "Leave one of the two out.")


def val_fraction_needs_a_split(facts: RunFacts) -> Iterator[Problem]:
    """Where all of a source is used, none of it is split off."""
    for path, source in _sources(facts):
        if getattr(source, "split", None) == "all":
            remedy = f"Leave it out, or write `{path}.split: train` (or `val`)."
            yield from without_effect(path, source, ("val_fraction",), f"`{path}.split` is all", remedy)


_TASKS: dict[type[Section], str] = {
    MaskedObjective: "masked-lm",
    SpanCorruptionObjective: "seq2seq-lm",
    DenoisingObjective: "seq2seq-lm",
    Seq2SeqObjective: "seq2seq-lm",
    MaskedImageObjective: "masked-image-modeling",
    TextClassificationData: "sequence-classification",
    ImageTextData: "contrastive-image-text",
    SpeechData: "speech-seq2seq",
    ImageChatData: "image-text-to-text",
    ImageFolderData: "image-classification",
    Cifar10Data: "image-classification",
}
"""The task that an objective, or data with labels of their own, are for."""


def _taught(source: DataSource) -> str | None:
    """Return the task that the labels of a source are for; None where a custom objective makes them."""
    objective = getattr(source, "objective", None)
    if isinstance(objective, CustomObjective):
        return None
    if objective is None and isinstance(source, TEXT_DATA):
        return "causal-lm"
    return _TASKS[type(source if objective is None else objective)]


def labels_fit_the_task(facts: RunFacts) -> Iterator[Problem]:
    """A model learns what it is made for: an encoder would see the next tokens that it should predict."""
    model = facts.config.model
    if isinstance(model, HFConfig):
        task, key, remedy = model.task, "model.task", "Write `model.task: {taught}`, or other data."
    elif isinstance(model, (GptConfig, LlamaConfig)):
        task, key, remedy = "causal-lm", "model.type", "Write `model.type: hf` with `model.task: {taught}`."
    elif isinstance(model, ResNetConfig):
        task, key, remedy = "image-classification", "model.type", "Write `model.type: hf` with `model.task: {taught}`."
    else:
        return
    for path, source in _sources(facts):
        taught = _taught(source)
        if taught in (None, task):
            continue
        fitting = [name for name in ("masked", "span_corruption", "denoising", "seq2seq") if _objective_for(name, task)]
        if isinstance(source, TEXT_DATA) and fitting:
            remedy = f"Write `{path}.objective: {{{{type: {' or '.join(fitting)}}}}}`, or `model.task: {{taught}}`."
        elif isinstance(source, IMAGE_DATA) and task == "masked-image-modeling":
            remedy = f"Write `{path}.objective: {{{{type: masked_image}}}}`."
        message = f"{task!r}, but the labels of `{path}` are for {taught!r}"
        yield Problem(key, message, remedy.format(taught=taught))
        return


def _objective_for(name: str, task: str) -> bool:
    return any(section.model_fields["type"].default == name and made == task for section, made in _TASKS.items())


def objectives_fit_their_text(facts: RunFacts) -> Iterator[Problem]:
    """Hidden parts are parts of whole texts; text to text needs pairs. Special tokens come from a tokenizer."""
    for path, source in _sources(facts):
        if not isinstance(source, TEXT_DATA):
            continue
        objective = source.objective
        pairs = isinstance(source, JsonlData) and source.prompt_key is not None
        if isinstance(objective, Seq2SeqObjective):
            if not pairs and not isinstance(source, TokensData):
                message = "seq2seq needs prompts with completions"
                remedy = f"Write `{path}.type: jsonl` with `prompt_key` and `completion_key`."
                yield Problem(f"{path}.objective", message, remedy)
            elif not source.document_mask:
                yield Problem(f"{path}.document_mask", "false, but every row is a pair of its own", "Leave it out.")
        elif isinstance(objective, (MaskedObjective, SpanCorruptionObjective, DenoisingObjective)) and pairs:
            message = f"{objective.type} hides parts of whole texts, and `{path}.prompt_key` is set"
            yield Problem(f"{path}.objective", message, f"Write `{path}.text_key` alone, or the objective seq2seq.")
        if isinstance(source, TokensData):
            if objective is not None and source.tokenizer is None:
                message = "there is none, and the objective adds special tokens"
                yield Problem(f"{path}.tokenizer", message, "Give the tokenizer.json that made the tokens.")
            elif objective is None:
                reason = "only objectives that add special tokens use it"
                yield from without_effect(path, source, ("tokenizer",), reason, "Leave it out.")


def only_causal_attention_is_spread_over_ranks(facts: RunFacts) -> Iterator[Problem]:
    """Context parallelism spreads rows whose tokens attend to earlier ones only."""
    model, cp = facts.config.model, facts.config.strategy.layout.cp
    if isinstance(model, HFConfig) and model.task != "causal-lm" and cp > 1:
        message = f"{cp}, but context parallelism is for causal attention, and `model.task` is {model.task}"
        yield Problem("strategy.layout.cp", message, "Leave it out.")


def a_contrastive_batch_is_the_same_everywhere(facts: RunFacts) -> Iterator[Problem]:
    """The loss compares all samples of a micro-batch over all ranks, so their number must not follow from the ranks."""
    config = facts.config
    if not isinstance(config.model, HFConfig) or config.model.task != "contrastive-image-text":
        return
    if config.batch.micro is not None and config.batch.total is not None:
        message = f"{config.batch.micro}: how many samples the contrastive loss compares would depend on the ranks"
        remedy = "Write `batch.accumulation` instead: total ÷ accumulation samples are compared."
        yield Problem("batch.micro", message, remedy)
    for path in _ROLES:
        data = getattr(config, path)
        if isinstance(data, ImageTextData) and not data.drop_last:
            message = "false, but the contrastive loss of a last, smaller batch would be another one"
            yield Problem(f"{path}.drop_last", message, "Write `true`.")
    pp, engine = config.strategy.layout.pp, config.strategy.engine_name
    if pp > 1:
        message = f"{pp}, but the contrastive loss compares what two encoders return"
        yield Problem("strategy.layout.pp", message, "Leave it out.")
    if engine != "native":
        message = f"{engine!r}, but the contrastive loss compares the samples of all ranks, which only native gathers"
        yield Problem("strategy.engine", message, "Write `native`.")


def sequences_fit_the_model(facts: RunFacts) -> Iterator[Problem]:
    """Sequences are at most as long as `model.seq_len`; a GPT has no position embedding beyond it."""
    model = facts.config.model
    for path, source in _sources(facts):
        if not isinstance(model, (GptConfig, LlamaConfig)) or not isinstance(source, TEXT_DATA):
            continue
        if source.seq_len > model.seq_len:
            message = f"{source.seq_len} is longer than `model.seq_len`, {model.seq_len}"
            yield Problem(f"{path}.seq_len", message, f"Write `{path}.seq_len: {model.seq_len}`, or a longer model.")


def trained_vocabulary_fits_the_model(facts: RunFacts) -> Iterator[Problem]:
    """Every token needs an embedding. Validation uses the training tokenizer."""
    model, tokenized = facts.config.model, text_sources("data", facts.config.data)
    if not isinstance(model, (GptConfig, LlamaConfig)) or not tokenized:
        return
    path, source = tokenized[0]
    if source.tokenizer is None and source.vocab_size > model.vocab_size:
        message = f"{source.vocab_size} tokens, but `model.vocab_size` is {model.vocab_size}"
        remedy = f"Write `{path}.vocab_size: {model.vocab_size}`."
        if model.vocab_size < SMALLEST_BPE:
            remedy = f"Write `model.vocab_size: {SMALLEST_BPE}` or more: one per byte, and the end token."
        yield Problem(f"{path}.vocab_size", message, remedy)


# Rules for `precision`.


_EARLIER = ("history", "headroom")
_DYNAMIC = ("initial_power", "window", "hysteresis", "consecutive_hysteresis", "minimum")


def scaler_needs_fp16(facts: RunFacts) -> Iterator[Problem]:
    """Only fp16 needs loss scaling."""
    precision = facts.config.precision
    if precision.compute != "fp16":
        reason = f"the loss is scaled only in fp16, and `precision.compute` is {precision.compute}"
        remedy = "Leave it out, or write `precision.compute: fp16`."
        yield from without_effect("precision.scaler", precision.scaler, ("static", *_DYNAMIC), reason, remedy)


def static_scale_does_not_move(facts: RunFacts) -> Iterator[Problem]:
    """A `static` scale does not change."""
    precision = facts.config.precision
    if precision.compute == "fp16" and precision.scaler.static is not None:
        reason = f"`precision.scaler.static` fixes the scale at {precision.scaler.static:g}"
        yield from without_effect("precision.scaler", precision.scaler, _DYNAMIC, reason, "Leave one of the two out.")


def fp16_reduction_needs_fp16(facts: RunFacts) -> Iterator[Problem]:
    """Without loss scaling, sums in fp16 overflow or underflow."""
    precision = facts.config.precision
    if precision.reduce == "fp16" and precision.compute != "fp16":
        message = f"fp16 needs the loss scale of `precision.compute: fp16`, but that is {precision.compute}"
        choice = "fp32" if precision.compute in ("fp32", "tf32") else "bf16` or `fp32"
        yield Problem("precision.reduce", message, f"Write `{choice}`.")


def master_weights_are_a_choice_in_half_precision(facts: RunFacts) -> Iterator[Problem]:
    """In fp32 the weights are their own master copy."""
    precision = facts.config.precision
    if not precision.master and precision.compute in ("fp32", "tf32"):
        message = f"false has no effect: with `precision.compute: {precision.compute}` the weights are fp32 themselves"
        yield Problem("precision.master", message, "Leave it out, or write `precision.compute: bf16`.")


def fp8_stands_on_bf16(facts: RunFacts) -> Iterator[Problem]:
    """Everything but the 8-bit products is computed in bf16, and layers must not be sharded."""
    precision, strategy = facts.config.precision, facts.config.strategy
    if precision.fp8.recipe == "none":
        reason = "`precision.fp8.recipe` is none"
        names = ("modules", "skip", "scales", *_EARLIER, "head", "emulate")
        yield from without_effect("precision.fp8", precision.fp8, names, reason, "Leave it out.")
        return
    if precision.compute != "bf16":
        message = f"8-bit products need bf16, but `precision.compute` is {precision.compute}"
        yield Problem("precision.fp8", message, "Write `precision.compute: bf16`.")
    if strategy.layout.tp > 1:
        message = f"8-bit products do not support tensor parallelism, but `strategy.layout.tp` is {strategy.layout.tp}"
        yield Problem("precision.fp8", message, "Write `precision: bf16`, or `strategy.layout.tp: 1`.")


def earlier_scales_are_one_a_tensor(facts: RunFacts) -> Iterator[Problem]:
    """Scales of earlier steps are one per tensor, and kernels record them."""
    fp8, strategy = facts.config.precision.fp8, facts.config.strategy
    if fp8.recipe == "none":
        return
    if fp8.scales == "now":
        reason = "`precision.fp8.scales` is now"
        remedy = "Leave it out, or write `precision.fp8.scales: earlier`."
        yield from without_effect("precision.fp8", fp8, _EARLIER, reason, remedy)
        return
    if fp8.recipe == "rowwise":
        message = "earlier keeps one scale per tensor, but `precision.fp8.recipe` is rowwise"
        yield Problem("precision.fp8.scales", message, "Leave it out, or write `precision.fp8.recipe: tensorwise`.")
    if strategy.compile.enabled:
        message = "earlier: compiled layers compute their scales at once"
        yield Problem("precision.fp8.scales", message, "Leave out `strategy.compile`, or write `now`.")


def fp8_head_makes_the_loss(facts: RunFacts) -> Iterator[Problem]:
    """A head has a backward pass in 8 bits where it goes straight to the loss; where logits are wanted it does not."""
    config = facts.config
    if config.precision.fp8.head and config.phase not in (None, "sft"):
        message = f"true has no effect: phase {config.phase} computes its loss from logits"
        yield Problem("precision.fp8.head", message, "Leave it out.")


# Rules for `train`, `optim`, `schedule`, `checkpoint`, `log` and `hooks`.


def one_length(facts: RunFacts) -> Iterator[Problem]:
    """A run ends after epochs or after steps."""
    train = facts.config.train
    if train.max_epochs is not None and train.max_steps is not None:
        message = f"{train.max_steps}, but `train.max_epochs` is set too, to {train.max_epochs}"
        yield Problem("train.max_steps", message, "Leave one of the two out.")
    if facts.require_length and train.max_epochs is None and train.max_steps is None:
        message = "the run has no length: `max_epochs` or `max_steps` must be set"
        yield Problem("train", message, "Write `train.max_epochs` or `train.max_steps`.")


def counting_fits_the_length(facts: RunFacts) -> Iterator[Problem]:
    """`by_epoch` follows from the length, and may not contradict it."""
    train = facts.config.train
    lengths = {True: train.max_epochs, False: train.max_steps}
    if train.by_epoch is None or lengths[train.by_epoch] is not None:
        return
    other = "max_steps" if train.by_epoch else "max_epochs"
    if lengths[not train.by_epoch] is not None:
        message = f"{show(train.by_epoch)}, but the length is given as `train.{other}: {lengths[not train.by_epoch]}`"
        right = "max_epochs" if train.by_epoch else "max_steps"
        yield Problem("train.by_epoch", message, f"Leave it out, or give the length as `train.{right}`.")


def one_way_to_clip(facts: RunFacts) -> Iterator[Problem]:
    """Gradients are clipped by their norm or one by one."""
    train = facts.config.train
    if train.clip_norm is not None and train.clip_value is not None:
        message = f"{train.clip_value:g}, but `train.clip_norm` is set too, to {train.clip_norm:g}"
        yield Problem("train.clip_value", message, "Leave one of the two out.")


def measuring_needs_validation_data(facts: RunFacts) -> Iterator[Problem]:
    """What is decided by validation needs validation data."""
    if facts.has_val:
        return
    reason, remedy = "it needs validation data", "Leave it out, or add `val_data`."
    config = facts.config
    yield from without_effect("train", config.train, ("val_every", "val_batches"), reason, remedy)
    if config.checkpoint.best is not None:
        yield Problem("checkpoint.best", "needs validation data", remedy)
    for index, hook in enumerate(config.hooks):
        if isinstance(hook, EarlyStopConfig):
            yield Problem(f"hooks.{index}", "early_stop needs validation data", remedy)


def going_back_needs_checkpoints(facts: RunFacts) -> Iterator[Problem]:
    """There must be a checkpoint to roll back to, also where the newest was saved after the spike."""
    config = facts.config
    for index, hook in enumerate(config.hooks):
        if not isinstance(hook, RollbackConfig):
            continue
        path = f"hooks.{index}"
        if config.checkpoint.every is None:
            message = "rollback needs checkpoints, but `checkpoint.every` is not set"
            yield Problem(path, message, "Write `checkpoint.every`, or leave the hook out.")
        elif config.checkpoint.keep < 2:
            message = "rollback may need the second-newest checkpoint, but `checkpoint.keep` is 1"
            yield Problem(path, message, "Write `checkpoint.keep: 2`, or more.")
        if config.phase in ONLINE:
            message = f"rollback continues with the next data, but in phase {config.phase} the model generates its data"
            yield Problem(path, message, "Leave it out.")


def nesterov_needs_momentum(facts: RunFacts) -> Iterator[Problem]:
    """Nesterov's step looks ahead along the momentum."""
    optim = facts.config.optim
    if isinstance(optim, SGDConfig) and optim.nesterov and optim.momentum == 0:
        message = "true looks ahead along the momentum, but `optim.momentum` is 0"
        yield Problem("optim.nesterov", message, "Write `optim.momentum: 0.9`, or leave it out.")


def a_cycle_of_momentum_needs_momentum(facts: RunFacts) -> Iterator[Problem]:
    """OneCycle can cycle the momentum, where the optimizer has one."""
    schedule, optim = facts.config.schedule, facts.config.optim
    if not getattr(schedule, "cycle_momentum", False) or hasattr(optim, "betas") or getattr(optim, "momentum", 0) > 0:
        return
    message = f"true, but {optim.type} has no momentum here"
    remedy = "Write `optim.momentum`, or `false`." if hasattr(optim, "momentum") else "Leave it out."
    yield Problem("schedule.cycle_momentum", message, remedy)


def warmup_start_needs_warmup(facts: RunFacts) -> Iterator[Problem]:
    """A start factor needs a warm-up."""
    schedule = facts.config.schedule
    if schedule is not None and getattr(schedule, "warmup", None) == 0:
        remedy = "Leave it out, or write `schedule.warmup`."
        yield from without_effect("schedule", schedule, ("warmup_start_factor",), "`schedule.warmup` is 0", remedy)


def wandb_project_needs_wandb(facts: RunFacts) -> Iterator[Problem]:
    """The project belongs to the wandb sink."""
    log = facts.config.log
    if "wandb" not in log.sinks:
        listed = ", ".join([*(str(getattr(sink, "type", sink)) for sink in log.sinks), "wandb"])
        remedy = f"Leave it out, or write `log.sinks: [{listed}]`."
        yield from without_effect("log", log, ("wandb_project",), "`log.sinks` has no wandb", remedy)


def a_profile_fits_into_the_run(facts: RunFacts) -> Iterator[Problem]:
    """The recorded steps must be within the run."""
    profile, steps = facts.config.profile, facts.config.train.max_steps
    if profile is None or steps is None:
        return
    last = profile.start + profile.steps - 1
    if last > steps:
        message = f"{profile.start}, so steps up to {last} are recorded, but `train.max_steps` is {steps}"
        latest = steps - profile.steps + 1
        start = f"Write `profile.start: {latest}` or less." if latest >= EARLIEST else ""
        yield Problem("profile.start", message, start or f"Write `train.max_steps: {last}` or more.")


def skips_are_counted_by_the_guard(facts: RunFacts) -> Iterator[Problem]:
    """Without the guard no step is skipped, except overflows in fp16."""
    config = facts.config
    if not config.train.guard.enabled and config.precision.compute != "fp16" and config.strategy.engine == "native":
        reason = "`train.guard.enabled` is false, so no step is skipped"
        yield from without_effect(
            "train.guard", config.train.guard, ("max_skips",), reason, "Leave one of the two out."
        )
