"""The engine `deepspeed`: `deepspeed.initialize` trains the model of a run description."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from plait.config import RunConfig, as_fp16_section, check_library, config_value, resolve_batch
from plait.distributed import World, all_gather_flat, export_ranks, open_group_of_one, seed_everything
from plait.engine.foreign import BuiltModel, EvenNormalizer, ForeignEngine, ForeignStates, PlainStates, build_full_model
from plait.engine.forward import LogFunction
from plait.engine.loss import LossNormalizer
from plait.engine.preparation import Preparation
from plait.errors import CheckpointError, ConfigError, Problem
from plait.optim import grad_norm
from plait.precision import DTYPES, FP32_MODULES
from plait.torch_internals import foreach_mul_

_SAID_ELSEWHERE = ("optimizer", "steps_per_print", "bfloat16")


def describe(config: RunConfig, ranks: int, accumulation: int) -> dict[str, Any]:
    """Return a complete ds_config: `strategy.config`, with the keys that follow from the rest of the run description.

    If both contain a key, their values agree: `config/rules/engines.py` checks it. Where a default of DeepSpeed differs
    from Plait's, Plait's is written explicitly.
    """
    strategy, precision = config.strategy, config.precision
    given = {key: value for key, value in (strategy.config or {}).items() if key not in _SAID_ELSEWHERE}
    ds_config: dict[str, Any] = copy.deepcopy(given)
    micro = resolve_batch(config.batch, ranks).micro
    ds_config |= {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * ranks,
        "gradient_clipping": config.train.clip_norm or 0.0,  # DeepSpeed's default is 1
        "bf16": {**_section(ds_config, "bf16"), "enabled": precision.compute == "bf16"},
        "fp16": _fp16(ds_config, config),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    zero = ds_config["zero_optimization"] = {**_section(ds_config, "zero_optimization"), "stage": strategy.stage}
    if strategy.stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is None:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    if precision.compute in ("bf16", "fp16"):
        ds_config.setdefault("communication_data_type", precision.reduce)
        if strategy.stage > 0:
            ds_config["data_types"] = {"grad_accum_dtype": precision.reduce, **_section(ds_config, "data_types")}
    return ds_config


def _section(ds_config: dict[str, Any], key: str) -> dict[str, Any]:
    section = ds_config.get(key)
    return {name: value for name, value in section.items() if value != "auto"} if isinstance(section, dict) else {}


def _fp16(ds_config: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    enabled = config.precision.compute == "fp16"
    scaling = as_fp16_section(config.precision.scaler) if enabled else {}
    return {**_section(ds_config, "fp16"), **scaling, "enabled": enabled}


# [Note: where a correction goes] Two factors must still be applied to DeepSpeed's gradients: the correction of the loss
# normalizer, and the number of ranks, since DeepSpeed averages over ranks while the global mean is the sum of all
# ranks' normalized losses. ZeRO's `step` divides gradients, and their norm, by the loss scale. So during `step` the
# loss scale is set to the actual one divided by both factors. This also prevents DeepSpeed from dividing by the new
# scale in steps that double it. DeepSpeed's other optimizers do not divide by the scale: there the loss is multiplied
# by the number of ranks, and the gradients by the correction.
#
# [Note: how clean steps are counted]
# Plait doubles the loss scale after `precision.scaler.window` steps without overflow (clean steps). DeepSpeed 0.19.8
# needs one more after the start and after each overflow. So `last_overflow_iter` is decreased by one there.


class RealDeepSpeedEngine(ForeignEngine):
    """Trains with the engine of `deepspeed.initialize`: backward, gradient reduction, clipping, update."""

    def __init__(self, library_engine: Any, states: ForeignStates, built: BuiltModel, given: Preparation) -> None:
        self._library_engine = library_engine
        self._scales = (
            hasattr(self._library_engine.optimizer, "override_loss_scale") and self._library_engine.zero_optimization()
        )
        normalizer = LossNormalizer if self._scales else EvenNormalizer
        super().__init__(library_engine, states, built, given, normalizer=normalizer)
        dynamic = self._library_engine.fp16_enabled() and self._library_engine.dynamic_loss_scale()
        self._dynamic_scaler = self._library_engine.optimizer.loss_scaler if dynamic else None
        if self._dynamic_scaler is not None:
            self._dynamic_scaler.last_overflow_iter -= 1  # see [Note: how clean steps are counted]

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        # See [Note: where a correction goes].
        self._library_engine.set_gradient_accumulation_boundary(last)
        self._library_engine.backward(loss if self._scales else loss * self.world.size, scale_wrt_gas=False)

    def _update(self, correction: float) -> tuple[float, bool]:
        """Update the weights; return the gradient norm, and whether it skipped. [Note: where a correction goes]"""
        if self._scales:
            return self._update_scaled(correction)
        grads = self._whole_gradients()
        if grads is None:
            for flat in self._library_engine.optimizer.fp32_groups_gradients_flat if correction != 1.0 else ():
                flat.mul_(correction)
            self._library_engine.step()
            return self._outcome()
        if correction != 1.0:
            foreach_mul_(grads, correction)
        norm = grad_norm(grads)
        skipped = self._guard.enabled and not math.isfinite(norm)
        if skipped:
            self._library_engine.zero_grad()
        else:
            self._library_engine.step()
        return norm, skipped

    def _update_scaled(self, correction: float) -> tuple[float, bool]:
        wrapper = self._library_engine.optimizer
        wrapper.override_loss_scale(wrapper.loss_scale / (correction * self.world.size))
        try:
            self._library_engine.step()
        finally:
            wrapper.custom_loss_scaler = False
        norm, skipped = self._outcome()
        if skipped and self._dynamic_scaler is not None:
            self._dynamic_scaler.last_overflow_iter -= 1
        return norm, skipped

    def _outcome(self) -> tuple[float, bool]:
        norm = float(self._library_engine.get_global_grad_norm())
        return norm, not self._library_engine.was_step_applied()

    def _whole_gradients(self) -> list[Tensor] | None:
        """Return every trained parameter's gradient at stage 0; None with ZeRO, which keeps them in its own buffers."""
        if self._library_engine.zero_optimization():
            return None
        params = [self._params[name] for name in self._built.trained]
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return [param.grad for param in params if param.grad is not None]

    # ---- the loss scaler

    def _scaler_state(self) -> dict[str, float] | None:
        if not self._library_engine.fp16_enabled():
            return None
        state, scaler = {"scale": float(self._library_engine.optimizer.loss_scaler.cur_scale)}, self._dynamic_scaler
        if scaler is None:
            return {**state, "clean_steps": 0, "tolerance": 1}
        clean = scaler.cur_iter - scaler.last_overflow_iter - 2
        return {**state, "clean_steps": clean, "tolerance": scaler.cur_hysteresis}

    def _restore_scaler(self, state: Mapping[str, float]) -> None:
        if self._library_engine.fp16_enabled():
            self._library_engine.optimizer.loss_scaler.cur_scale = float(state["scale"])
        if self._dynamic_scaler is not None:
            self._dynamic_scaler.cur_iter, self._dynamic_scaler.last_overflow_iter = int(state["clean_steps"]), -2
            self._dynamic_scaler.cur_hysteresis = int(state["tolerance"])


