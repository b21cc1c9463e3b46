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
    """Below stage 3 full weights stay on the device between their uses."""
    strategy = facts.config.strategy
    offload = strategy.offload
    if offload.params == "none":
        return
    if strategy.stage != 3:
        message = f"{offload.params} needs stage 3: at stage {strategy.stage} the weights stay on the device"
        yield Problem(f"{_PATH}.params", message, "Write `strategy.zero: 3`, or leave it out.")
    if not offload.on:
        message = f"{offload.params}, but `{_PATH}.optimizer` is none, and its update on the device needs the weights"
        yield Problem(f"{_PATH}.params", message, f"Write `{_PATH}.optimizer: cpu` (or `nvme`) too.")


def optimizer_works_by_element(facts: RunFacts) -> Iterator[Problem]:
    """A bucket is updated by itself, without other parameters and other ranks."""
    config = facts.config
    if config.strategy.offload.on and config.optim.elementwise is False:
        message = f"{config.optim.type} needs full parameters, but an offloaded optimizer updates parts of them"
        yield Problem("optim.type", message, f"Use AdamW, Adam, Lion, SGD or Adagrad, or leave out `{_PATH}`.")


def shares_leave_something(facts: RunFacts) -> Iterator[Problem]:
    """The shares on the device and in host memory leave something for files."""
    offload = facts.config.strategy.offload
    if offload.share + offload.host_ratio >= 1.0:
        message = f"{offload.host_ratio:g} and `{_PATH}.ratio: {offload.share:g}` leave nothing for files"
        yield Problem(f"{_PATH}.host_ratio", message, "Make one of them smaller, or write `optimizer: cpu`.")


def a_share_needs_weights_on_the_device(facts: RunFacts) -> Iterator[Problem]:
    """The share that is updated on the device must be there; with `params` all weights are on the host."""
    offload = facts.config.strategy.offload
    if offload.params != "none" and offload.ratio != 0:
        message = f"{offload.ratio}, but with `{_PATH}.params: {offload.params}` no weight stays on the device"
        yield Problem(f"{_PATH}.ratio", message, "Leave one of the two out.")


def delay_is_for_all(facts: RunFacts) -> Iterator[Problem]:
    """What stays on the device is updated at once, so only some weights would be delayed."""
    offload = facts.config.strategy.offload
    if offload.delayed and offload.ratio != 0:
        message = f"true, but `{_PATH}.ratio` keeps a share on the device, where updates cannot be delayed"
        yield Problem(f"{_PATH}.delayed", message, "Leave one of the two out.")


def a_device_updates_its_own_weights_at_once(facts: RunFacts) -> Iterator[Problem]:
    """Weights that the device updates are used at once, and stay on the device."""
    offload = facts.config.strategy.offload
    if offload.update != "device":
        return
    if offload.delayed:
        message = f"device, but `{_PATH}.delayed` keeps updates for the next step, which needs host memory"
        yield Problem(f"{_PATH}.update", message, "Write `update: cpu`, or leave one of the two out.")
    if offload.params != "none":
        message = f"device, but with `{_PATH}.params: {offload.params}` the weights are on the host"
        yield Problem(f"{_PATH}.update", message, "Write `update: cpu`, or leave one of the two out.")


def files_are_saved_in_the_foreground(facts: RunFacts) -> Iterator[Problem]:
    """Asynchronous saving copies all state to host memory first, which the nvme tier is to avoid."""
    config = facts.config
    if config.strategy.offload.optimizer == "nvme" and config.checkpoint.async_save:
        message = f"true copies the state to host memory, which `{_PATH}.optimizer: nvme` avoids"
        yield Problem("checkpoint.async_save", message, "Leave it out.")


# Whether forward and backward pass are captured as a CUDA graph (`strategy.graphs`), and what prevents it.


REPEATING = ("gpt", "llama", "resnet")
"""Models whose Python code does the same in every step. `auto` captures no others."""


def capture_obstacles(config: RunConfig) -> Iterator[str]:
    """Yield why a graph cannot be captured: it replays the same kernels, on the device alone."""
    strategy, fp8 = config.strategy, config.precision.fp8
    if strategy.engine != "native":
        yield f"cannot be combined with engine {strategy.engine_name}, which runs its own passes"
    if strategy.offload.on or strategy.offload.activations != "none":
        yield "cannot be combined with `strategy.offload`, which uses the host in every pass"
    if strategy.recompute.mode != "none" or strategy.tiles.names:
        yield (
            "cannot be combined with `strategy.recompute` or `strategy.tiles`: torch saves the random state for "
            "recomputation, which it cannot during capture"
        )
    if fp8.recipe != "none" and fp8.scales == "earlier":
        yield "cannot be combined with `precision.fp8.scales: earlier`, whose scales change in every step"
    if strategy.compile.mode in ("reduce-overhead", "max-autotune"):
        yield f"cannot be combined with `strategy.compile.mode: {strategy.compile.mode}`, which captures graphs itself"
    if config.phase in ONLINE:
        yield f"cannot be combined with phase {config.phase}, whose loop calls the model itself"
    if config.profile:
        yield "cannot be combined with `profile`: the replay of a graph has no operators and no modules"


