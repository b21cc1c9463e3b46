"""Run a post-training phase (SFT, reward model, DPO, PPO, GRPO): `Runner` with the model, data and hooks of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plait.config import ONLINE, DpoConfig, HFConfig, Parsed, PosttrainConfig, RunConfig, parse
from plait.errors import ConfigError, Problem
from plait.posttrain.data.prepare import PhaseData, prepare_data
from plait.posttrain.hooks import AdapterFiles, ReferenceWords, TellData
from plait.posttrain.lora import AdapterSpec
from plait.posttrain.metrics import CalibrationPlot, Preferences
from plait.posttrain.models import make_model
from plait.trainer import GivenObjects, Hook, Metric, Runner


class PhaseRunner(Runner):
    """Trains one phase. Only model, data, hooks and metrics differ from another run."""

    def __init__(self, parsed: Parsed, *, hooks: Sequence[Hook] = ()) -> None:
        config = parsed.config
        check_phase(config)
        self.phase_data = data = prepare_data(config)
        own_hooks, metrics = _hooks_and_metrics(config, data)
        self.begin(
            parsed,
            GivenObjects(
                model=partial(make_model, config),
                data=data.train,
                val_data=data.val,
                collate_fn=data.collate,
                hooks=[*own_hooks, *hooks],
                metrics=metrics,
            ),
        )


def phase_runner(
    phase: str, source: str | Path | dict[str, Any], overrides: Sequence[str] = (), *, hooks: Sequence[Hook] = ()
) -> PhaseRunner:
    """Return a runner for a phase (`sft`, `reward`, `dpo`, `ppo`, `grpo`); `source` is the run description."""
    return make_runner(parse_phase(phase, source, overrides), hooks=hooks)


def make_runner(parsed: Parsed, *, hooks: Sequence[Hook] = ()) -> PhaseRunner:
    """Return the runner for a run description: an `OnlineRunner` for PPO and GRPO, else a `PhaseRunner`."""
    if parsed.config.phase in ONLINE:
        from plait.posttrain.rl.trainer import OnlineRunner  # a subclass of PhaseRunner

        check_phase(parsed.config)
        return OnlineRunner(parsed, hooks=hooks)
    return PhaseRunner(parsed, hooks=hooks)


def parse_phase(phase: str, source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> Parsed:
    """Return the parsed run description with `phase` set; raise a `ConfigError` if it is not one of a phase."""
    parsed = parse(source, [*overrides, f"phase={phase}"])
    check_phase(parsed.config)
    return parsed


def check_phase(config: RunConfig) -> None:
    """Raise a `ConfigError` if the run description has no `phase` or no section `model`."""
    if config.phase is None:
        raise ConfigError(Problem("phase", "there is none", "Write sft, reward, dpo, ppo or grpo."))
    if config.model is None:
        raise ConfigError(Problem("model", "there is none", "Add a section `model` with a `type`."))


def _hooks_and_metrics(config: RunConfig, data: PhaseData) -> tuple[list[Hook], list[Metric]]:
    """Return the hooks and metrics of a phase. They report on the data, keep DPO's reference, and write adapters."""
    hooks: list[Hook] = [TellData(data)]
    metrics: list[Metric] = []
    if config.phase in ("reward", "dpo"):
        pairs = Preferences()
        metrics.append(pairs)
        hooks.append(CalibrationPlot(pairs))
    if config.phase == "dpo" and (config.dpo or DpoConfig()).reference == "start":
        hooks.append(ReferenceWords(data.collate, data.train, data.val))
    if config.lora is not None:
        generates = isinstance(config.model, HFConfig) and config.phase != "reward"
        task = "CAUSAL_LM" if generates else None
        hooks.append(AdapterFiles(AdapterSpec.of(config.lora), _base(config), task=task))
    return hooks, metrics


def _base(config: RunConfig) -> str | None:
    """Return the path or name of the base model that a LoRA adapter is for; None if the model is not from a file."""
    start = (config.posttrain or PosttrainConfig()).start
    return start or (config.model.path if isinstance(config.model, HFConfig) else None)