# Importing the library: only when it is used, for the run's device, and with its logger redirected.


_EXPECTED = ("untested optimizer", "OVERFLOW")
"""Substrings of warnings that are not shown: they are about what Plait does on purpose, or logs itself."""


class _WarningHandler(logging.Handler):
    """Passes DeepSpeed's warnings to the run's log, each once."""

    def __init__(self, log: LogFunction) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._logged: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Log the warning, unless it is expected or was logged before."""
        text = record.getMessage()
        if text not in self._logged and not any(expected in text for expected in _EXPECTED):
            self._logged.add(text)
            self._log(f"deepspeed: {text}")


def load_deepspeed(world: World, log: LogFunction) -> Any:
    """Import `deepspeed`, initialize its process groups for `world`, and return the module."""
    check_library("deepspeed")
    export_ranks(world.ranks)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # on import it warns about its choice of device, which is set below
    try:
        deepspeed = importlib.import_module("deepspeed")
        if world.device.type == "cpu":
            _use_the_cpu(deepspeed)
    finally:
        logging.disable(before)
    logger = logging.getLogger("DeepSpeed")
    logger.handlers[:] = [_WarningHandler(log)] if world.is_main else [logging.NullHandler()]
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    open_group_of_one(world.device)  # without a process group, DeepSpeed would use MPI to create one
    # Without this call, DeepSpeed reports one rank.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _use_the_cpu(deepspeed: Any) -> None:
    accelerator = importlib.import_module("deepspeed.accelerator")
    cpu_accelerator = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
    if not isinstance(accelerator.get_accelerator(), cpu_accelerator):
        accelerator.set_accelerator(cpu_accelerator())
    # DeepSpeed would compile this extension at the start; gloo does its collectives here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def widen_norms(model: nn.Module) -> None:
    """Let norms with running statistics compute with parameters cast to fp32.

    DeepSpeed casts all parameters but not buffers, and batch norms raise an error if the two differ in dtype.
    """
    for module in model.modules():
        if isinstance(module, FP32_MODULES):
            module.forward = partial(_with_wide_parameters, module)


def _with_wide_parameters(module: nn.Module, *args: Any) -> Any:
    kept = module._parameters
    module._parameters = {key: None if param is None else param.float() for key, param in kept.items()}  # type: ignore[misc]
    try:
        return type(module).forward(module, *args)
    finally:
        module._parameters = kept


# Where DeepSpeed keeps weights and optimizer states: one class per ZeRO stage.
#
# All read and write full tensors; see [Note: states by way of full tensors], `engine/foreign.py`. They read the same
# attributes as DeepSpeed's `safe_get_full_*`. Those functions cannot be used: they miss the state of a parameter group
# that was first updated in a later step than the first group, and fail on a ZeRO-3 parameter whose number of elements
# is not a multiple of the number of ranks.


def states_of(wrapper: Any, stage: int) -> ForeignStates:
    """Return an object that reads and writes the states of `wrapper`, DeepSpeed's ZeRO or mixed-precision optimizer."""
    optimizer: Optimizer = getattr(wrapper, "optimizer", wrapper)
    if stage == 3:
        return PartitionedStates(wrapper, optimizer)
    if stage > 0:
        return FlatStates(wrapper, optimizer)
    groups = zip(getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ()), strict=True)
    masters = {id(param): master for params, masters in groups for param, master in zip(params, masters, strict=True)}
    optimizer.state.clear()  # in bf16 DeepSpeed has stepped once to create states, and the step count would be off by 1
    return PlainStates(optimizer, masters)


