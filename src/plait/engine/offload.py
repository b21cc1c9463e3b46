"""Offload in the native engine: master weights in host memory or files, and how `prepare` moves them there.

`optim/offload.py` has the store itself, `Offload`, and its updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.config import RunConfig
from plait.distributed import (
    CopyStreams,
    GradientBuckets,
    Gradients,
    Home,
    ParamLimits,
    ParamStream,
    StreamedGradients,
    WrapUnit,
    combine_collectors,
    dtensor_like,
    gathering_stream,
    is_sharded,
    listen_to_reductions,
    local_grad,
    local_shard_of,
    to_local,
)
from plait.engine.master_weights import MasterWeights, ReplicatedScalars, make_buckets, trainable
from plait.engine.preparation import Preparation
from plait.engine.update import Updater
from plait.errors import ConfigError, Problem
from plait.kernels import link_gbps
from plait.launch import cpu_count
from plait.optim import (
    MakeState,
    Offload,
    OffloadOptions,
    bucket_elements,
    check_space,
    norm_of,
    state_bytes,
    updates_on_device,
)


class OffloadedParams(MasterWeights):
    """Master weights in host memory or in files: one tensor for this rank's shard of each parameter.

    Gradients are queued for the copy to the host: with `streamed`, each as soon as the backward pass has computed it
    (`StreamedGradients`); else at the end of the step, from the buckets that all-reduce them, or from `.grad`.
    """

    shows_gradients = False

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        store: Offload,
        frozen: Mapping[nn.Parameter, Tensor],
        *,
        streamed: bool,
        buckets: GradientBuckets | None,
        sums: Mapping[int, Tensor],
    ) -> None:
        """`sums` has the complete gradients of parameters that a sharded model keeps replicated, by index."""
        self.store = store
        self.frozen = frozen
        self._streamed = streamed
        self.buckets = buckets
        self._sums = sums
        self._gathered = False
        super().__init__(names, params)

    def _make_tensors(self) -> list[nn.Parameter]:
        return self.store.masters

    def gather_gradients(self) -> list[Tensor]:
        """Queue all gradients for the copy to the host; return an empty list, since the queue owns them."""
        if not self._streamed and not self._gathered:
            with torch.no_grad():
                for index, param in enumerate(self.params):
                    self.store.gradient_queue.take(index, self._gradient_now(index, param))
        self._gathered = True
        return []

    def _gradient_now(self, index: int, param: nn.Parameter) -> Tensor:
        if self.buckets is not None:
            return self.buckets.view_of(index)
        if index in self._sums:
            return self._sums[index].clone()  # the update may still read it when the next backward pass has begun
        return to_local(torch.zeros_like(param)) if param.grad is None else local_grad(param.grad, param)

    def gradient(self, index: int) -> Tensor | None:
        """Return the gradient of one parameter in this step; None if there is none, or it was freed."""
        return self.store.gradient_queue.of(index)

    def clear_gradients(self) -> None:
        """Free the gradients of a skipped step; those of other steps are freed by the update."""
        super().clear_gradients()
        self.store.gradient_queue.drop()
        self._gathered = False

    def norms(self) -> list[Tensor]:
        """Return the norm of each gradient."""
        return self.store.gradient_queue.norms()

    def publish(self) -> None:
        """Copy the master weights to the model, after they were loaded or written to."""
        self.store.publish()

    def settle(self) -> None:
        """Wait until no update is pending and the model has the new weights."""
        self.store.settle()

    def publish_frozen(self) -> None:
        """Copy the frozen weights to the model, also if the model's own weights are offloaded."""
        stream = self.store.stream
        with torch.no_grad():
            for param, whole in self.frozen.items():
                location = None if stream is None else stream.location_of(param)
                if location is None or stream is None:
                    to_local(param).copy_(to_local(whole))
                else:
                    stream.put(location, to_local(whole).to(param.dtype))

    def local(self, index: int) -> Tensor:
        """Return this rank's shard of one master weight; one in a file as a memory map."""
        return self.store.weight(index)

    def in_memory(self, index: int) -> Tensor:
        """Return this rank's shard of a parameter: that of `tensors`, or the rounded one if these are in files."""
        local = to_local(self.params[index])
        held = self.store.in_files(index) and local.untyped_storage().nbytes() > 0
        return local if held else self.local(index)

    def readable(self) -> AbstractContextManager[None]:
        """Within the block, master weights and optimizer states can be read; those in files are memory maps."""
        return self.store.readable()

    def allocate_states(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> frozenset[int]:
        """Create the files of states that a checkpoint will be loaded into; return the indices of their parameters."""
        self.store.allocate_states(wanted)
        return frozenset(index for index in wanted if self.store.in_files(index))


class OffloadedUpdater(Updater):
    """An `Updater` that reads the norm on the host and then starts an update that runs in the background."""

    _master_weights: OffloadedParams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stays_on_device = False  # the host needs the norm before it can start the update

    def _norm(self, grads: list[Tensor]) -> float:
        return norm_of(self._master_weights.norms(), self._master_weights.norm_group, self._master_weights.norm_weights)

    def _apply(self, grads: list[Tensor], norm: float, factor: float) -> None:
        self._master_weights.store.begin(self._clipped(norm, factor), self.clip_value)


class Offloading:
    """Moves the weights of a model to the host or to files during `prepare`, so that the device never holds them all.

    Order of calls: `keep_initial_values` and `store_initial_values` per stage (for a model that already has values),
    `open` once parameters are allocated, `keep` for each parameter that is initialized or loaded, `master_weights`.
    """

    def __init__(self, given: Preparation) -> None:
        config, world, policy = given.config, given.world, given.policy
        if config.strategy.offload.ratio == "auto":
            message = "`auto` is resolved by `plait train` before the ranks start, and this run is not"
            remedy = "Start it with `plait train`, or write the number that `plait.plan.shares.with_ratio` finds."
            raise ConfigError(Problem("strategy.offload.ratio", message, remedy))
        self._given = given
        self._config = config
        self._world = world
        self._log = given.log
        self.rounds = policy.mixed and policy.master
        """Whether the model computes with weights rounded to a smaller dtype than the master weights."""
        self._policy = policy
        self._initial_values: dict[str, Tensor] = {}
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._index_of: dict[nn.Parameter, int] = {}
        self.store: Offload | None = None
        self._streams = CopyStreams(world.device, fake=world.fake)
        self._stream = _param_stream(config, self._streams)
        self.take_params = None if self._stream is None else self._stream.take
        """A function that moves the weights of an FSDP-wrapped module off the device; None if all of them stay."""

    def keep_initial_values(self, module: nn.Module) -> None:
        """Keep the values of a model that is not on the meta device, before they are cast or moved."""
        if self.rounds or self._stream is not None:
            self._initial_values |= {name: param.data for name, param in module.named_parameters() if not param.is_meta}

    def store_initial_values(self, stage_module: nn.Module) -> None:
        """Store this rank's shards of the values kept by `keep_initial_values`; call it after sharding."""
        if self._stream is not None and self._initial_values:
            for wrapped in [wrapped for wrapped in stage_module.modules() if hasattr(wrapped, "unshard")]:
                self._stream.take(wrapped)
        for name, param in stage_module.named_parameters():
            if name in self._initial_values:
                full = self._initial_values.pop(name)
                # Tensor-parallel layers were already sharded when they were kept, and FSDP sharded them again.
                self.keep(param, local_shard_of(param, full.full_tensor() if is_sharded(full) else full))

    def keep(self, param: nn.Parameter, shard: Tensor) -> bool:
        """Store this rank's shard of the fp32 values of a parameter; see `materialize.Keep`.

        Returns whether the parameter's own weights are offloaded, so that the caller need not set them.
        """
        location = None if self._stream is None else self._stream.location_of(param)
        with torch.no_grad():
            index = self._index_of.get(param)
            if index is not None:
                assert self.store is not None
                self.store.keep(index, shard)
            elif self.rounds or location is not None:
                self._kept[param] = shard.to("cpu", copy=True)
            if location is not None and not param.requires_grad:
                assert self._stream is not None
                self._stream.put(location, shard.to("cpu", param.dtype))
        return location is not None

    def open(self, model: nn.Module, units: Sequence[Sequence[WrapUnit]]) -> None:
        """Allocate the store of a model's trained weights, and move the values kept so far into it.

        Raises `ConfigError` if host memory or disk is too small.
        """
        names, params = trainable(model)
        offload = self._config.strategy.offload
        with torch.no_grad():
            shards = [to_local(param.detach()) for param in params]
        sizes = [shard.numel() for shard in shards]
        dtypes = [self._master_dtype(shard) for shard in shards]
        folder = offload_folder(self._config) if offload.uses_files else None
        if not self._world.fake:
            warning = check_space(self._config, self._world, sizes, folder)
            if warning and self._world.is_main:
                self._log(warning)
        limit = bucket_elements(self._config, sizes, names)
        home: Home = "nvme" if offload.optimizer == "nvme" else "cpu"
        options = OffloadOptions(
            home,
            limit,
            ratio=offload.share,
            host_ratio=offload.host_ratio,
            state_bytes=state_bytes(self._config),
            delayed=offload.delayed,
            on_device=self._on_device(),
            folder=folder,
        )
        order = _order(params, [unit for stage_units in units for unit in stage_units])
        self.store = Offload(
            params, dtypes, order=order, streams=self._streams, options=options, stream=self._stream, log=self._log
        )
        self._index_of = {param: index for index, param in enumerate(params)}
        for param in params:
            if param in self._kept:
                self.store.keep(self._index_of[param], self._kept.pop(param))

    def _on_device(self) -> bool:
        """Return whether the device computes the update. All ranks decide alike: replicas must have equal weights."""
        world = self._world
        mine = updates_on_device(
            self._config,
            world.device.type,
            cores=cpu_count() / world.ranks.local_size,
            link_gbps=lambda: float("inf") if world.fake else link_gbps(world.device),
        )
        return mine if world.fake else not world.any(not mine)

    def _master_dtype(self, shard: Tensor) -> torch.dtype:
        return torch.float32 if self.rounds and shard.dtype == self._policy.compute else shard.dtype

    def master_weights(
        self,
        model: nn.Module,
        stage_modules: Sequence[nn.Module],
        units: Sequence[Sequence[WrapUnit]],
        collectors: Sequence[Gradients],
        compiled: Sequence[nn.Module],
        scalars: ReplicatedScalars | None,
    ) -> tuple[Gradients | None, OffloadedParams]:
        """Return the gradient collector and the master weights; the model must be initialized already.

        `stage_modules` are the pipeline stages that `model` is joined from, or the model alone; `units` are their FSDP
        wrap units. `collectors` are the gradient collectors of sharded modules, and `scalars` what they leave out.
        """
        store = self.store
        assert store is not None
        names, params = trainable(model)
        buckets = None if collectors else self._buckets(params)
        with torch.no_grad():
            for index, param in enumerate(params):
                if not self.rounds and (self._stream is None or self._stream.location_of(param) is None):
                    store.keep(index, to_local(param.detach()))  # the parameters themselves have the values
            if self._stream is not None:
                store.publish()
            frozen = {
                param: dtensor_like(shard, param) for param, shard in self._kept.items() if not param.requires_grad
            }
        self._kept = {}
        inner: Gradients | None = combine_collectors(collectors) if collectors else buckets
        # Not in a pipeline: there the gradients of weights that stages share are first summed in `.grad`.
        streamed = buckets is None and self._world.layout.pp == 1
        gradients = {} if scalars is None else scalars.sums
        sums = {index: gradients[param] for index, param in enumerate(params) if param in gradients}
        master_weights = OffloadedParams(names, params, store, frozen, streamed=streamed, buckets=buckets, sums=sums)
        if compiled or self._config.strategy.forward_prefetch:
            # A compiled module, or one that is gathered ahead of its forward pass, has no hook that could wait for its
            # own weights: wait for all of them before the forward pass.
            master_weights.before_forward = store.settle
        else:
            for module, mine in zip(stage_modules, units, strict=True):
                self._wait_by_unit(module, mine, params)
        if not streamed:
            return inner if buckets is None else UpdateAwareBuckets(buckets, store), master_weights
        collector = StreamedGradients(store.gradient_queue, self._sum_dtype, inner, sums)
        if inner is None:
            collector.listen(params)
        else:
            listen_to_reductions(model, {id(param): index for index, param in enumerate(params)}, collector.receive)
        return collector, master_weights

    def _buckets(self, params: list[nn.Parameter]) -> GradientBuckets | None:
        """Return buckets that sum gradients over replicas, and over stages that share a weight; None if not needed."""
        layout = self._world.layout
        if layout.replicas == 1 and layout.pp == 1:
            return None
        return make_buckets(self._given, params)

    def _sum_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._policy.reduce if tensor.dtype == self._policy.compute else tensor.dtype

    def _wait_by_unit(self, module: nn.Module, units: Sequence[WrapUnit], params: Sequence[nn.Parameter]) -> None:
        """Have the forward pass of each wrapped module wait for the update of its own weights."""
        index_of = {id(param): index for index, param in enumerate(params)}
        inside: set[int] = set()
        for unit in units:
            mine = {index_of[id(param)] for param in unit.module.parameters() if id(param) in index_of}
            inside |= mine
            self._wait_before(unit.module, mine)
        of_part = {index_of[id(param)] for param in module.parameters() if id(param) in index_of}
        self._wait_before(module, of_part - inside)

    def _wait_before(self, module: nn.Module, indices: set[int]) -> None:
        store = self.store
        assert store is not None
        buckets = [bucket for bucket in store.buckets if indices.intersection(bucket.span.indices)]

        def wait(_module: nn.Module, _inputs: object) -> None:
            store.wait_for(buckets, gathering_stream(module))

        module.register_forward_pre_hook(wait, prepend=True)


class UpdateAwareBuckets:
    """Gradient buckets whose next backward pass first waits for the background update, which still reads them."""

    def __init__(self, buckets: GradientBuckets, store: Offload) -> None:
        self._buckets = buckets
        self._store = store

    def before_backward(self, *, last: bool) -> None:
        """Wait for the pending update, then prepare the buckets for the backward pass of one micro-batch."""
        self._store.finish()
        self._buckets.before_backward(last=last)

    def finish(self) -> None:
        """Wait until the step's gradients are reduced."""
        self._buckets.finish()


def _param_stream(config: RunConfig, streams: CopyStreams) -> ParamStream | None:
    offload = config.strategy.offload
    if offload.params == "none":
        return None
    limits = ParamLimits(offload.prefetch_params, offload.live_params, offload.persistent_params)
    folder = offload_folder(config) if offload.params == "nvme" else None
    return ParamStream(streams, limits, folder)


def offload_folder(config: RunConfig) -> Path:
    """Return the folder of this run's offload files."""
    path = config.strategy.offload.path
    return Path(config.work_dir) / "offload" if path is None else Path(path)


def _order(params: Sequence[nn.Parameter], units: Sequence[WrapUnit]) -> list[int]:
    """Return the parameters' indices in the order in which the forward pass uses them: by wrap unit.

    Parameters outside of wrapped modules (embeddings) come first.
    """
    sample_unit = {id(param): number for number, unit in enumerate(units) for param in unit.module.parameters()}
    return sorted(range(len(params)), key=lambda index: (sample_unit.get(id(params[index]), -1), index))
