"""Rules for `strategy`, and for `device` and `backend`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.posttrain import ONLINE
from plait.config.rules.facts import RunFacts, keys_set, without_effect
from plait.config.run import RunConfig
from plait.config.text import listed, show
from plait.errors import ConfigError, Problem

# Rules for `strategy.offload`.


_PATH = "strategy.offload"


def options_need_a_tier(facts: RunFacts) -> Iterator[Problem]:
    """Each option belongs to a tier."""
    offload = facts.config.strategy.offload
    if not offload.on:
        reason = "nothing is offloaded (`strategy.offload.optimizer` is none)"
        need_a_tier = ("bucket_mb", "ratio", "delayed", "update")
        yield from without_effect(_PATH, offload, need_a_tier, reason, "Leave it out, or write `optimizer: cpu`.")
    if offload.optimizer != "nvme":
        reason = f"`{_PATH}.optimizer` is {offload.optimizer}"
        yield from without_effect(
            _PATH, offload, ("budget_gib", "host_ratio"), reason, "Leave it out, or write `optimizer: nvme`."
        )
    if not offload.uses_files:
        yield from without_effect(
            _PATH, offload, ("path",), "nothing lies in files", "Leave it out, or use the tier nvme."
        )
    if offload.params == "none":
        names = ("prefetch_params", "live_params", "persistent_params")
        yield from without_effect(
            _PATH, offload, names, f"`{_PATH}.params` is none", "Leave it out, or write `params: cpu`."
        )


def params_need_stage_three(facts: RunFacts) -> Iterator[Problem]:
    """Below stage 3 weights stay whole on the device between their uses."""
    strategy = facts.config.strategy
    offload = strategy.offload
    if offload.params == "none":
        return
    if strategy.stage != 3:
        message = f"{offload.params} needs stage 3: at stage {strategy.stage} the weights stay on the device"
        yield Problem(f"{_PATH}.params", message, "Write `strategy.zero: 3`, or leave it out.")
    if not offload.on:
        message = f"{offload.params}, but the optimizer is to be on the device, and would have to fetch every weight"
        yield Problem(f"{_PATH}.params", message, f"Write `{_PATH}.optimizer: cpu` (or `nvme`) too.")


def optimizer_works_by_element(facts: RunFacts) -> Iterator[Problem]:
    """A bucket is updated without looking at the rest, nor at other ranks."""
    config = facts.config
    if config.strategy.offload.on and config.optim.elementwise is False:
        message = f"{config.optim.type} looks at whole parameters, but an offloaded one is updated in parts"
        yield Problem("optim.type", message, f"Use AdamW, Adam, Lion, SGD or Adagrad, or leave out `{_PATH}`.")


def shares_leave_something(facts: RunFacts) -> Iterator[Problem]:
    """Shares on the device and in host memory that leave nothing for files."""
    offload = facts.config.strategy.offload
    if offload.share + offload.host_ratio >= 1.0:
        message = f"{offload.host_ratio:g} and `{_PATH}.ratio: {offload.share:g}` leave nothing for files"
        yield Problem(f"{_PATH}.host_ratio", message, "Make one of them smaller, or write `optimizer: cpu`.")


def a_share_needs_weights_on_the_device(facts: RunFacts) -> Iterator[Problem]:
    """The share that is updated on the device must be there; with `params` all weights live on the host."""
    offload = facts.config.strategy.offload
    if offload.params != "none" and offload.ratio != 0:
        message = f"{offload.ratio}, but with `{_PATH}.params: {offload.params}` no weight lives on the device"
        yield Problem(f"{_PATH}.ratio", message, "Leave one of the two out.")


def delay_is_for_all(facts: RunFacts) -> Iterator[Problem]:
    """What stays on the device is updated at once, so a delay would be one for some weights only."""
    offload = facts.config.strategy.offload
    if offload.delayed and offload.ratio != 0:
        message = f"true, but `{_PATH}.ratio` keeps a share on the device, where updates are never late"
        yield Problem(f"{_PATH}.delayed", message, "Leave one of the two out.")


def a_device_updates_its_own_weights_at_once(facts: RunFacts) -> Iterator[Problem]:
    """What the device updates is the model's at once, and on the device."""
    offload = facts.config.strategy.offload
    if offload.update != "device":
        return
    if offload.delayed:
        message = (
            f"device, but `{_PATH}.delayed` has updates wait for the next step, and the device has no room for that"
        )
        yield Problem(f"{_PATH}.update", message, "Write `update: cpu`, or leave one of the two out.")
    if offload.params != "none":
        message = f"device, but with `{_PATH}.params: {offload.params}` the new weights belong to the host"
        yield Problem(f"{_PATH}.update", message, "Write `update: cpu`, or leave one of the two out.")


