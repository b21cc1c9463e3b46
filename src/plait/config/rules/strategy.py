"""Rules for `strategy`, and for `device` and `backend`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.graphs import against_recording
from plait.config.rules.facts import Facts, given, idle
from plait.config.words import listed, show
from plait.errors import Problem

_DEVICE_OF = {"nccl": "cuda", "xccl": "xpu"}


def zero_and_sharding_agree(facts: Facts) -> Iterator[Problem]:
    """`zero` and `sharding` are two words for one thing."""
    strategy = facts.config.strategy
    if strategy.zero is not None and strategy.sharding is not None and strategy.zero != strategy.stage:
        message = (
            f"{strategy.sharding} is stage {strategy.stage}, but `strategy.zero` is {strategy.zero}; "
            "both name the ZeRO stage"
        )
        remedy = f"Leave one of them out, or write `strategy.zero: {strategy.stage}`."
        yield Problem("strategy.sharding", message, remedy)


def sharding_options_need_sharding(facts: Facts) -> Iterator[Problem]:
    """At stage 0 every rank has everything: there is nothing to reshard or to fetch ahead."""
    strategy = facts.config.strategy
    if strategy.stage > 0:
        return
    asked = given(strategy, "reshard_after_forward")
    asked += [name for name in ("forward_prefetch", "backward_prefetch") if getattr(strategy, name) > 0]
    for name in asked:
        message = f"{show(getattr(strategy, name))} has no effect: at stage 0 nothing is sharded"
        yield Problem(f"strategy.{name}", message, "Leave it out, or write `strategy.zero: 3`.")


def reshard_fits_the_stage(facts: Facts) -> Iterator[Problem]:
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


def buckets_are_for_replicas(facts: Facts) -> Iterator[Problem]:
    """Sharded gradients are reduced unit by unit, not in buckets."""
    strategy = facts.config.strategy
    if strategy.stage > 0:
        reason = f"at stage {strategy.stage} gradients are reduced by unit (`strategy.wrap`), not in buckets"
        yield from idle("strategy", strategy, ("bucket_mb",), reason, "Leave it out.")


def sharded_layout_needs_sharding(facts: Facts) -> Iterator[Problem]:
    """A `dp_shard` axis at stage 0 would have nothing to do."""
    strategy = facts.config.strategy
    shards = strategy.layout.dp_shard or 1
    if shards > 1 and strategy.stage == 0:
        message = f"{shards} ranks are to share the model, but at stage 0 nothing is sharded"
        remedy = "Write `strategy.zero: 1`, `2` or `3`, or use `strategy.layout.dp_replicate`."
        yield Problem("strategy.layout.dp_shard", message, remedy)


def options_need_their_axis(facts: Facts) -> Iterator[Problem]:
    """Options of an axis of one rank have nothing to act on."""
    strategy = facts.config.strategy
    for section, axis in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp")):
        if getattr(strategy.layout, axis) == 1:
            found = getattr(strategy, section)
            reason = f"`strategy.layout.{axis}` is 1"
            remedy = f"Leave it out, or write `strategy.layout.{axis}: 2`."
            yield from idle(f"strategy.{section}", found, tuple(type(found).model_fields), reason, remedy)


def micro_batches_are_accumulation(facts: Facts) -> Iterator[Problem]:
    """`pipeline.micro_batches` and `batch.accumulation` are two words for one number."""
    micro_batches, accumulation = facts.config.strategy.pipeline.micro_batches, facts.config.batch.accumulation
    if micro_batches is not None and accumulation is not None and micro_batches != accumulation:
        message = f"{micro_batches}, but `batch.accumulation` is {accumulation}; both are the micro-batches of a step"
        yield Problem("strategy.pipeline.micro_batches", message, "Leave one of them out.")


def async_tensor_parallel_needs_compile(facts: Facts) -> Iterator[Problem]:
    """The compiler is what puts collectives and matrix products into one kernel."""
    strategy = facts.config.strategy
    if strategy.tensor.async_tp and not strategy.compile.enabled:
        message = "true needs `strategy.compile`: it is the compiler that overlaps collectives with matrix products"
        yield Problem("strategy.tensor.async_tp", message, "Write `strategy.compile: true`, or leave it out.")


def compiled_tensor_parallel_keeps_activations(facts: Facts) -> Iterator[Problem]:
    """A block that is cut over ranks, compiled and recomputed at once fails inside torch."""
    strategy = facts.config.strategy
    if strategy.layout.tp > 1 and strategy.compile.enabled and strategy.recompute.mode != "none":
        message = f"{strategy.recompute.mode} cannot go with `strategy.compile` where `layout.tp` is more than 1"
        remedy = "Leave one of the three out: torch fails on blocks with all of them."
        yield Problem("strategy.recompute.mode", message, remedy)


def tiles_need_layers(facts: Facts) -> Iterator[Problem]:
    """A size of tiles is for the layers that are named."""
    tiles = facts.config.strategy.tiles
    if not tiles.names:
        remedy = "Leave it out, or name layers: `names: [blocks.*.ffn]`."
        yield from idle("strategy.tiles", tiles, ("tokens",), "no layer is named in `strategy.tiles.names`", remedy)


def recompute_options_fit_the_mode(facts: Facts) -> Iterator[Problem]:
    """Each option of `recompute` belongs to one mode."""
    recompute = facts.config.strategy.recompute
    for name, mode in (("every", "every"), ("save_ops", "selective"), ("budget_gib", "auto")):
        if recompute.mode != mode:
            reason = f"`strategy.recompute.mode` is {recompute.mode}, and this belongs to {mode}"
            remedy = f"Leave it out, or write `mode: {mode}`."
            yield from idle("strategy.recompute", recompute, (name,), reason, remedy)


def compile_options_need_compile(facts: Facts) -> Iterator[Problem]:
    """Options of a compiler that is off."""
    section = facts.config.strategy.compile
    if not section.enabled:
        names = ("scope", "backend", "mode", "dynamic", "fullgraph")
        reason = "`strategy.compile.enabled` is false"
        yield from idle("strategy.compile", section, names, reason, "Leave it out, or write `enabled: true`.")


def recorded_passes_repeat_themselves(facts: Facts) -> Iterator[Problem]:
    """A recording does what it did the first time, on the device alone."""
    if facts.config.strategy.graphs is True:
        for reason in against_recording(facts.config):
            yield Problem("strategy.graphs", f"true {reason}", "Leave one of the two out.")


def wrap_needs_a_use(facts: Facts) -> Iterator[Problem]:
    """Units are made to be sharded, waited for, recomputed or compiled one by one."""
    strategy = facts.config.strategy
    by_block = strategy.compile.enabled and strategy.compile.scope == "block"
    if strategy.stage > 0 or strategy.recompute.mode != "none" or by_block or strategy.offload.on:
        return
    reason = "nothing is sharded, offloaded, recomputed or compiled by block"
    remedy = "Leave it out, or ask for one of them, for example with `strategy.zero: 3`."
    names = tuple(name for name in ("classes", "names", "min_params") if getattr(strategy.wrap, name))
    yield from idle("strategy.wrap", strategy.wrap, names, reason, remedy)


def backend_fits_the_device(facts: Facts) -> Iterator[Problem]:
    """NCCL speaks between CUDA devices, XCCL between XPUs, and neither elsewhere."""
    device, backend = facts.config.device, facts.config.backend
    needed = _DEVICE_OF.get(backend, device)
    if device not in ("auto", needed):
        others = [name for name in ("auto", "gloo") if name != backend]
        message = f"{backend} needs `device: {needed}`, but `device` is {device}"
        yield Problem("backend", message, f"Write {listed([f'`backend: {name}`' for name in others], 'or')}.")


RULES = (
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