class FlatStates(ForeignStates):
    """ZeRO stages 1 and 2: each parameter group is one flat vector, of which each rank has a partition."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.wrapper = wrapper
        bf16_wrapper = hasattr(wrapper, "bf16_groups")  # stage 1 in bf16 has a wrapper of its own
        groups = wrapper.bf16_groups if bf16_wrapper else wrapper.bit16_groups
        self._group_of = {id(param): index for index, group in enumerate(groups) for param in group}
        self._list = "fp32_groups_flat_partition" if bf16_wrapper else "single_partition_of_fp32_groups"

    def optimizer_tensor(self, param: Any) -> Tensor:
        """Return this rank's partition of the parameter's group."""
        partition: Tensor = getattr(self.wrapper, self._list)[self._group_of[id(param)]]
        return partition

    def read(self, param: Any, key: str | None) -> Tensor:
        """Return the full tensor: an all-reduce of zeros with each rank's fragment filled in."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            return scalar
        full = torch.zeros(param.numel(), device=param.device)
        piece = self._piece(param, key)
        if piece is not None:
            at = param._hp_mapping.lp_fragment_address
            full.narrow(0, at.start, at.numel).copy_(piece)
        dist.all_reduce(full)
        return full.view(param.shape)

    def write(self, param: Any, key: str | None, full: Tensor) -> None:
        """Write this rank's fragment."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            scalar.copy_(full)
            return
        piece = self._piece(param, key)
        if piece is not None:
            at = param._hp_mapping.lp_fragment_address
            piece.copy_(full.flatten().narrow(0, at.start, at.numel))

    def _piece(self, param: Any, key: str | None) -> Tensor | None:
        if param._hp_mapping is None:
            return None
        at = param._hp_mapping.hp_fragment_address
        optimizer_tensor = self.optimizer_tensor(param).detach()
        source: Tensor = optimizer_tensor if key is None else self.optimizer.state[self.optimizer_tensor(param)][key]
        return source.narrow(0, at.start, at.numel)

    def publish(self) -> None:
        """Let DeepSpeed round its fp32 weights into the model's weights."""
        self.wrapper.update_lp_params()