def files_are_saved_in_the_foreground(facts: RunFacts) -> Iterator[Problem]:
    """Saving in the background copies all state to host memory first, which is what files are to spare."""
    config = facts.config
    if config.strategy.offload.optimizer == "nvme" and config.checkpoint.async_save:
        message = f"true copies the state to host memory first, but `{_PATH}.optimizer: nvme` keeps it out of there"
        yield Problem("checkpoint.async_save", message, "Leave it out.")


OFFLOAD_RULES = (
    options_need_a_tier,
    params_need_stage_three,
    optimizer_works_by_element,
    shares_leave_something,
    a_share_needs_weights_on_the_device,
    delay_is_for_all,
    a_device_updates_its_own_weights_at_once,
    files_are_saved_in_the_foreground,
)

# Whether forward and backward pass are recorded (`strategy.graphs`): what stands against it, and who decides.


REPEATING = ("gpt", "llama", "resnet")
"""Described models whose Python does the same in every step. `auto` records no others."""


def capture_obstacles(config: RunConfig) -> Iterator[str]:
    """What a recording cannot go with: it does what it did the first time, on the device alone."""
    strategy, fp8 = config.strategy, config.precision.fp8
    if strategy.engine != "native":
        yield f"cannot go with engine {strategy.engine_name}, which has passes of its own"
    if strategy.offload.on or strategy.offload.activations != "none":
        yield "cannot go with `strategy.offload`: the host has a part in every pass"
    if strategy.recompute.mode != "none" or strategy.tiles.names:
        yield (
            "cannot go with `strategy.recompute` or `strategy.tiles`: torch keeps the random state of what is computed "
            "again, which it cannot while it records"
        )
    if fp8.recipe != "none" and fp8.scales == "earlier":
        yield "cannot go with `precision.fp8.scales: earlier`, whose scales are others in every step"
    if strategy.compile.mode in ("reduce-overhead", "max-autotune"):
        yield f"cannot go with `strategy.compile.mode: {strategy.compile.mode}`, which records by itself"
    if config.phase in ONLINE:
        yield f"cannot go with phase {config.phase}, whose loop calls the model by itself"
    if config.profile:
        yield "leaves `profile` nothing to look at: a recording has no operators and no modules"


def check_graphs(config: RunConfig, *, ranks: int, accumulation: int, whole_steps: bool = True) -> None:
    """Refuse to record what is no step of one process and one micro-batch; `whole_steps`: who trains asks for such."""
    if config.strategy.graphs is not True:
        return
    if ranks > 1:
        _refuse(f"records the passes of one process, and there are {ranks}", "Start one process")
    if accumulation > 1:
        message = f"records steps of one micro-batch, and a step has {accumulation}: a pass would have to add to others"
        _refuse(message, "Write `batch.accumulation: 1`")
    if not whole_steps:
        _refuse("records both passes of a step as one, and this loop asks for them one by one", "Train with a Runner")


def can_capture(config: RunConfig, *, ranks: int, accumulation: int, described: bool) -> bool:
    """Whether a step could be recorded that nobody asked to: `auto` does it where the device waits for Python.

    `described`: the model is the one of `config.model`, and not an object of the user's.
    """
    return (
        config.strategy.graphs == "auto"
        and described
        and config.model is not None
        and config.model.type in REPEATING
        and config.train.loss is None
        and config.phase is None
        and not config.deterministic  # when a recording begins is a matter of time
        and ranks == accumulation == 1
        and not any(capture_obstacles(config))
    )


def resolve_graphs(config: RunConfig, *, ranks: int, accumulation: int, described: bool) -> RunConfig:
    """The same with `true` or `false` in place of `auto`, for a plan: recorded, or the device does not wait."""
    if config.strategy.graphs != "auto":
        return config
    records = can_capture(config, ranks=ranks, accumulation=accumulation, described=described)
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"graphs": records})})


def _refuse(message: str, remedy: str) -> None:
    raise ConfigError(Problem("strategy.graphs", f"true {message}", f"{remedy}, or leave it out."))


_DEVICE_OF = {"nccl": "cuda", "xccl": "xpu"}


