"""From a run description to an engine that DeepSpeed trains."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from pydantic import ValidationError

from plait.config import RunConfig, told
from plait.errors import ConfigError, Problem
from plait.precision import DTYPES
from plait.strategy.deepspeed.describe import describe
from plait.strategy.deepspeed.engine import DeepSpeedEngine
from plait.strategy.deepspeed.library import load_deepspeed
from plait.strategy.deepspeed.norms import widen_norms
from plait.strategy.deepspeed.states import states_of
from plait.strategy.foreign.build import Built, build_whole
from plait.strategy.preparation import Preparation
from plait.world import seed_everything


def prepare_deepspeed(given: Preparation) -> DeepSpeedEngine:
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
    engine = DeepSpeedEngine(
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
                tier = told(described, "zero_optimization", "offload_param", "device")
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
        if told(described, "zero_optimization", section, "device") != "nvme":
            continue
        if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
            message = "nvme needs DeepSpeed's operation async_io, which cannot be built here: libaio is missing"
            remedy = "Install libaio-dev (Debian) or libaio-devel, or write `device: cpu`."
            raise ConfigError(Problem(f"strategy.config.zero_optimization.{section}.device", message, remedy))


def _problem(place: tuple[int | str, ...], message: str) -> Problem:
    path = ".".join(map(str, ("strategy", "config", *place)))
    return Problem(path, f"DeepSpeed says: {message}", "See DeepSpeed's page on its configuration.")
