"""From a runner's arguments to one run description, with the account of every translated key."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from plait.config import RunConfig, check, choose, parse_sections
from plait.errors import ConfigError, Problem
from plait.frontends import Answer
from plait.frontends.mmengine.optim.named import DeepSpeedOptimWrapper
from plait.frontends.mmengine.optim.wrapper import BaseOptimWrapper
from plait.frontends.mmengine.registry import STRATEGIES
from plait.frontends.mmengine.strategy import BaseStrategy
from plait.frontends.mmengine.strategy.table import Row, Sheet, honoured, refused

_COMPILE: dict[str, Row] = {
    "backend": honoured("strategy.compile.backend"),
    "mode": honoured("strategy.compile.mode"),
    "dynamic": honoured("strategy.compile.dynamic"),
    "fullgraph": honoured("strategy.compile.fullgraph"),
    "target": refused("`forward` is compiled; the rest of a step is the engine's", "forward"),
    "options": refused("write a `mode` instead"),
    "disable": refused("write compile=False", False),
}


def build_strategy(cfg: Any) -> BaseStrategy:
    """A strategy from its description; absent: one copy on every rank."""
    made = STRATEGIES.build({"type": "DDPStrategy"} if cfg is None else cfg)
    if not isinstance(made, BaseStrategy):
        message = f"a {type(made).__name__} drives an engine of its own"
        remedy = f"Write strategy=dict(type=…) with one of {', '.join(STRATEGIES)}."
        raise ConfigError(Problem("strategy", message, remedy))
    return made


def read_compile(compile_cfg: Any, sheet: Sheet) -> None:
    """`compile=True`, or a dict with what `torch.compile` takes."""
    if not compile_cfg:
        return
    sheet.put("strategy.compile.enabled", True)
    if isinstance(compile_cfg, Mapping):
        sheet.walk("compile", compile_cfg, _COMPILE)
    sheet.account.add(Answer.HONOURED, "compile", compile_cfg, "strategy.compile")


def read_wrapper(wrapper: BaseOptimWrapper, strategy: BaseStrategy, sheet: Sheet, device: torch.device) -> None:
    """What an optim wrapper says about formats, clipping and accumulation."""
    kind = type(wrapper).__name__
    if strategy.own_wrapper and not isinstance(wrapper, DeepSpeedOptimWrapper):
        message = f"{kind} does not go with {type(strategy).__name__}, which says itself how is trained"
        raise ConfigError(Problem("optim_wrapper.type", message, f"Write type={strategy.default_wrapper!r}."))
    if isinstance(wrapper, DeepSpeedOptimWrapper):
        wrapper.accumulate(int(sheet.sections.get("batch", {}).get("accumulation", 1)))
    if wrapper.clip:
        sheet.sections.setdefault("train", {}).update(wrapper.clip)
        sheet.account.add(Answer.HONOURED, "optim_wrapper.clip_grad", wrapper.clip, f"train: {wrapper.clip}")
    if wrapper.precision is None:
        return
    wanted = dict(wrapper.precision)
    if wanted["compute"] == "autocast":
        # The format that torch.autocast takes on this device.
        wanted["compute"] = "bf16" if torch.get_autocast_dtype(device.type) == torch.bfloat16 else "fp16"
    if wanted["compute"] != "fp16":
        wanted.pop("scaler")
    before = sheet.sections.get("precision", {}).get("compute")
    if before not in (None, wanted["compute"]):
        message = f"{wanted['compute']}, but the strategy computes in {before}"
        raise ConfigError(Problem("optim_wrapper.dtype", message, "Leave one of them out."))
    sheet.sections.setdefault("precision", {}).update(wanted)
    text = f"precision.compute: {wanted['compute']}; fp32 weights stay with the optimizer"
    sheet.account.add(Answer.MAPPED, "optim_wrapper.type", kind, text)


def finish(sheet: Sheet, **more: Any) -> RunConfig:
    """The run description that the sections make, checked."""
    sheet.account.raise_refusals()
    sections = {
        key: value for key, value in sheet.sections.items() if key != "batch"
    }  # the loader's, and the wrapper's
    config = parse_sections(**{**sections, **more}).config
    if config.checkpoint.node_local:
        message = "each node would keep its own part, and this front end reads a checkpoint from one place"
        raise ConfigError(Problem("strategy.checkpoint", message, "Leave out `use_node_local_storage`."))
    check(config, has_val=False, require_length=False)
    return config


def check_batch(batch: Mapping[str, Any], size: int, ranks: int) -> None:
    """Raise where a strategy names a batch that is not the loader's, of `size` samples on each rank."""
    found = {"micro": size, "total": size * int(batch.get("accumulation", 1)) * ranks}
    names = {"micro": "train_micro_batch_size_per_gpu", "total": "train_batch_size"}
    for key, value in found.items():
        if batch.get(key, value) != value:
            message = f"{batch[key]}, but with `train_dataloader.batch_size` {size} it is {value}"
            raise ConfigError(Problem(f"strategy.{names[key]}", message, "Leave it out."))


def known_arguments(runner: Any) -> list[str]:
    """The names that a runner takes."""
    parameters = inspect.signature(runner.__init__).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name not in ("self", "cfg")]


def takes_nothing(function: Any) -> bool:
    """Whether something can be called as it is."""
    if not callable(function):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return all(each.default is not each.empty or each.kind in kinds for each in parameters)


def misspelt(keys: Any, known: Any) -> list[Problem]:
    """Keys of a file that are almost those of a runner. Any other name is a variable of the file."""
    from difflib import get_close_matches

    problems = []
    for key in keys:
        if key not in known and get_close_matches(str(key), known, n=1, cutoff=0.85):
            problems.append(Problem(str(key), "there is no such argument of a runner", choose(key, known, "argument")))
    return problems