def zero_and_sharding_agree(facts: RunFacts) -> Iterator[Problem]:
    """`zero` and `sharding` are two words for one thing."""
    strategy = facts.config.strategy
    if strategy.zero is not None and strategy.sharding is not None and strategy.zero != strategy.stage:
        message = (
            f"{strategy.sharding} is stage {strategy.stage}, but `strategy.zero` is {strategy.zero}; "
            "both name the ZeRO stage"
        )
        remedy = f"Leave one of them out, or write `strategy.zero: {strategy.stage}`."
        yield Problem("strategy.sharding", message, remedy)


def sharding_options_need_sharding(facts: RunFacts) -> Iterator[Problem]:
    """At stage 0 every rank has everything: there is nothing to reshard or to fetch ahead."""
    strategy = facts.config.strategy
    if strategy.stage > 0:
        return
    asked = keys_set(strategy, "reshard_after_forward")
    asked += [name for name in ("forward_prefetch", "backward_prefetch") if getattr(strategy, name) > 0]
    for name in asked:
        message = f"{show(getattr(strategy, name))} has no effect: at stage 0 nothing is sharded"
        yield Problem(f"strategy.{name}", message, "Leave it out, or write `strategy.zero: 3`.")


def reshard_fits_the_stage(facts: RunFacts) -> Iterator[Problem]:
    """Whether parameters are resharded after the forward pass is what tells stage 3 from 1 and 2."""
    strategy = facts.config.strategy
    reshard, stage = strategy.reshard_after_forward, strategy.stage
    if reshard is None or stage == 0:
        return
    keeps = reshard is False or (reshard is not True and reshard == 1)  # a group of one is no sharding
    if stage == 3 and keeps:
        message = f"{show(reshard)} keeps parameters whole after the forward pass: that is stage 2, this is stage 3"
        yield Problem("strategy.reshard_after_forward", message, "Write `strategy.zero: 2`, or leave it out.")
    if stage < 3 and not keeps:
        message = f"{show(reshard)} reshards parameters after the forward pass: that is stage 3, this is stage {stage}"
        yield Problem("strategy.reshard_after_forward", message, "Write `strategy.zero: 3`, or leave it out.")


def buckets_are_for_replicas(facts: RunFacts) -> Iterator[Problem]:
    """Sharded gradients are reduced unit by unit, not in buckets."""
    strategy = facts.config.strategy
    if strategy.stage > 0:
        reason = f"at stage {strategy.stage} gradients are reduced by unit (`strategy.wrap`), not in buckets"
        yield from without_effect("strategy", strategy, ("bucket_mb",), reason, "Leave it out.")


def sharded_layout_needs_sharding(facts: RunFacts) -> Iterator[Problem]:
    """A `dp_shard` axis at stage 0 would have nothing to do."""
    strategy = facts.config.strategy
    shards = strategy.layout.dp_shard or 1
    if shards > 1 and strategy.stage == 0:
        message = f"{shards} ranks are to share the model, but at stage 0 nothing is sharded"
        remedy = "Write `strategy.zero: 1`, `2` or `3`, or use `strategy.layout.dp_replicate`."
        yield Problem("strategy.layout.dp_shard", message, remedy)


def options_need_their_axis(facts: RunFacts) -> Iterator[Problem]:
    """Options of an axis of one rank have nothing to act on."""
    strategy = facts.config.strategy
    for section, axis in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp")):
        if getattr(strategy.layout, axis) == 1:
            options = getattr(strategy, section)
            reason = f"`strategy.layout.{axis}` is 1"
            remedy = f"Leave it out, or write `strategy.layout.{axis}: 2`."
            yield from without_effect(f"strategy.{section}", options, tuple(type(options).model_fields), reason, remedy)


def micro_batches_are_accumulation(facts: RunFacts) -> Iterator[Problem]:
    """`pipeline.micro_batches` and `batch.accumulation` are two words for one number."""
    micro_batches, accumulation = facts.config.strategy.pipeline.micro_batches, facts.config.batch.accumulation
    if micro_batches is not None and accumulation is not None and micro_batches != accumulation:
        message = f"{micro_batches}, but `batch.accumulation` is {accumulation}; both are the micro-batches of a step"
        yield Problem("strategy.pipeline.micro_batches", message, "Leave one of them out.")


