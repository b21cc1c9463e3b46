"""The Trainer's Accelerator: Accelerate prepares loaders and gathers metrics, Plait prepares model and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config import RunConfig
from plait.distributed import World, open_world
from plait.engine import LoopEngine
from plait.errors import ModelError
from plait.frontends.accelerate import Gatherer, PreparedModel, PreparedOptimizer, backward, build_engine
from plait.precision import make_policy

# Imported by name: it has no types, and is not always installed.
_accelerate: Any = import_module("accelerate")
_DistributedType: Any = import_module("accelerate.utils").DistributedType


class TrainerAccelerator(_accelerate.Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` that prepares a model and its optimizer as one of Plait's engines."""

    def __init__(self, config: RunConfig, **kwargs: Any) -> None:
        # The engine sets the precision, so Accelerate must add neither autocast nor a loss scaler.
        super().__init__(**{**kwargs, "mixed_precision": "no"})
        self.config = config
        self.world: World = open_world(config)
        policy = make_policy(config.precision)
        self._dtype = policy.compute if policy.mixed else None
        self._prepared_model: PreparedModel | None = None
        """The prepared model, which keeps its engine when `train` is called again."""
        self.trained_names: list[list[str]] = []
        """The names of the parameters of each optimizer group: the Trainer's optimizer files only number them."""

    @property
    def distributed_type(self) -> Any:
        """The type of plain data parallelism, or `NO`, for any strategy: the Trainer must not handle sharding."""
        if self.num_processes == 1:
            return _DistributedType.NO
        return _DistributedType.MULTI_CPU if self.device.type == "cpu" else _DistributedType.MULTI_GPU

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return a prepared model. It is sharded when its optimizer is prepared; one for evaluation stays unsharded."""
        if isinstance(model, PreparedModel):
            return model
        if self._prepared_model is not None and self._prepared_model.module is model:
            if not any(known is self._prepared_model for known in self._models):
                self._models.append(self._prepared_model)
            return self._prepared_model
        prepared = PreparedModel(model, self.device, self._dtype)
        if evaluation_mode:
            prepared.to_device()
        self._models.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Create the engine of the optimizer's model, and return the optimizer, stepped by the engine."""
        if isinstance(optimizer, PreparedOptimizer):
            self._optimizers.append(optimizer)
            return optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owners = [model for model in self._models if isinstance(model, PreparedModel) and model.owns(params)]
        if len(owners) != 1:
            raise ModelError(f"the optimizer's parameters belong to {len(owners)} prepared models, expected one")
        owner = owners[0]
        names = {id(param): name for name, param in owner.module.named_parameters()}
        groups = optimizer.param_groups
        self.trained_names = [[names.get(id(param), "") for param in group["params"]] for group in groups]
        # The Trainer computes the loss from the outputs, see `loss_of_outputs`.
        engine = build_engine(self.config, self.world, owner.module, optimizer, self.print, replicate_vocabulary=False)
        owner.bind(engine, None)
        self._prepared_model = owner
        prepared = PreparedOptimizer(optimizer, owners, self.gradient_state)
        self._optimizers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader whose batches are split over the data-parallel ranks."""
        layout = self.world.layout
        if layout.data_parallel == layout.size:
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        options = self.dataloader_config
        prepared = _accelerate.data_loader.prepare_data_loader(
            data_loader,
            self.device,
            num_processes=layout.data_parallel,
            process_index=self.world.data_rank,
            split_batches=options.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=options.even_batches,
            use_seedable_sampler=options.use_seedable_sampler,
            data_seed=options.data_seed,
            non_blocking=options.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of all data-parallel ranks, without repeated samples."""
        if self.world.layout.data_parallel == self.world.size:
            return super().gather_for_metrics(input_data, use_gather_object)
        return Gatherer(self.world).gather_for_metrics(input_data, self.gradient_state, as_objects=use_gather_object)

    @property
    def trained(self) -> PreparedModel | None:
        """The prepared model that has an engine; None until its optimizer is prepared."""
        return next((model for model in self._models if getattr(model, "engine", None) is not None), None)

    @property
    def engine(self) -> LoopEngine:
        """The engine of the model."""
        assert self.trained is not None
        assert self.trained.engine is not None
        return self.trained.engine

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward from this rank's loss of one micro-batch."""
        kwargs.pop("scale_wrt_gas", None)
        trained = self.trained
        assert trained is not None
        self.engine.accumulation = self.gradient_accumulation_steps
        backward([self.engine], loss, last=[trained.syncs and self.sync_gradients], **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A `with` block in which gradients accumulate on this rank, without reduction over ranks."""
        assert isinstance(model, PreparedModel)
        before, model.syncs = model.syncs, False
        try:
            yield
        finally:
            model.syncs = before

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the global gradient norm in the next step; return the norm before clipping, on the device."""
        return self.engine.clip_grad_norm(float(max_norm))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step overflowed, so that the Trainer does not step its schedule."""
        return any(optimizer.overflowed for optimizer in self._optimizers)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the model without its wrapper."""
        return model.module if isinstance(model, PreparedModel) else super().unwrap_model(model, *args, **kwargs)
