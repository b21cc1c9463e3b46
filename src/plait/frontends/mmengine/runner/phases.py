"""The loops of a runner, made when first needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.registry import LOOPS
from plait.frontends.mmengine.runner.loops import BaseLoop


class Phases:
    """`train`, `val` and `test`: what was asked for, and the loop that was made of it."""

    def __init__(self, runner: Any, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """`wanted` has, for each phase that is to be had, its cfg, its loader and its evaluator."""
        self._runner = runner
        self._wanted = dict(wanted)
        self._loops: dict[str, Any] = {}

    def has(self, mode: str) -> bool:
        """Whether a phase was asked for."""
        return mode in self._wanted

    def made(self, mode: str) -> Any:
        """The loop of a phase, if it is there already."""
        return self._loops.get(mode)

    def loop(self, mode: str) -> Any:
        """The loop of a phase."""
        if mode not in self._loops:
            if mode not in self._wanted:
                names = (
                    "dataloader and cfg, and an optim_wrapper" if mode == "train" else "dataloader, cfg and evaluator"
                )
                raise ConfigError(Problem(f"{mode}_cfg", f"there is nothing to {mode}", f"Give its {names}."))
            self._loops[mode] = self._build(mode, dict(self._wanted[mode]))
        return self._loops[mode]

    def _build(self, mode: str, wanted: dict[str, Any]) -> Any:
        cfg = wanted.pop("cfg")
        if not isinstance(cfg, Mapping):
            return cfg
        options = dict(cfg)
        if mode != "train":
            options.setdefault("type", "ValLoop" if mode == "val" else "TestLoop")
        elif "type" not in options:
            options["type"] = "EpochBasedTrainLoop" if by_epoch(options) else "IterBasedTrainLoop"
        options.pop("by_epoch", None)
        loop = LOOPS.build(options, default_args={"runner": self._runner, **wanted})
        if not isinstance(loop, BaseLoop) and not hasattr(loop, "run"):
            raise ConfigError(Problem(f"{mode}_cfg.type", f"a {type(loop).__name__} has no `run`", "Give a loop."))
        return loop


def wanted_phases(
    train: Mapping[str, Any], val: Mapping[str, Any], test: Mapping[str, Any], *, optim_wrapper: Any, schedules: Any
) -> dict[str, dict[str, Any]]:
    """The phases whose arguments are there; those of one phase must all be, or none."""
    found: dict[str, dict[str, Any]] = {}
    if _complete("train", {**train, "optim_wrapper": optim_wrapper}):
        found["train"] = dict(train)
    elif schedules is not None:
        raise ConfigError(Problem("param_scheduler", "there is nothing to train", "Give a train_dataloader too."))
    found.update({mode: dict(given) for mode, given in (("val", val), ("test", test)) if _complete(mode, given)})
    return found


def _complete(mode: str, parts: Mapping[str, Any]) -> bool:
    names = {key: key if key == "optim_wrapper" else f"{mode}_{key}" for key in parts}
    there = [names[key] for key, value in parts.items() if value is not None]
    absent = [names[key] for key, value in parts.items() if value is None]
    if there and absent:
        message = f"there is {', '.join(there)}, but no {', '.join(absent)}; a {mode} phase needs all of them"
        raise ConfigError(Problem(absent[0], message, "Give all of them, or none."))
    return not absent


def by_epoch(train_cfg: Any) -> bool:
    """Whether a `train_cfg` counts epochs."""
    if not isinstance(train_cfg, Mapping):
        return bool(getattr(train_cfg, "by_epoch", True))
    if "type" not in train_cfg and "by_epoch" not in train_cfg:
        message = "it says neither which loop, nor what is counted"
        raise ConfigError(Problem("train_cfg.by_epoch", message, "Write by_epoch=True, max_epochs=…"))
    named = str(getattr(train_cfg.get("type"), "__name__", train_cfg.get("type", "Epoch")))
    return bool(train_cfg.get("by_epoch", "Iter" not in named))