def async_tensor_parallel_needs_compile(facts: RunFacts) -> Iterator[Problem]:
    """The compiler is what puts collectives and matrix products into one kernel."""
    strategy = facts.config.strategy
    if strategy.tensor.async_tp and not strategy.compile.enabled:
        message = "true needs `strategy.compile`: it is the compiler that overlaps collectives with matrix products"
        yield Problem("strategy.tensor.async_tp", message, "Write `strategy.compile: true`, or leave it out.")


def compiled_tensor_parallel_keeps_activations(facts: RunFacts) -> Iterator[Problem]:
    """A block that is cut over ranks, compiled and recomputed at once fails inside torch."""
    strategy = facts.config.strategy
    if strategy.layout.tp > 1 and strategy.compile.enabled and strategy.recompute.mode != "none":
        message = f"{strategy.recompute.mode} cannot go with `strategy.compile` where `layout.tp` is more than 1"
        remedy = "Leave one of the three out: torch fails on blocks with all of them."
        yield Problem("strategy.recompute.mode", message, remedy)


def tiles_need_layers(facts: RunFacts) -> Iterator[Problem]:
    """A size of tiles is for the layers that are named."""
    tiling = facts.config.strategy.tiles
    if not tiling.names:
        remedy = "Leave it out, or name layers: `names: [blocks.*.ffn]`."
        yield from without_effect(
            "strategy.tiles", tiling, ("tokens",), "no layer is named in `strategy.tiles.names`", remedy
        )


def recompute_options_fit_the_mode(facts: RunFacts) -> Iterator[Problem]:
    """Each option of `recompute` belongs to one mode."""
    recompute = facts.config.strategy.recompute
    for name, mode in (("every", "every"), ("save_ops", "selective"), ("budget_gib", "auto")):
        if recompute.mode != mode:
            reason = f"`strategy.recompute.mode` is {recompute.mode}, and this belongs to {mode}"
            remedy = f"Leave it out, or write `mode: {mode}`."
            yield from without_effect("strategy.recompute", recompute, (name,), reason, remedy)


def compile_options_need_compile(facts: RunFacts) -> Iterator[Problem]:
    """Options of a compiler that is off."""
    section = facts.config.strategy.compile
    if not section.enabled:
        names = ("scope", "backend", "mode", "dynamic", "fullgraph")
        reason = "`strategy.compile.enabled` is false"
        yield from without_effect("strategy.compile", section, names, reason, "Leave it out, or write `enabled: true`.")


def recorded_passes_repeat_themselves(facts: RunFacts) -> Iterator[Problem]:
    """A recording does what it did the first time, on the device alone."""
    if facts.config.strategy.graphs is True:
        for reason in capture_obstacles(facts.config):
            yield Problem("strategy.graphs", f"true {reason}", "Leave one of the two out.")


def wrap_needs_a_use(facts: RunFacts) -> Iterator[Problem]:
    """Units are made to be sharded, waited for, recomputed or compiled one by one."""
    strategy = facts.config.strategy
    by_block = strategy.compile.enabled and strategy.compile.scope == "block"
    if strategy.stage > 0 or strategy.recompute.mode != "none" or by_block or strategy.offload.on:
        return
    reason = "nothing is sharded, offloaded, recomputed or compiled by block"
    remedy = "Leave it out, or ask for one of them, for example with `strategy.zero: 3`."
    names = tuple(name for name in ("classes", "names", "min_params") if getattr(strategy.wrap, name))
    yield from without_effect("strategy.wrap", strategy.wrap, names, reason, remedy)


def backend_fits_the_device(facts: RunFacts) -> Iterator[Problem]:
    """NCCL speaks between CUDA devices, XCCL between XPUs, and neither elsewhere."""
    device, backend = facts.config.device, facts.config.backend
    needed = _DEVICE_OF.get(backend, device)
    if device not in ("auto", needed):
        others = [name for name in ("auto", "gloo") if name != backend]
        message = f"{backend} needs `device: {needed}`, but `device` is {device}"
        yield Problem("backend", message, f"Write {listed([f'`backend: {name}`' for name in others], 'or')}.")


STRATEGY_RULES = (
    zero_and_sharding_agree,
    sharding_options_need_sharding,
    reshard_fits_the_stage,
    buckets_are_for_replicas,
    sharded_layout_needs_sharding,
    options_need_their_axis,
    micro_batches_are_accumulation,
    async_tensor_parallel_needs_compile,
    compiled_tensor_parallel_keeps_activations,
    tiles_need_layers,
    recompute_options_fit_the_mode,
    compile_options_need_compile,
    recorded_passes_repeat_themselves,
    wrap_needs_a_use,
    backend_fits_the_device,
)
