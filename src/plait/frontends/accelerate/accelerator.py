"""`Accelerator`: Accelerate's loop on Plait's engine."""

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

from plait.distributed import World, open_world, told_by_accelerate
from plait.engine import LoopEngine
from plait.errors import ConfigError, ModelError, Problem, TrainingError
from plait.frontends.accelerate import state_files
from plait.frontends.accelerate.loader import (
    BatchShare,
    GradientState,
    PreparedLoader,
    choose_delivery,
    seed_sampler,
    skip_first_batches,
    step_count,
)
from plait.frontends.accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from plait.frontends.accelerate.prepared import (
    DummyOptim,
    DummyScheduler,
    Gatherer,
    PreparedModel,
    PreparedOptimizer,
    PreparedScheduler,
    make_optimizer,
    make_scheduler,
    refuse_two,
)
from plait.frontends.accelerate.prepared_engine import Joint, backward, build_engine
from plait.frontends.accelerate.process import Processes
from plait.frontends.accelerate.settings import build_config, heed_launcher, plugin_of
from plait.frontends.accelerate.state import remember
from plait.frontends.accelerate.tracking import Trackers, choose_trackers
from plait.frontends.deepspeed import Recipe, Scheduler
from plait.precision import make_policy

# The part of an `Accelerator` that spreads what a script has made.


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
        self.config, self.key_report = build_config(
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


# The part of an `Accelerator` that writes and reads: checkpoints, weights, and what trackers are told.


class StateFiles(Preparing):
    """Saves what was prepared, and goes on from it."""

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects with `state_dict` and `load_state_dict` saved and loaded too."""
        misfits = [each for each in objects if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))]
        if misfits:
            names = ", ".join(type(each).__name__ for each in misfits)
            raise ModelError(f"{names} cannot be registered: state_dict and load_state_dict are needed")
        self._custom_objects.extend(objects)

    def save_state(self, output_dir: str | Path | None = None, **_: Any) -> str:
        """Write everything that was prepared or registered as a checkpoint of Plait's; returns its folder."""
        folder = state_files.next_folder(self.project_configuration, output_dir, self.world)
        state_files.save(self._belongings(), folder)
        if self._save_hooks:
            # As in Accelerate: hooks take from this list what they have saved themselves, and what is spread is not in
            # it. Here everything is saved, whatever they take.
            whole = [state_files.whole(model, self.world) for model in self._models if not state_files.is_spread(model)]
            for hook in self._save_hooks:
                hook([model.module for model in self._models], whole, str(folder))
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None, **_: Any) -> None:
        """Go on from a checkpoint that `save_state` wrote, under any strategy and number of ranks."""
        folder = state_files.last_folder(self.project_configuration, input_dir, self.world)
        for hook in self._load_hooks:
            hook([model.module for model in self._models], str(folder))
        state_files.load(self._belongings(), folder)

    def register_save_state_pre_hook(self, hook: Any) -> state_files.Removable:
        """Call `hook(models, weights, folder)` with every `save_state`, once the folder is complete."""
        return state_files.Removable(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Any) -> state_files.Removable:
        """Call `hook(models, folder)` before every `load_state`."""
        return state_files.Removable(self._load_hooks, hook)

    def _belongings(self) -> state_files.Belongings:
        return state_files.Belongings(
            self.config,
            self.world,
            self._optimizers,
            self._schedulers,
            self._dataloaders,
            self._custom_objects,
            self.gradient_state,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole weights on the host; on rank 0 alone where they are spread. Every rank must ask."""
        return state_files.whole(model, self.world)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the whole weights, as `model.safetensors` or in several such files with an index."""
        state = state_files.whole(model, self.world)
        if self.is_main_process:
            state_files.write(state, Path(save_directory), max_shard_size, safe=safe_serialization)
        self.wait_for_everyone()

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object from the main process."""
        if self.is_main_process:
            state_files.write_object(obj, Path(f), safe=safe_serialization)

    def skip_first_batches(self, dataloader: PreparedLoader, num_batches: int | None = None) -> PreparedLoader:
        """The pass that a loader is in, without its first batches.

        Without a number: as many as the loaded state had seen, with whatever number of ranks it was saved.
        """
        return skip_first_batches(dataloader, num_batches)

    # ---- trackers

    @property
    def project_dir(self) -> str | Path | None:
        """Where the script writes."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """How many states were saved."""
        return self.project_configuration.iteration

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open what `log_with` named. `init_kwargs["wandb"]` goes to `wandb.init`."""
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Write numbers of one step, from the main process."""
        self._trackers.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """What `log_with` named, by its name; with `unwrap`, what it writes with."""
        return self._trackers.get(name, unwrap=unwrap)

    @property
    def trackers(self) -> list[Any]:
        """Everything that `log_with` named and `init_trackers` has opened."""
        return self._trackers.all

    def end_training(self) -> None:
        """Close the trackers, and leave the other ranks."""
        self._trackers.finish()
        self.world.close()


class Accelerator(StateFiles):
    """The loop of an Accelerate script, spread as Plait spreads a run.

    Arguments are Accelerate's. `config_file` is an `accelerate` YAML; `sections` are sections of a run description
    in Plait's own words, over everything else (`sections={"strategy": "zero3"}`). `key_report` has the outcome of
    every key.
    """

    # ---- one step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward through the mean loss of one micro-batch, divided by `gradient_accumulation_steps`."""
        models = [model for model in self._models if model.engine is not None and model.in_graph]
        engines: dict[int, tuple[LoopEngine, bool]] = {}
        for model in models:
            engine = model.engine
            assert engine is not None
            engine.accumulation = self.gradient_accumulation_steps
            engines[id(engine)] = (
                engine,
                self.sync_gradients and all(each.syncs for each in models if each.engine is engine),
            )
        if not engines:
            raise TrainingError(
                "backward was called, but no prepared model has been called since the last step; call what "
                "`prepare` returned, not the model that it was given"
            )
        parts = list(engines.values())
        self.gradient_state.stepped = False
        backward([engine for engine, _ in parts], loss, last=[last for _, last in parts], **kwargs)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch. Optimizers step after `gradient_accumulation_steps` of them, and after the last one."""
        self.gradient_state.advance()
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(nullcontext() if self.sync_gradients else self.no_sync(model))
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes inside are added up on this rank, and summed over ranks by one that follows."""
        prepared = [each for each in self._models if each is model or each.module is model]
        before = [each.syncs for each in prepared]
        for each in prepared:
            each.syncs = False
        try:
            yield
        finally:
            for each, value in zip(prepared, before, strict=True):
                each.syncs = value

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the global norm in the step that follows; returns the norm before, on the device, without waiting for
        it. Does nothing while accumulating."""
        if norm_type != 2:
            raise TrainingError(f"clip_grad_norm_ takes the 2-norm here, not norm_type={norm_type}")
        if not self.sync_gradients:
            return None
        engine = self._engine_of(parameters)
        return None if engine is None else engine.clip_grad_norm(float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element in the step that follows."""
        engine = self._engine_of(parameters) if self.sync_gradients else None
        if engine is not None:
            engine.clip_grad_value(clip_value)

    def _engine_of(self, parameters: Any) -> LoopEngine | None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        models = [model for model in self._models if model.engine is not None and model.owns(given)]
        engines = {id(model.engine): model.engine for model in models}
        if len(engines) != 1:
            raise TrainingError(
                f"these parameters belong to {len(engines)} optimizers: call this once for each prepared model, with "
                "its model.parameters()"
            )
        engine = next(iter(engines.values()))
        assert engine is not None
        if sum(param.requires_grad for param in given) < len(engine.views.params):
            raise TrainingError(
                "gradients are clipped together, over all parameters of an optimizer, and some are missing here: pass "
                "model.parameters() of every model that it trains"
            )
        return engine if engine.pending else None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing is left to do: norms and clipping are of the unscaled gradients, and so is the update."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the gradients of the micro-batch at hand complete a step."""
        return self.gradient_state.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, count: int) -> None:
        self.gradient_state.num_steps = step_count(count)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was left out because something was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16` or `fp16`."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self._dtype, "no") if self._dtype else "no"

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """For computations outside the model, in the precision of the run."""
        handler = autocast_handler or self._autocast
        if self._dtype is None or not handler.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype, cache_enabled=handler.cache_enabled)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """torch's profiler around a block, as the handler says, or the one in `kwargs_handlers`."""
        handler = profile_handler or self._profile
        with handler.build() as profiler:
            yield profiler
        handler.export(profiler, self.process_index)

    # ---- over ranks

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks, one after another along the first dimension."""
        return self._gatherer.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same, without the samples that were repeated to fill up the last round of batches."""
        return self._gatherer.gather_for_metrics(input_data, self.gradient_state, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over all ranks."""
        return self._gatherer.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors as long as the longest of all ranks."""
        return self._gatherer.pad(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Inside, loaders fill up their last round, or not, as `even_batches` says.

        Ranks must call backward equally often: what a rank without a batch would have to do depends on the
        strategy. So `even_batches=False` is for evaluation.
        """
        samplers: list[Any] = [loader.batch_sampler for loader in self._dataloaders]
        samplers = [each for each in samplers if hasattr(each, "even_batches")]
        before = [each.even_batches for each in samplers]
        if even_batches is False and self.num_processes > 1 and any(model.training for model in self._models):
            raise TrainingError(
                "join_uneven_inputs(even_batches=False) cannot train: a rank that has run out of batches would be "
                "missed by the others. Leave even_batches on; gather_for_metrics drops the repeated samples"
            )
        for each in samplers:
            each.even_batches = each.even_batches if even_batches is None else even_batches
        try:
            yield
        finally:
            for each, value in zip(samplers, before, strict=True):
                each.even_batches = value
