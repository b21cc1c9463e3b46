"""From a run description to an engine that DeepSpeed trains."""

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
from plait.engine.foreign import Built, EvenNormalizer, ForeignEngine, ForeignStates, PlainStates, build_whole
from plait.engine.forward import Say
from plait.engine.loss import LossNormalizer
from plait.engine.preparation import Preparation
from plait.errors import CheckpointError, ConfigError, Problem
from plait.optim import grad_norm
from plait.precision import DTYPES, FP32_MODULES
from plait.torch_internals import foreach_mul_

# A run description in DeepSpeed's words: the user's own `config`, completed from the rest of the run.


_SAID_ELSEWHERE = ("optimizer", "steps_per_print", "bfloat16")


def describe(config: RunConfig, ranks: int, accumulation: int) -> dict[str, Any]:
    """A complete ds_config. What both say agrees; see `config/rules/engines.py`.

    Whatever DeepSpeed would choose by itself and Plait's engine chooses otherwise is written out.
    """
    strategy, precision = config.strategy, config.precision
    given = {key: value for key, value in (strategy.config or {}).items() if key not in _SAID_ELSEWHERE}
    found: dict[str, Any] = copy.deepcopy(given)
    micro = resolve_batch(config.batch, ranks).micro
    found |= {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * ranks,
        "gradient_clipping": config.train.clip_norm or 0.0,  # absent, it would be 1
        "bf16": {**_section(found, "bf16"), "enabled": precision.compute == "bf16"},
        "fp16": _fp16(found, config),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    zero = found["zero_optimization"] = {**_section(found, "zero_optimization"), "stage": strategy.stage}
    if strategy.stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is None:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    if precision.compute in ("bf16", "fp16"):
        found.setdefault("communication_data_type", precision.reduce)
        if strategy.stage > 0:
            found["data_types"] = {"grad_accum_dtype": precision.reduce, **_section(found, "data_types")}
    return found


def _section(found: dict[str, Any], key: str) -> dict[str, Any]:
    section = found.get(key)
    return {name: value for name, value in section.items() if value != "auto"} if isinstance(section, dict) else {}


def _fp16(found: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    enabled = config.precision.compute == "fp16"
    scaling = as_fp16_section(config.precision.scaler) if enabled else {}
    return {**_section(found, "fp16"), **scaling, "enabled": enabled}


# The engine of a run that DeepSpeed trains.
#
# [Note: where a correction goes] ZeRO divides gradients, and their norm, by the loss scale in its step. So for the time
# of the step the scale is the one that the gradients were multiplied by, over the correction; and over the number of
# ranks, since DeepSpeed takes the mean over ranks of what are parts of a mean already. That also holds on to the scale
# on the steps that make it grow, where DeepSpeed would already divide by the next one. Its other optimizers have no
# such place: there the loss is multiplied by the number of ranks, and the gradients by the correction.
#
# [Note: how clean steps are counted]
# `precision.scaler.window` clean steps double the scale. DeepSpeed 0.19.8 waits for one more after the start and after
# each overflow. So the iteration of the last overflow is put one earlier there.


class RealDeepSpeedEngine(ForeignEngine):
    """Steps through `deepspeed.initialize`'s engine, which owns backward, reduction, clipping and update."""

    def __init__(self, library_engine: Any, states: ForeignStates, built: Built, given: Preparation) -> None:
        self._theirs = library_engine
        self._scales = hasattr(self._theirs.optimizer, "override_loss_scale") and self._theirs.zero_optimization()
        normalizer = LossNormalizer if self._scales else EvenNormalizer
        super().__init__(library_engine, states, built, given, normalizer=normalizer)
        moving = self._theirs.fp16_enabled() and self._theirs.dynamic_loss_scale()
        self._moving_scaler = self._theirs.optimizer.loss_scaler if moving else None
        if self._moving_scaler is not None:
            self._moving_scaler.last_overflow_iter -= 1  # see [Note: how clean steps are counted]

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        # See [Note: where a correction goes].
        self._theirs.set_gradient_accumulation_boundary(last)
        self._theirs.backward(loss if self._scales else loss * self.world.size, scale_wrt_gas=False)

    def _update(self, correction: float) -> tuple[float, bool]:
        """Step; see [Note: where a correction goes]."""
        if self._scales:
            return self._update_scaled(correction)
        grads = self._whole_gradients()
        if grads is None:
            for part in self._theirs.optimizer.fp32_groups_gradients_flat if correction != 1.0 else ():
                part.mul_(correction)
            self._theirs.step()
            return self._outcome()
        if correction != 1.0:
            foreach_mul_(grads, correction)
        norm = grad_norm(grads)
        skipped = self._guard.enabled and not math.isfinite(norm)
        if skipped:
            self._theirs.zero_grad()
        else:
            self._theirs.step()
        return norm, skipped

    def _update_scaled(self, correction: float) -> tuple[float, bool]:
        wrapper = self._theirs.optimizer
        wrapper.override_loss_scale(wrapper.loss_scale / (correction * self.world.size))
        try:
            self._theirs.step()
        finally:
            wrapper.custom_loss_scaler = False
        norm, skipped = self._outcome()
        if skipped and self._moving_scaler is not None:
            self._moving_scaler.last_overflow_iter -= 1
        return norm, skipped

    def _outcome(self) -> tuple[float, bool]:
        norm = float(self._theirs.get_global_grad_norm())
        return norm, not self._theirs.was_step_applied()

    def _whole_gradients(self) -> list[Tensor] | None:
        """At stage 0, every parameter's gradient; None where DeepSpeed keeps them elsewhere."""
        if self._theirs.zero_optimization():
            return None
        params = [self._params[name] for name in self._built.trained]
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return [param.grad for param in params if param.grad is not None]

    # ---- the loss scaler

    def _scaler_state(self) -> dict[str, float] | None:
        if not self._theirs.fp16_enabled():
            return None
        found, moving = {"scale": float(self._theirs.optimizer.loss_scaler.cur_scale)}, self._moving_scaler
        if moving is None:
            return {**found, "clean_steps": 0, "tolerance": 1}
        clean = moving.cur_iter - moving.last_overflow_iter - 2
        return {**found, "clean_steps": clean, "tolerance": moving.cur_hysteresis}

    def _restore_scaler(self, state: Mapping[str, float]) -> None:
        if self._theirs.fp16_enabled():
            self._theirs.optimizer.loss_scaler.cur_scale = float(state["scale"])
        if self._moving_scaler is not None:
            self._moving_scaler.cur_iter, self._moving_scaler.last_overflow_iter = int(state["clean_steps"]), -2
            self._moving_scaler.cur_hysteresis = int(state["tolerance"])


# The library itself: imported late, pointed at the right device, and kept from talking over the run's own log.


_EXPECTED = ("untested optimizer", "OVERFLOW")
"""Parts of warnings about what Plait does on purpose, or tells itself."""


class _Relay(logging.Handler):
    """Hands a library's warnings to the run's log, each once."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it, unless it is about what was meant or was told before."""
        text = record.getMessage()
        if text not in self._told and not any(part in text for part in _EXPECTED):
            self._told.add(text)
            self._say(f"deepspeed: {text}")


def load_deepspeed(world: World, say: Say) -> Any:
    """The package `deepspeed`, ready for `world`."""
    check_library("deepspeed")
    export_ranks(world.ranks)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what it says while it is imported is about devices, and is decided here
    try:
        deepspeed = importlib.import_module("deepspeed")
        if world.device.type == "cpu":
            _use_the_cpu(deepspeed)
    finally:
        logging.disable(before)
    logger = logging.getLogger("DeepSpeed")
    logger.handlers[:] = [_Relay(say)] if world.is_main else [logging.NullHandler()]
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    open_group_of_one(world.device)  # alone, DeepSpeed would look for MPI to make one
    # Without it, the first thing that asks DeepSpeed for the number of ranks is told one.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _use_the_cpu(deepspeed: Any) -> None:
    accelerator = importlib.import_module("deepspeed.accelerator")
    kind = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
    if not isinstance(accelerator.get_accelerator(), kind):
        accelerator.set_accelerator(kind())
    # It would be compiled at the start, for collectives that are gloo's here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# Modules that need fp32 inside a model that DeepSpeed has rounded.


def widen_norms(model: nn.Module) -> None:
    """Let modules with fp32 statistics compute with parameters of the same kind.

    DeepSpeed rounds every parameter and leaves buffers as they are, and batch norms refuse such a mixture.
    """
    for part in model.modules():
        if isinstance(part, FP32_MODULES):
            part.forward = partial(_with_wide_parameters, part)


def _with_wide_parameters(part: nn.Module, *args: Any) -> Any:
    kept = part._parameters
    part._parameters = {key: None if param is None else param.float() for key, param in kept.items()}  # type: ignore[misc]
    try:
        return type(part).forward(part, *args)
    finally:
        part._parameters = kept


# Where DeepSpeed keeps weights and optimizer states: one class for each of its ways.
#
# All give and take wholes; see [Note: states by way of wholes], `engine/foreign.py`. They look where DeepSpeed's own
# `safe_get_full_*` look. Those functions themselves find no state of a group that has not stepped in the same call as
# the first one, and fail on a ZeRO-3 parameter whose size does not divide by the number of ranks.


def states_of(wrapper: Any, stage: int) -> ForeignStates:
    """The states of `wrapper`, which is what DeepSpeed calls its optimizer."""
    optimizer: Optimizer = getattr(wrapper, "optimizer", wrapper)
    if stage == 3:
        return PartitionedStates(wrapper, optimizer)
    if stage > 0:
        return FlatStates(wrapper, optimizer)
    groups = zip(getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ()), strict=True)
    masters = {id(param): master for params, masters in groups for param, master in zip(params, masters, strict=True)}
    optimizer.state.clear()  # in bf16 DeepSpeed has stepped once, to make states, and its count would be one off
    return PlainStates(optimizer, masters)


class FlatStates(ForeignStates):
    """Stages 1 and 2: each group is one flat vector, of which a rank has one stretch."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.wrapper = wrapper
        own = hasattr(wrapper, "bf16_groups")  # stage 1 in bf16 has a wrapper of its own
        groups = wrapper.bf16_groups if own else wrapper.bit16_groups
        self._group_of = {id(param): index for index, group in enumerate(groups) for param in group}
        self._list = "fp32_groups_flat_partition" if own else "single_partition_of_fp32_groups"

    def home(self, param: Any) -> Tensor:
        """This rank's stretch of the parameter's group."""
        stretch: Tensor = getattr(self.wrapper, self._list)[self._group_of[id(param)]]
        return stretch

    def read(self, param: Any, key: str | None) -> Tensor:
        """The pieces of all ranks."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            return scalar
        whole = torch.zeros(param.numel(), device=param.device)
        piece = self._piece(param, key)
        if piece is not None:
            at = param._hp_mapping.lp_fragment_address
            whole.narrow(0, at.start, at.numel).copy_(piece)
        dist.all_reduce(whole)
        return whole.view(param.shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's piece of it."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            scalar.copy_(whole)
            return
        piece = self._piece(param, key)
        if piece is not None:
            at = param._hp_mapping.lp_fragment_address
            piece.copy_(whole.flatten().narrow(0, at.start, at.numel))

    def _piece(self, param: Any, key: str | None) -> Tensor | None:
        if param._hp_mapping is None:
            return None
        at = param._hp_mapping.hp_fragment_address
        home = self.home(param).detach()
        source: Tensor = home if key is None else self.optimizer.state[self.home(param)][key]
        return source.narrow(0, at.start, at.numel)

    def publish(self) -> None:
        """Let DeepSpeed round its fp32 weights into what computes."""
        self.wrapper.update_lp_params()


class PartitionedStates(ForeignStates):
    """Stage 3: of each parameter a rank has one stretch, the last ones filled up; perhaps in files."""

    def __init__(self, wrapper: Any, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.wrapper = wrapper

    def _place(self, param: Any) -> int:
        place: int = self.wrapper.grad_position[self.wrapper.get_param_id(param)][0]
        return place

    def home(self, param: Any) -> Tensor:
        """The vector that the parameter is updated in, with others."""
        home: Tensor = self.wrapper.fp32_partitioned_groups_flat[self._place(param)]
        return home

    def read(self, param: Any, key: str | None) -> Tensor:
        """The stretches of all ranks, without what fills up the last."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            return scalar
        mine: Tensor = self.wrapper.get_local_fp32_param(param, key).detach().contiguous()
        every = mine.new_empty(mine.numel() * dist.get_world_size())
        all_gather_flat(every, mine)
        return every[: param.ds_numel].view(param.ds_shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's stretch of it, also of what computes."""
        scalar = self._scalar(param, key)
        if scalar is not None:
            scalar.copy_(whole)
            return
        self.wrapper.set_local_hp_param(self._stretch(param, whole), param, key)
        if key is None:
            self.write_computing(param, whole)

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """This rank's stretch; the whole too where it is gathered, as small ones are between steps."""
        stretch, part = self._stretch(param, whole), param.ds_tensor
        if part.status.name == "AVAILABLE":
            part.data.copy_(stretch)
        else:
            param.nvme_swapper.swap_out_partitioned_params(dst_fp16_params=[param], src_fp32_params=[stretch])
        if param.ds_status.name == "AVAILABLE":
            param.data.copy_(whole)

    def _stretch(self, param: Any, whole: Tensor) -> Tensor:
        size, rank = param.ds_tensor.ds_numel, dist.get_rank()
        filled = F.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
        return filled.narrow(0, size * rank, size)

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, whole: bool) -> None:
        """Make room; refused where the states lie in files, which DeepSpeed makes at the first step."""
        if getattr(self.wrapper, "swap_optimizer", False):
            raise CheckpointError(
                "DeepSpeed makes the files of its NVMe offload at the first step, so no optimizer state can be put "
                "there before: resume with offload_optimizer.device: cpu, or leave the state out with "
                'checkpoint.partial: ["optim.*"]'
            )
        super().allocate(param, key, shape, dtype, whole=whole)


def prepare_deepspeed(given: Preparation) -> RealDeepSpeedEngine:
    """Make a model ready to train with DeepSpeed, as its configuration says."""
    config, world = given.config, given.world
    deepspeed = load_deepspeed(world, given.say)
    described = describe(config, world.size, given.accumulation)
    if config.precision.compute == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        message = f"DeepSpeed has no fp16 on this {world.device.type}"
        raise ConfigError(Problem("precision.compute", message, "Write `bf16`, or use `engine: native`."))
    _check_files(deepspeed, described)
    built = build_whole(given)
    if DTYPES[config.precision.compute].itemsize < 4:
        widen_norms(built.module)
    theirs = _initialize(deepspeed, built, described, config)
    states = states_of(theirs.optimizer, config.strategy.stage)
    seed_everything(config.seed, world.rank)
    engine = RealDeepSpeedEngine(
        theirs,
        states,
        built,
        given,
    )
    engine.restore_originals()
    return engine


def _initialize(deepspeed: Any, built: Built, described: dict[str, Any], config: RunConfig) -> Any:
    try:
        with redirect_stdout(StringIO()):  # some of its accounts of memory are printed, whatever its logger is told
            if config.strategy.stage == 3:
                # Cut parameter by parameter; otherwise the whole model would be moved to the device first.
                for param in built.module.parameters():
                    param.data = param.data.to(DTYPES[config.precision.compute])
                tier = config_value(described, "zero_optimization", "offload_param", "device")
                deepspeed.zero.Init(
                    module=built.module, config_dict_or_path=described, remote_device="nvme" if tier == "nvme" else None
                )
            theirs, *_ = deepspeed.initialize(model=built.module, optimizer=built.optimizer(config), config=described)
    except ValidationError as error:
        raise ConfigError([_problem(entry["loc"], entry["msg"]) for entry in error.errors()]) from None
    return theirs


def _check_files(deepspeed: Any, described: dict[str, Any]) -> None:
    """Refuse states in files where DeepSpeed cannot build what reads them."""
    for section in ("offload_optimizer", "offload_param"):
        if config_value(described, "zero_optimization", section, "device") != "nvme":
            continue
        if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
            message = "nvme needs DeepSpeed's operation async_io, which cannot be built here: libaio is missing"
            remedy = "Install libaio-dev (Debian) or libaio-devel, or write `device: cpu`."
            raise ConfigError(Problem(f"strategy.config.zero_optimization.{section}.device", message, remedy))


def _problem(place: tuple[int | str, ...], message: str) -> Problem:
    path = ".".join(map(str, ("strategy", "config", *place)))
    return Problem(path, f"DeepSpeed says: {message}", "See DeepSpeed's page on its configuration.")
