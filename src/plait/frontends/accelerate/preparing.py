"""The part of an `Accelerator` that spreads what a script has made."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from plait.errors import ConfigError, ModelError, Problem
from plait.frontends.accelerate.dummies import DummyOptim, DummyScheduler, make_optimizer, make_scheduler, refuse_two
from plait.frontends.accelerate.engine import Joint, build_engine
from plait.frontends.accelerate.gather import Gatherer
from plait.frontends.accelerate.gradients import GradientState, step_count
from plait.frontends.accelerate.loader import PreparedLoader, choose_delivery, seed_sampler
from plait.frontends.accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from plait.frontends.accelerate.prepared import PreparedModel, PreparedOptimizer, PreparedScheduler
from plait.frontends.accelerate.process import Processes
from plait.frontends.accelerate.profiling import ProfileKwargs
from plait.frontends.accelerate.settings import build_config, heed_launcher, plugin_of
from plait.frontends.accelerate.sharing import Share
from plait.frontends.accelerate.state import remember
from plait.frontends.accelerate.tracking import Trackers, choose_trackers
from plait.frontends.deepspeed import Recipe, Scheduler
from plait.precision import make_policy
from plait.world import World, open_world, told_by_accelerate


class Preparing(Processes):
    """What an `Accelerator` is made of, and what it makes of models, optimizers, loaders and schedulers."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        parallelism_config: Any = None,
        *,
        config_file: str | Path | None = None,
        sections: Mapping[str, Any] | None = None,
        world: World | None = None,
    ) -> None:
        if dynamo_backend is not None:
            dynamo_plugin = TorchDynamoPlugin(backend=dynamo_backend)
        plugins = [each for each in (fsdp_plugin, deepspeed_plugin, parallelism_config, dynamo_plugin) if each]
        handlers = list(kwargs_handlers or ())
        if config_file is None:
            told = heed_launcher(told_by_accelerate(), answered=bool(plugins or sections))
            mixed_precision = mixed_precision or told.get("mixed_precision")
            cpu = cpu or told.get("cpu", False)
            if gradient_accumulation_steps == 1 and gradient_accumulation_plugin is None:
                gradient_accumulation_steps = told.get("gradient_accumulation_steps", 1)
        self.config, self.account = build_config(
            config_file,
            plugins,
            handlers,
            mixed_precision=mixed_precision,
            cpu=cpu,
            sections=sections,
        )
        super().__init__(world or open_world(self.config))
        self._autocast = next((each for each in handlers if isinstance(each, AutocastKwargs)), AutocastKwargs())
        self._profile = next((each for each in handlers if isinstance(each, ProfileKwargs)), ProfileKwargs())
        self._gatherer = Gatherer(self.world)
        policy = make_policy(self.config.precision)
        self._dtype = policy.compute if policy.mixed else None
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config.split_batches = split_batches
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types or ["generator"])
        self.gradient_state = _gradient_state(
            gradient_accumulation_steps, gradient_accumulation_plugin, self.config.batch.accumulation
        )
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        folder = self.project_configuration.logging_dir
        self._trackers = Trackers(*choose_trackers(log_with), None if folder is None else Path(folder), self.world)
        self.fsdp_plugin = fsdp_plugin
        self.deepspeed_plugin = deepspeed_plugin or plugin_of(config_file)
        self._recipe = Recipe(self.deepspeed_plugin.deepspeed_config if self.deepspeed_plugin else {})
        self._models: list[PreparedModel] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []
        self._custom_objects: list[Any] = []
        self._save_hooks: list[Any] = []
        self._load_hooks: list[Any] = []
        remember(self)

    @property
    def distributed_type(self) -> DistributedType:
        """Whether there are several ranks, and whether each has all of a model."""
        if not self.use_distributed:
            return DistributedType.NO
        if self.config.strategy.stage > 0:
            return DistributedType.FSDP
        kinds = {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}
        return kinds.get(self.device.type, DistributedType.MULTI_CPU)

    @property
    def state(self) -> Preparing:
        """What scripts ask the state for, the accelerator knows: `num_processes`, `device`, `mixed_precision`, …"""
        return self

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is that of all ranks together."""
        return bool(self.dataloader_config.split_batches)

    @property
    def even_batches(self) -> bool:
        """Whether the last round of batches is filled up."""
        return bool(self.dataloader_config.even_batches)

    # ---- what is prepared

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Spread models, optimizers, loaders and schedulers, in any order and number; returns them in that order.

        Anything else comes back as it is. `device_placement` says of each loader whether its batches are moved.
        """
        placements = list(device_placement or [self.device_placement] * len(objects))
        found = {id(each): each for each in objects}
        for each in objects:
            if isinstance(each, nn.Module):
                found[id(each)] = self._wrapped(each)
        for each, placed in zip(objects, placements, strict=True):
            if isinstance(each, (Optimizer, DummyOptim)):
                found[id(each)] = self.prepare_optimizer(each)
            elif isinstance(each, DataLoader):
                found[id(each)] = self.prepare_data_loader(each, device_placement=placed)
        for each in objects:
            if isinstance(each, (LRScheduler, ReduceLROnPlateau, Scheduler, DummyScheduler)):
                found[id(each)] = self.prepare_scheduler(each)
        for each in found.values():
            if isinstance(each, PreparedModel):
                each.place()  # unless its engine has: a model that is to be cut must not lie on the device whole
        results = tuple(found[id(each)] for each in objects)
        return results if len(results) > 1 else results[0]

    def prepare_model(self, model: nn.Module, **_: Any) -> nn.Module:
        """A model, on the device. It is spread when its optimizer comes, and until then computes only."""
        prepared = self._wrapped(model)
        prepared.place()
        return prepared

    def _wrapped(self, model: nn.Module) -> PreparedModel:
        if isinstance(model, PreparedModel):
            return model
        prepared = PreparedModel(model, self.device, self._dtype)
        self._models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer | DummyOptim, **_: Any) -> Optimizer:
        """An optimizer; spreads the models whose parameters it has."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if isinstance(optimizer, DummyOptim):
            params = optimizer.parameters
        else:
            refuse_two(self._recipe, "optimizer")
            params = [param for group in optimizer.param_groups for param in group["params"]]
        owners = [model for model in self._models if model.owns(params)]
        if not owners:
            raise ModelError(
                f"the parameters of the {type(optimizer).__name__} belong to no model that was prepared: prepare the "
                "model in the same call, or before"
            )
        for owner in owners:
            if owner.engine is not None:
                raise ModelError(
                    f"the {type(optimizer).__name__} is the second optimizer of a model: make it a parameter group of "
                    f"the first one, the {type(owner.engine.optimizer).__name__}"
                )
        joint = len(owners) > 1
        module = Joint([owner.module for owner in owners]) if joint else owners[0].module
        modes = [owner.module.training for owner in owners]
        dummy = optimizer
        if isinstance(optimizer, DummyOptim):
            optimizer = make_optimizer(self._recipe, optimizer, module)
        engine = build_engine(self.config, self.world, module, optimizer, self.print)
        for index, (owner, mode) in enumerate(zip(owners, modes, strict=True)):
            owner.bind(engine, index if joint else None)
            owner.train(mode)
        prepared = PreparedOptimizer(optimizer, owners, self.gradient_state)
        prepared.stands_for = dummy
        self._optimizers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> PreparedLoader:
        """A loader that gives this rank its share."""
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        if slice_fn_for_dispatch is not None:
            raise ConfigError(Problem("slice_fn_for_dispatch", "batches are cut along their first dimension", ""))
        options, layout = self.dataloader_config, self.world.layout
        share = Share(self.world.data_rank, layout.data_parallel, options.split_batches, options.even_batches)
        placed = self.device_placement if device_placement is None else device_placement
        delivery = choose_delivery(
            data_loader,
            share,
            device=self.device if placed else None,
            non_blocking=options.non_blocking,
            dispatch=options.dispatch_batches,
        )
        if not delivery.dispatch:
            seedable = options.use_seedable_sampler
            seed_sampler(data_loader, ranks=share.ranks, seedable=seedable, data_seed=options.data_seed)
        prepared = PreparedLoader(data_loader, delivery, self.world, self.gradient_state)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """A scheduler that steps once for each batch of the loader as it was written."""
        mine = [
            each
            for each in self._optimizers
            if any(scheduler.optimizer is one for one in (each, each.optimizer, each.stands_for))
        ]
        times = 1 if self.dataloader_config.split_batches else self.world.layout.data_parallel
        if isinstance(scheduler, (Scheduler, DummyScheduler)):  # DeepSpeed's count updates
            if isinstance(scheduler, DummyScheduler):
                own = (mine or self._optimizers)[0].optimizer
                scheduler = make_scheduler(self._recipe, scheduler, own, ranks=times)
            times = 1
        else:
            refuse_two(self._recipe, "scheduler")
        prepared = PreparedScheduler(
            scheduler,
            mine or self._optimizers,
            self.gradient_state,
            with_optimizer=self.step_scheduler_with_optimizer,
            times=times,
        )
        self._schedulers.append(prepared)
        return prepared

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model itself. Its parameters may be parts of the whole; `get_state_dict` gives the whole.

        Below stage 3 they are whole between steps.
        """
        return model.module if isinstance(model, PreparedModel) else model

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything that was prepared; returns as many Nones."""
        for each in self._models:
            each.engine = None
        for held in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            held.clear()
        self.gradient_state.step = 0
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory


def _gradient_state(steps: int, plugin: GradientAccumulationPlugin | None, configured: int | None) -> GradientState:
    if plugin is not None and steps != 1:
        problem = "given beside gradient_accumulation_plugin"
        raise ConfigError(Problem("gradient_accumulation_steps", problem, "Set num_steps of the plugin."))
    plugin = plugin or GradientAccumulationPlugin(num_steps=steps)
    if configured is not None and plugin.num_steps not in (1, configured):
        problem = f"{plugin.num_steps} here, and {configured} in the DeepSpeed configuration"
        raise ConfigError(Problem("gradient_accumulation_steps", problem, "Give it in one place, or the same twice."))
    return GradientState(
        num_steps=configured or step_count(plugin.num_steps),
        adjust_scheduler=plugin.adjust_scheduler,
        sync_with_dataloader=plugin.sync_with_dataloader,
        sync_each_batch=plugin.sync_each_batch,
    )
