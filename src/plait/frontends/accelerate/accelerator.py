"""`Accelerator`: scripts written for Accelerate, on Plait's engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from plait.distributed import World, accelerate_environment, open_world
from plait.engine import LoopEngine
from plait.errors import ConfigError, ModelError, Problem, TrainingError
from plait.frontends.accelerate import state_files
from plait.frontends.accelerate.data_loader import (
    BatchShare,
    GradientState,
    PreparedLoader,
    choose_delivery,
    seed_sampler,
    skip_first_batches,
    step_count,
)
from plait.frontends.accelerate.optimizer import PreparedOptimizer
from plait.frontends.accelerate.prepared import Gatherer, JointModels, PreparedModel, backward, build_engine
from plait.frontends.accelerate.process import Processes
from plait.frontends.accelerate.scheduler import PreparedScheduler
from plait.frontends.accelerate.settings import arguments_of_launcher, build_config, deepspeed_plugin_of
from plait.frontends.accelerate.state import remember
from plait.frontends.accelerate.tracking import Trackers, choose_trackers
from plait.frontends.accelerate.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from plait.frontends.accelerate.utils.deepspeed import (
    DummyOptim,
    DummyScheduler,
    make_optimizer,
    make_scheduler,
    refuse_duplicate,
)
from plait.frontends.deepspeed import Recipe, Scheduler
from plait.precision import make_policy


class Accelerator(Processes):
    """Accelerate's Accelerator; Plait's engine parallelizes the models that it prepares.

    Arguments are Accelerate's. `config_file` is an `accelerate` YAML; `sections` are sections of a run description
    that override everything else (`sections={"strategy": "zero3"}`). `key_report` says for every key of the given
    configuration whether Plait honours, translates, ignores or refuses it.
    """

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
        plugins = [plugin for plugin in (fsdp_plugin, deepspeed_plugin, parallelism_config, dynamo_plugin) if plugin]
        handlers = list(kwargs_handlers or ())
        if config_file is None:
            launcher = arguments_of_launcher(accelerate_environment(), configured=bool(plugins or sections))
            mixed_precision = mixed_precision or launcher.get("mixed_precision")
            cpu = cpu or launcher.get("cpu", False)
            if gradient_accumulation_steps == 1 and gradient_accumulation_plugin is None:
                gradient_accumulation_steps = launcher.get("gradient_accumulation_steps", 1)
        self.config, self.key_report = build_config(
            config_file,
            plugins,
            handlers,
            mixed_precision=mixed_precision,
            cpu=cpu,
            sections=sections,
        )
        super().__init__(world or open_world(self.config))
        self._autocast = next((kwargs for kwargs in handlers if isinstance(kwargs, AutocastKwargs)), AutocastKwargs())
        self._profile = next((kwargs for kwargs in handlers if isinstance(kwargs, ProfileKwargs)), ProfileKwargs())
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
        self.deepspeed_plugin = deepspeed_plugin or deepspeed_plugin_of(config_file)
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
        """`NO` for one rank, `FSDP` if anything is sharded (ZeRO stage above 0), else the `MULTI_…` of the device."""
        if not self.use_distributed:
            return DistributedType.NO
        if self.config.strategy.stage > 0:
            return DistributedType.FSDP
        types = {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}
        return types.get(self.device.type, DistributedType.MULTI_CPU)

    @property
    def state(self) -> Accelerator:
        """The accelerator itself, which has the attributes of the state: `num_processes`, `device`, …"""
        return self

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a loader counts the samples of all ranks together, not of each rank."""
        return bool(self.dataloader_config.split_batches)

    @property
    def even_batches(self) -> bool:
        """Whether ranks without a last batch repeat samples, so that all ranks have equally many batches."""
        return bool(self.dataloader_config.even_batches)

    # ---- what is prepared

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order and number; return them in that order.

        Anything else is returned unchanged. `device_placement` says for each loader whether its batches are moved to
        the device.
        """
        placements = list(device_placement or [self.device_placement] * len(objects))
        prepared = {id(given): given for given in objects}
        for given in objects:
            if isinstance(given, nn.Module):
                prepared[id(given)] = self._wrapped(given)
        for given, placed in zip(objects, placements, strict=True):
            if isinstance(given, (Optimizer, DummyOptim)):
                prepared[id(given)] = self.prepare_optimizer(given)
            elif isinstance(given, DataLoader):
                prepared[id(given)] = self.prepare_data_loader(given, device_placement=placed)
        for given in objects:
            if isinstance(given, (LRScheduler, ReduceLROnPlateau, Scheduler, DummyScheduler)):
                prepared[id(given)] = self.prepare_scheduler(given)
        for given in prepared.values():
            if isinstance(given, PreparedModel):
                given.to_device()  # unless it has an engine: a model that is sharded must not be on the device in full
        results = tuple(prepared[id(given)] for given in objects)
        return results if len(results) > 1 else results[0]

    def prepare_model(self, model: nn.Module, **_: Any) -> nn.Module:
        """Return a model on the device. Until its optimizer is prepared, it is not parallelized, nor can it train."""
        prepared = self._wrapped(model)
        prepared.to_device()
        return prepared

    def _wrapped(self, model: nn.Module) -> PreparedModel:
        if isinstance(model, PreparedModel):
            return model
        prepared = PreparedModel(model, self.device, self._dtype)
        self._models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer | DummyOptim, **_: Any) -> Optimizer:
        """Return an optimizer with an engine, which parallelizes the models whose parameters the optimizer has."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if isinstance(optimizer, DummyOptim):
            params = optimizer.parameters
        else:
            refuse_duplicate(self._recipe, "optimizer")
            params = [param for group in optimizer.param_groups for param in group["params"]]
        owners = [model for model in self._models if model.owns(params)]
        if not owners:
            raise ModelError(
                f"the parameters of the {type(optimizer).__name__} are not those of a prepared model: prepare the "
                "model in the same call, or before"
            )
        for owner in owners:
            if owner.engine is not None:
                raise ModelError(
                    f"the {type(optimizer).__name__} is the second optimizer of a model: make it a parameter group of "
                    f"the first one, the {type(owner.engine.optimizer).__name__}"
                )
        joint = len(owners) > 1
        module = JointModels([owner.module for owner in owners]) if joint else owners[0].module
        modes = [owner.module.training for owner in owners]
        given = optimizer
        if isinstance(optimizer, DummyOptim):
            optimizer = make_optimizer(self._recipe, optimizer, module)
        engine = build_engine(self.config, self.world, module, optimizer, self.print)
        for index, (owner, mode) in enumerate(zip(owners, modes, strict=True)):
            owner.bind(engine, index if joint else None)
            owner.train(mode)
        prepared = PreparedOptimizer(optimizer, owners, self.gradient_state)
        prepared.given = given
        self._optimizers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> PreparedLoader:
        """Return a loader that yields this rank's part of the batches."""
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        if slice_fn_for_dispatch is not None:
            problem = "batches are always split along their first dimension"
            raise ConfigError(Problem("slice_fn_for_dispatch", problem, "Leave it out."))
        options, layout = self.dataloader_config, self.world.layout
        share = BatchShare(self.world.data_rank, layout.data_parallel, options.split_batches, options.even_batches)
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
        """Return a scheduler that steps once for each batch of the original loader."""
        mine = [
            optimizer
            for optimizer in self._optimizers
            if any(scheduler.optimizer is one for one in (optimizer, optimizer.optimizer, optimizer.given))
        ]
        times = 1 if self.dataloader_config.split_batches else self.world.layout.data_parallel
        if isinstance(scheduler, (Scheduler, DummyScheduler)):  # DeepSpeed's schedulers count optimizer steps
            if isinstance(scheduler, DummyScheduler):
                wrapped = (mine or self._optimizers)[0].optimizer
                scheduler = make_scheduler(self._recipe, scheduler, wrapped, ranks=times)
            times = 1
        else:
            refuse_duplicate(self._recipe, "scheduler")
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
        """Return the model itself. At ZeRO stage 3 its parameters are sharded; `get_state_dict` gives them in full."""
        return model.module if isinstance(model, PreparedModel) else model

    def free_memory(self, *objects: Any) -> list[None]:
        """Release everything that was prepared. Return a None for each of `objects`."""
        for model in self._models:
            model.engine = None
        for prepared in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            prepared.clear()
        self.gradient_state.step = 0
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    # ---- checkpoints

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let `save_state` and `load_state` include these objects; they need `state_dict` and `load_state_dict`."""
        unfit = [obj for obj in objects if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))]
        if unfit:
            names = ", ".join(type(obj).__name__ for obj in unfit)
            raise ModelError(f"{names} cannot be registered without state_dict and load_state_dict")
        self._custom_objects.extend(objects)

    def save_state(self, output_dir: str | Path | None = None, **_: Any) -> str:
        """Write everything that was prepared or registered to a Plait checkpoint; return its folder."""
        folder = state_files.next_folder(self.project_configuration, output_dir, self.world)
        state_files.save(self._prepared_objects(), folder)
        if self._save_hooks:
            # As in Accelerate, hooks get a list of weights without those of sharded models, and may remove the
            # weights that they have saved themselves. Here this has no effect: everything is saved already.
            weights = [
                state_files.full_weights(model, self.world)
                for model in self._models
                if not state_files.is_sharded_model(model)
            ]
            for hook in self._save_hooks:
                hook([model.module for model in self._models], weights, str(folder))
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None, **_: Any) -> None:
        """Load a checkpoint that `save_state` wrote, under any strategy and on any number of ranks."""
        folder = state_files.last_folder(self.project_configuration, input_dir, self.world)
        for hook in self._load_hooks:
            hook([model.module for model in self._models], str(folder))
        state_files.load(self._prepared_objects(), folder)

    def register_save_state_pre_hook(self, hook: Any) -> state_files.Removable:
        """Call `hook(models, weights, folder)` with every `save_state`, once the folder is complete."""
        return state_files.Removable(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Any) -> state_files.Removable:
        """Call `hook(models, folder)` before every `load_state`."""
        return state_files.Removable(self._load_hooks, hook)

    def _prepared_objects(self) -> state_files.PreparedObjects:
        return state_files.PreparedObjects(
            self.config,
            self.world,
            self._optimizers,
            self._schedulers,
            self._dataloaders,
            self._custom_objects,
            self.gradient_state,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the full weights on the host; on rank 0 alone if they are sharded. Every rank must call it."""
        return state_files.full_weights(model, self.world)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the full weights, as `model.safetensors` or in several such files with an index."""
        state = state_files.full_weights(model, self.world)
        if self.is_main_process:
            state_files.write(state, Path(save_directory), max_shard_size, safe=safe_serialization)
        self.wait_for_everyone()

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object to a file, from the main process."""
        if self.is_main_process:
            state_files.write_object(obj, Path(f), safe=safe_serialization)

    def skip_first_batches(self, dataloader: PreparedLoader, num_batches: int | None = None) -> PreparedLoader:
        """Return a loader of the current pass without its first batches.

        Without `num_batches`, skip the batches that had been read when the loaded state was saved, also if that was on
        another number of ranks.
        """
        return skip_first_batches(dataloader, num_batches)

    # ---- trackers

    @property
    def project_dir(self) -> str | Path | None:
        """The folder that the script writes to."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """The folder that trackers write to."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of checkpoints that were saved."""
        return self.project_configuration.iteration

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the trackers of `log_with`. `init_kwargs["wandb"]` has arguments of `wandb.init`."""
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log the values of one step, from the main process."""
        self._trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker of `log_with` by its name; with `unwrap`, the library's own object."""
        return self._trackers.get(name, unwrap=unwrap)

    @property
    def trackers(self) -> list[Any]:
        """All trackers of `log_with` that `init_trackers` has opened."""
        return self._trackers.all

    def end_training(self) -> None:
        """Close the trackers and the process group."""
        self._trackers.finish()
        self.world.close()

    # ---- one step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward from the mean loss of one micro-batch, divided by `gradient_accumulation_steps`."""
        models = [model for model in self._models if model.engine is not None and model.in_graph]
        engines = list({id(model.engine): model.engine for model in models if model.engine is not None}.values())
        if not engines:
            raise TrainingError(
                "backward was called, but no prepared model has been called since the last step; call what "
                "`prepare` returned, not the model that it was given"
            )
        last = []
        for engine in engines:
            engine.accumulation = self.gradient_accumulation_steps
            syncs = all(model.syncs for model in models if model.engine is engine)
            last.append(self.sync_gradients and syncs)
        self.gradient_state.stepped = False
        backward(engines, loss, last=last, **kwargs)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """A `with` block for one micro-batch.

        Optimizers step every `gradient_accumulation_steps` blocks, and at the last batch of a loader.
        """
        self.gradient_state.advance()
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(nullcontext() if self.sync_gradients else self.no_sync(model))
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A `with` block in which gradients accumulate on this rank; the next backward outside reduces them."""
        models = [prepared for prepared in self._models if prepared is model or prepared.module is model]
        before = [prepared.syncs for prepared in models]
        for prepared in models:
            prepared.syncs = False
        try:
            yield
        finally:
            for prepared, value in zip(models, before, strict=True):
                prepared.syncs = value

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the global gradient norm in the next step; return the norm before clipping, as a tensor on the device.

        Do nothing, and return None, on micro-batches that do not complete a step.
        """
        if norm_type != 2:
            raise TrainingError(f"clip_grad_norm_ supports the 2-norm only, not norm_type={norm_type}")
        if not self.sync_gradients:
            return None
        engine = self._engine_of(parameters)
        return None if engine is None else engine.clip_grad_norm(float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients to ±`clip_value` in the next step."""
        engine = self._engine_of(parameters) if self.sync_gradients else None
        if engine is not None:
            engine.clip_grad_value(clip_value)

    def _engine_of(self, parameters: Any) -> LoopEngine | None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        models = [model for model in self._models if model.engine is not None and model.owns(given)]
        engines = {id(model.engine): model.engine for model in models}
        if len(engines) != 1:
            raise TrainingError(
                f"these parameters belong to {len(engines)} optimizers: call this once per prepared model, with its "
                "model.parameters()"
            )
        engine = next(iter(engines.values()))
        assert engine is not None
        if sum(param.requires_grad for param in given) < len(engine.master_weights.params):
            raise TrainingError(
                "gradients are clipped over all parameters of an optimizer, and some are missing: pass "
                "model.parameters() of every model that it trains"
            )
        return engine if engine.pending else None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: norms, clipping and the update already use the unscaled gradients."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the gradients of the current micro-batch complete a step."""
        return self.gradient_state.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, count: int) -> None:
        self.gradient_state.num_steps = step_count(count)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was skipped because a gradient was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16` or `fp16`."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self._dtype, "no") if self._dtype else "no"

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return torch's autocast context in the precision of the run, for computations outside the model."""
        handler = autocast_handler or self._autocast
        if self._dtype is None or not handler.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype, cache_enabled=handler.cache_enabled)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile a block with torch's profiler, configured by the handler or the one in `kwargs_handlers`."""
        handler = profile_handler or self._profile
        with handler.build() as profiler:
            yield profiler
        handler.export(profiler, self.process_index)

    # ---- over ranks

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks, concatenated along the first dimension."""
        return self._gatherer.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what `gather` does, without the samples that were repeated to fill the last batches."""
        return self._gatherer.gather_for_metrics(input_data, self.gradient_state, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean of tensors over all ranks, times `scale`."""
        return self._gatherer.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors padded along `dim` to the size of the largest of all ranks."""
        return self._gatherer.pad(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """A `with` block in which `even_batches` decides whether loaders give every rank equally many batches.

        Ranks must call backward equally often, whatever the strategy, so `even_batches=False` is for evaluation only.
        """
        samplers: list[Any] = [loader.batch_sampler for loader in self._dataloaders]
        samplers = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
        before = [sampler.even_batches for sampler in samplers]
        if even_batches is False and self.num_processes > 1 and any(model.training for model in self._models):
            raise TrainingError(
                "join_uneven_inputs(even_batches=False) cannot train: other ranks would wait for one without "
                "batches. Leave even_batches on; gather_for_metrics drops the repeated samples"
            )
        for sampler in samplers:
            sampler.even_batches = sampler.even_batches if even_batches is None else even_batches
        try:
            yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value


def _gradient_state(steps: int, plugin: GradientAccumulationPlugin | None, configured: int | None) -> GradientState:
    if plugin is not None and steps != 1:
        problem = "is set beside gradient_accumulation_plugin"
        raise ConfigError(Problem("gradient_accumulation_steps", problem, "Set num_steps of the plugin."))
    plugin = plugin or GradientAccumulationPlugin(num_steps=steps)
    if configured is not None and plugin.num_steps not in (1, configured):
        problem = f"{plugin.num_steps}, but {configured} in the DeepSpeed configuration"
        raise ConfigError(Problem("gradient_accumulation_steps", problem, "Set it once, or the same in both places."))
    return GradientState(
        num_steps=configured or step_count(plugin.num_steps),
        adjust_scheduler=plugin.adjust_scheduler,
        sync_with_dataloader=plugin.sync_with_dataloader,
        sync_each_batch=plugin.sync_each_batch,
    )