class PartitionedStates(ForeignStates):
    """ZeRO stage 3: each parameter is padded and partitioned over ranks; partitions may be in files."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.wrapper = wrapper

    def _group_index(self, param: Any) -> int:
        index: int = self.wrapper.grad_position[self.wrapper.get_param_id(param)][0]
        return index

    def optimizer_tensor(self, param: Any) -> Tensor:
        """Return the flat vector that contains this rank's partition of the parameter, and those of others."""
        optimizer_tensor: Tensor = self.wrapper.fp32_partitioned_groups_flat[self._group_index(param)]
        return optimizer_tensor

    def read(self, param: Any, key: str | None) -> Tensor:
        """Return the full tensor: gather the partitions of all ranks, and cut off the padding."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            return scalar
        mine: Tensor = self.wrapper.get_local_fp32_param(param, key).detach().contiguous()
        every = mine.new_empty(mine.numel() * dist.get_world_size())
        all_gather_flat(every, mine)
        return every[: param.ds_numel].view(param.ds_shape)

    def write(self, param: Any, key: str | None, full: Tensor) -> None:
        """Write this rank's partition; for a weight, also that of the weights that the model computes with."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            scalar.copy_(full)
            return
        self.wrapper.set_local_hp_param(self._partition(param, full), param, key)
        if key is None:
            self.write_model_weight(param, full)

    def write_model_weight(self, param: Any, full: Tensor) -> None:
        """Write this rank's partition; the full parameter too if it is gathered, as small ones are between steps."""
        values, partition = self._partition(param, full), param.ds_tensor
        if partition.status.name == "AVAILABLE":
            partition.data.copy_(values)
        else:
            param.nvme_swapper.swap_out_partitioned_params(dst_fp16_params=[param], src_fp32_params=[values])
        if param.ds_status.name == "AVAILABLE":
            param.data.copy_(full)

    def _partition(self, param: Any, full: Tensor) -> Tensor:
        size, rank = param.ds_tensor.ds_numel, dist.get_rank()
        filled = F.pad(full.flatten(), (0, size * dist.get_world_size() - full.numel()))
        return filled.narrow(0, size * rank, size)

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, full: bool) -> None:
        """Allocate a state; raise `CheckpointError` with NVMe offload: DeepSpeed creates files in the first step."""
        if getattr(self.wrapper, "swap_optimizer", False):
            raise CheckpointError(
                "DeepSpeed creates the files of its NVMe offload at the first step, and optimizer state cannot be "
                "loaded before it: resume with offload_optimizer.device: cpu, or leave the state out with "
                'checkpoint.partial: ["optim.*"]'
            )
        super().allocate(param, key, shape, dtype, full=full)


def prepare_deepspeed(given: Preparation) -> RealDeepSpeedEngine:
    """Prepare a model for training with DeepSpeed; return its engine."""
    config, world = given.config, given.world
    deepspeed = load_deepspeed(world, given.log)
    ds_config = describe(config, world.size, given.accumulation)
    if config.precision.compute == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        message = f"DeepSpeed has no fp16 on this {world.device.type}"
        raise ConfigError(Problem("precision.compute", message, "Write `bf16`, or use `engine: native`."))
    _check_files(deepspeed, ds_config)
    built = build_full_model(given)
    if DTYPES[config.precision.compute].itemsize < 4:
        widen_norms(built.module)
    library_engine = _initialize(deepspeed, built, ds_config, config)
    states = states_of(library_engine.optimizer, config.strategy.stage)
    seed_everything(config.seed, world.rank)
    engine = RealDeepSpeedEngine(library_engine, states, built, given)
    engine.restore_originals()
    return engine


def _initialize(deepspeed: Any, built: BuiltModel, ds_config: dict[str, Any], config: RunConfig) -> Any:
    try:
        with redirect_stdout(StringIO()):  # some of its memory reports are printed, whatever the log level
            if config.strategy.stage == 3:
                # Partition parameter by parameter; otherwise the full model would be moved to the device first.
                for param in built.module.parameters():
                    param.data = param.data.to(DTYPES[config.precision.compute])
                tier = config_value(ds_config, "zero_optimization", "offload_param", "device")
                deepspeed.zero.Init(
                    module=built.module, config_dict_or_path=ds_config, remote_device="nvme" if tier == "nvme" else None
                )
            library_engine, *_ = deepspeed.initialize(
                model=built.module, optimizer=built.optimizer(config), config=ds_config
            )
    except ValidationError as error:
        raise ConfigError([_problem(entry["loc"], entry["msg"]) for entry in error.errors()]) from None
    return library_engine


def _check_files(deepspeed: Any, ds_config: dict[str, Any]) -> None:
    """Raise `ConfigError` for NVMe offload if DeepSpeed cannot build its operation for reading files."""
    for section in ("offload_optimizer", "offload_param"):
        if config_value(ds_config, "zero_optimization", section, "device") != "nvme":
            continue
        if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
            message = "nvme needs DeepSpeed's operation async_io, which cannot be built here: libaio is missing"
            remedy = "Install libaio-dev (Debian) or libaio-devel, or write `device: cpu`."
            raise ConfigError(Problem(f"strategy.config.zero_optimization.{section}.device", message, remedy))


def _problem(location: tuple[int | str, ...], message: str) -> Problem:
    path = ".".join(map(str, ("strategy", "config", *location)))
    return Problem(path, f"DeepSpeed refuses it: {message}", "See DeepSpeed's configuration documentation.")