def check_graphs(config: RunConfig, *, ranks: int, accumulation: int, whole_steps: bool = True) -> None:
    """Refuse to capture other steps than those of one process and one micro-batch.

    `whole_steps`: the training loop calls whole steps, not single passes.
    """
    if config.strategy.graphs is not True:
        return
    if ranks > 1:
        _refuse(f"captures the passes of one process, and there are {ranks}", "Start one process")
    if accumulation > 1:
        message = f"captures steps of one micro-batch, and a step has {accumulation}"
        _refuse(message, "Write `batch.accumulation: 1`")
    if not whole_steps:
        _refuse("captures both passes of a step together, and this loop calls them one by one", "Train with a Runner")


def can_capture(config: RunConfig, *, ranks: int, accumulation: int, described: bool) -> bool:
    """Whether `auto` may capture the step of this run, once the device is seen to wait for Python.

    `described`: the model is the one of `config.model`, not an object of the user's.
    """
    return (
        config.strategy.graphs == "auto"
        and described
        and config.model is not None
        and config.model.type in REPEATING
        and config.train.loss is None
        and config.phase is None
        and not config.deterministic  # not deterministic: when the capture begins depends on timing
        and ranks == accumulation == 1
        and not any(capture_obstacles(config))
    )


def resolve_graphs(config: RunConfig, *, ranks: int, accumulation: int, described: bool) -> RunConfig:
    """Return the run with `true` or `false` in place of `auto`, for a plan."""
    if config.strategy.graphs != "auto":
        return config
    records = can_capture(config, ranks=ranks, accumulation=accumulation, described=described)
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"graphs": records})})


def _refuse(message: str, remedy: str) -> None:
    raise ConfigError(Problem("strategy.graphs", f"true {message}", f"{remedy}, or leave it out."))


_DEVICE_OF = {"nccl": "cuda", "xccl": "xpu"}


def zero_and_sharding_agree(facts: RunFacts) -> Iterator[Problem]:
    """`zero` and `sharding` both name the ZeRO stage."""
    strategy = facts.config.strategy
    if strategy.zero is not None and strategy.sharding is not None and strategy.zero != strategy.stage:
        message = (
            f"{strategy.sharding} is stage {strategy.stage}, but `strategy.zero` is {strategy.zero}; "
            "both name the ZeRO stage"
        )
        remedy = f"Leave one of them out, or write `strategy.zero: {strategy.stage}`."
        yield Problem("strategy.sharding", message, remedy)


def sharding_options_need_sharding(facts: RunFacts) -> Iterator[Problem]:
    """At stage 0 nothing is sharded, so nothing is resharded or prefetched."""
    strategy = facts.config.strategy
    if strategy.stage > 0:
        return
    asked = keys_set(strategy, "reshard_after_forward")
    asked += [name for name in ("forward_prefetch", "backward_prefetch") if getattr(strategy, name) > 0]
    for name in asked:
        message = f"{show(getattr(strategy, name))} has no effect: at stage 0 nothing is sharded"
        yield Problem(f"strategy.{name}", message, "Leave it out, or write `strategy.zero: 3`.")


def reshard_fits_the_stage(facts: RunFacts) -> Iterator[Problem]:
    """Stage 3 reshards parameters after the forward pass, stages 1 and 2 do not."""
    strategy = facts.config.strategy
    reshard, stage = strategy.reshard_after_forward, strategy.stage
    if reshard is None or stage == 0:
        return
    keeps = reshard is False or (reshard is not True and reshard == 1)  # a group of one rank does not shard
    if stage == 3 and keeps:
        message = f"{show(reshard)} keeps full parameters after the forward pass as stage 2, but this is stage 3"
        yield Problem("strategy.reshard_after_forward", message, "Write `strategy.zero: 2`, or leave it out.")
    if stage < 3 and not keeps:
        message = f"{show(reshard)} reshards parameters after the forward pass as stage 3, but this is stage {stage}"
        yield Problem("strategy.reshard_after_forward", message, "Write `strategy.zero: 3`, or leave it out.")


def buckets_are_for_replicas(facts: RunFacts) -> Iterator[Problem]:
    """Sharded gradients are reduced per wrap unit, not in buckets."""
    strategy = facts.config.strategy
    if strategy.stage > 0:
        reason = f"at stage {strategy.stage} gradients are reduced by unit (`strategy.wrap`), not in buckets"
        yield from without_effect("strategy", strategy, ("bucket_mb",), reason, "Leave it out.")


