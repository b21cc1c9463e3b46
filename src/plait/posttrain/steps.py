"""The words of DeepSpeed-Chat's `train.py`: `--step 1 2 3 --deployment-type single_node`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from plait.config import choose
from plait.errors import ConfigError, Problem
from plait.posttrain.command_line import read_flags

PHASES: Mapping[str, str] = MappingProxyType({"1": "sft", "2": "reward", "3": "ppo"})
"""Which phase each step is."""

DEPLOYMENTS: Mapping[str, str] = MappingProxyType(
    {
        "single_gpu": "one process: `--nproc 1`",
        "single_node": "one process for each GPU of this machine: `--nproc gpu`",
        "multi_node": "as a hostfile says: `plait launch --hostfile FILE`",
    }
)
"""Where a step runs."""

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "step": "which steps, in order; `1 2 3` when absent",
        "deployment_type": "where they run",
        "actor_model": "folder of the model that is tuned, `model.path` of steps 1 and 3",
        "reward_model": "folder of the model that judges, `model.path` of step 2; absent: as the tuned one",
        "actor_zero_stage": "`strategy.zero` of steps 1 and 3",
        "reward_zero_stage": "`strategy.zero` of step 2",
        "output_dir": "folder above the `work_dir` of every step",
    }
)
"""Every word of `train.py`, without its dashes."""

_SIZES = ("350m", "1.3b", "6.7b", "13b", "66b")


@dataclass(frozen=True, slots=True)
class Steps:
    """What `train.py` was asked for."""

    phases: tuple[str, ...] = tuple(PHASES.values())
    deployment: str = "single_gpu"
    actor_model: str | None = None
    reward_model: str | None = None
    actor_zero: int | None = None
    reward_zero: int | None = None
    output_dir: str = "output"

    @property
    def nproc(self) -> str | None:
        """Processes on this machine; None where a hostfile says."""
        return {"single_gpu": "1", "single_node": "gpu"}.get(self.deployment)

    def settings(self, phase: str) -> list[str]:
        """Overrides for one of the phases; each after the first begins with what step 1 has tuned."""
        reward = phase == "reward"
        model = (self.reward_model if reward else None) or self.actor_model
        zero = self.reward_zero if reward else self.actor_zero
        found = [f"work_dir={self.output_dir}/{phase}"]
        if model is not None:
            found += ["model.type=hf", f"model.path={model}"]
        if zero is not None:
            found.append(f"strategy.zero={zero}")
        # A judge of its own kind has its own weights.
        if phase != "sft" and not (reward and self.reward_model is not None):
            found.append(f"posttrain.start={self.output_dir}/sft")
        return found


def read_steps(words: Sequence[str]) -> Steps:
    """Read a command line of `train.py`; an unknown word or value is an error that names it."""
    given = read_flags(words, WORDS)
    steps = given.get("step", list(PHASES))
    for step in steps or [""]:
        if step not in PHASES:
            raise ConfigError(Problem("--step", f"{step!r} is none of {', '.join(PHASES)}"))
    deployment = _one(given, "deployment_type") or "single_gpu"
    if deployment not in DEPLOYMENTS:
        raise ConfigError(Problem("--deployment-type", f"{deployment!r}", choose(deployment, DEPLOYMENTS, "word")))
    return Steps(
        phases=tuple(PHASES[step] for step in sorted(set(steps))),
        deployment=deployment,
        actor_model=_model(given, "actor_model"),
        reward_model=_model(given, "reward_model"),
        actor_zero=_stage(given, "actor_zero_stage"),
        reward_zero=_stage(given, "reward_zero_stage"),
        output_dir=_one(given, "output_dir") or "output",
    )


def _one(given: Mapping[str, Sequence[str]], name: str) -> str | None:
    values = given.get(name)
    if values is None:
        return None
    if len(values) != 1:
        raise ConfigError(Problem(f"--{name.replace('_', '-')}", f"{len(values)} values where one is expected"))
    return values[0]


def _model(given: Mapping[str, Sequence[str]], name: str) -> str | None:
    value = _one(given, name)
    if value is not None and value.rpartition("-")[2].lower() in _SIZES and "/" not in value.rstrip("/"):
        message = f"{value!r} is a size, and nothing is downloaded here"
        raise ConfigError(Problem(f"--{name.replace('_', '-')}", message, "Give the folder of a model."))
    return value


def _stage(given: Mapping[str, Sequence[str]], name: str) -> int | None:
    value = _one(given, name)
    if value is None:
        return None
    if value not in ("0", "1", "2", "3"):
        raise ConfigError(Problem(f"--{name.replace('_', '-')}", f"{value!r} is no ZeRO stage", "Write 0, 1, 2 or 3."))
    return int(value)