def sharded_layout_needs_sharding(facts: RunFacts) -> Iterator[Problem]:
    """A `dp_shard` axis has no effect at stage 0."""
    strategy = facts.config.strategy
    shards = strategy.layout.dp_shard or 1
    if shards > 1 and strategy.stage == 0:
        message = f"{shards}, but at stage 0 nothing is sharded"
        remedy = "Write `strategy.zero: 1`, `2` or `3`, or use `strategy.layout.dp_replicate`."
        yield Problem("strategy.layout.dp_shard", message, remedy)


def options_need_their_axis(facts: RunFacts) -> Iterator[Problem]:
    """Options of an axis have no effect where it has one rank."""
    strategy = facts.config.strategy
    for section, axis in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp")):
        if getattr(strategy.layout, axis) == 1:
            options = getattr(strategy, section)
            reason = f"`strategy.layout.{axis}` is 1"
            remedy = f"Leave it out, or write `strategy.layout.{axis}: 2`."
            yield from without_effect(f"strategy.{section}", options, tuple(type(options).model_fields), reason, remedy)


def micro_batches_are_accumulation(facts: RunFacts) -> Iterator[Problem]:
    """`pipeline.micro_batches` and `batch.accumulation` are the same number."""
    micro_batches, accumulation = facts.config.strategy.pipeline.micro_batches, facts.config.batch.accumulation
    if micro_batches is not None and accumulation is not None and micro_batches != accumulation:
        message = f"{micro_batches}, but `batch.accumulation` is {accumulation}; both are the micro-batches per step"
        yield Problem("strategy.pipeline.micro_batches", message, "Leave one of them out.")


def async_tensor_parallel_needs_compile(facts: RunFacts) -> Iterator[Problem]:
    """The compiler overlaps collectives with matrix products."""
    strategy = facts.config.strategy
    if strategy.tensor.async_tp and not strategy.compile.enabled:
        message = "true needs `strategy.compile`: it is the compiler that overlaps collectives with matrix products"
        yield Problem("strategy.tensor.async_tp", message, "Write `strategy.compile: true`, or leave it out.")


def compiled_tensor_parallel_keeps_activations(facts: RunFacts) -> Iterator[Problem]:
    """Tensor parallelism, compilation and recomputation of one block together fail inside torch."""
    strategy = facts.config.strategy
    if strategy.layout.tp > 1 and strategy.compile.enabled and strategy.recompute.mode != "none":
        message = f"{strategy.recompute.mode} cannot be combined with `strategy.compile` and `layout.tp` above 1"
        remedy = "Leave one of the three out: torch fails on blocks with all of them."
        yield Problem("strategy.recompute.mode", message, remedy)


def tiles_need_layers(facts: RunFacts) -> Iterator[Problem]:
    """The size of tiles applies to the layers in `names`."""
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
            reason = f"it belongs to mode {mode}, but `strategy.recompute.mode` is {recompute.mode}"
            remedy = f"Leave it out, or write `mode: {mode}`."
            yield from without_effect("strategy.recompute", recompute, (name,), reason, remedy)


def compile_options_need_compile(facts: RunFacts) -> Iterator[Problem]:
    """Options of the compiler have no effect where it is off."""
    section = facts.config.strategy.compile
    if not section.enabled:
        names = ("scope", "backend", "mode", "dynamic", "fullgraph")
        reason = "`strategy.compile.enabled` is false"
        yield from without_effect("strategy.compile", section, names, reason, "Leave it out, or write `enabled: true`.")


def recorded_passes_repeat_themselves(facts: RunFacts) -> Iterator[Problem]:
    """A graph replays the same kernels, on the device alone."""
    if facts.config.strategy.graphs is True:
        for reason in capture_obstacles(facts.config):
            yield Problem("strategy.graphs", f"true {reason}", "Leave one of the two out.")


def wrap_needs_a_use(facts: RunFacts) -> Iterator[Problem]:
    """Wrap units are sharded, offloaded, recomputed or compiled one by one."""
    strategy = facts.config.strategy
    by_block = strategy.compile.enabled and strategy.compile.scope == "block"
    if strategy.stage > 0 or strategy.recompute.mode != "none" or by_block or strategy.offload.on:
        return
    reason = "nothing is sharded, offloaded, recomputed or compiled by block"
    remedy = "Leave it out, or ask for one of them, for example with `strategy.zero: 3`."
    names = tuple(name for name in ("classes", "names", "min_params") if getattr(strategy.wrap, name))
    yield from without_effect("strategy.wrap", strategy.wrap, names, reason, remedy)


def backend_fits_the_device(facts: RunFacts) -> Iterator[Problem]:
    """NCCL needs CUDA devices, XCCL needs XPUs."""
    device, backend = facts.config.device, facts.config.backend
    needed = _DEVICE_OF.get(backend, device)
    if device not in ("auto", needed):
        others = [name for name in ("auto", "gloo") if name != backend]
        message = f"{backend} needs `device: {needed}`, but `device` is {device}"
        yield Problem("backend", message, f"Write {listed([f'`backend: {name}`' for name in others], 'or')}.")
