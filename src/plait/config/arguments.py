"""Types of the keywords of `Runner` and `prepare`: a section object, a mapping, or a word if the section
has a short form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from plait.config.data import DataConfig
from plait.config.model import ModelConfig
from plait.config.optim import OptimConfig
from plait.config.parse import parse_sections
from plait.config.posttrain import (
    DpoConfig,
    GrpoConfig,
    LoraConfig,
    Phase,
    PosttrainConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
)
from plait.config.precision import PrecisionConfig
from plait.config.schedule import ScheduleConfig
from plait.config.strategy import StrategyConfig
from plait.config.text import choose, nearest, show
from plait.config.train import (
    BatchConfig,
    CheckpointConfig,
    HookConfig,
    LogConfig,
    MetricConfig,
    PlanConfig,
    ProfileConfig,
    TrainConfig,
)
from plait.errors import ConfigError, Problem

Keys: TypeAlias = Mapping[str, Any]
Custom: TypeAlias = str | Callable[..., Any]
"""A custom part: `package.module:name`, a plug-in's name, or what makes one. Or the name of one of Plait's."""


class OptimizerObject(Protocol):
    """An optimizer over the model's parameters."""

    param_groups: list[dict[str, Any]]

    @property
    def step(self) -> Callable[..., Any]:
        """Called once per step."""


ModelArgument: TypeAlias = ModelConfig | Keys | str
DataArgument: TypeAlias = DataConfig | Keys | str
BatchArgument: TypeAlias = BatchConfig | Keys
OptimArgument: TypeAlias = OptimConfig | Keys | Custom | OptimizerObject
ScheduleArgument: TypeAlias = ScheduleConfig | Keys | Custom
PrecisionArgument: TypeAlias = PrecisionConfig | Keys | str
StrategyArgument: TypeAlias = StrategyConfig | Keys | str
TrainArgument: TypeAlias = TrainConfig | Keys
CheckpointArgument: TypeAlias = CheckpointConfig | Keys
LogArgument: TypeAlias = LogConfig | Keys
PlanArgument: TypeAlias = PlanConfig | Keys | Literal["refuse", "warn", "off", False]
ProfileArgument: TypeAlias = ProfileConfig | Keys
HookArgument: TypeAlias = HookConfig | Keys | Custom
MetricArgument: TypeAlias = MetricConfig | Keys | Custom
PosttrainArgument: TypeAlias = PosttrainConfig | Keys
LoraArgument: TypeAlias = LoraConfig | Keys
SftArgument: TypeAlias = SftConfig | Keys
RewardArgument: TypeAlias = RewardConfig | Keys
DpoArgument: TypeAlias = DpoConfig | Keys
RolloutArgument: TypeAlias = RolloutConfig | Keys
PpoArgument: TypeAlias = PpoConfig | Keys
GrpoArgument: TypeAlias = GrpoConfig | Keys
DeviceArgument: TypeAlias = Literal["auto", "cpu", "cuda", "xpu", "mps"]
PhaseArgument: TypeAlias = Phase
BackendArgument: TypeAlias = Literal["auto", "gloo", "nccl", "xccl", "mpi"]


def custom_part(what: object, /, **arguments: Any) -> Any:
    """Return a custom part, for any field or keyword that takes one: `part("my:SOAP", lr=1e-3)`.

    `what` is a name (`package.module:name`, or a plug-in's), a class, a function, or an object. The result is the
    mapping `{"type": what, **arguments}`, typed so that type checkers accept it for a section.
    """
    if "type" in arguments:
        message = f"the part {what!r} was given an argument `type` of {show(arguments['type'])}"
        raise ConfigError(Problem("type", message, "Give the part's argument another name: `type` names the part."))
    return {"type": what, **arguments}


Function = TypeVar("Function", bound=Callable[..., Any])


def refuse_unknown_keywords(function: Function) -> Function:
    """Decorator: refuse an unknown keyword as an unknown key in a file, with the nearest known one."""
    parameters = signature(function).parameters

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        if unknown := {key: value for key, value in keywords.items() if key not in parameters}:
            known = [name for name in parameters if name != "self"]
            # Parse them first: the parser has better messages for keys of other frameworks and of inner sections.
            parse_sections(**{key: value for key, value in unknown.items() if nearest(key, known) is None})
            raise ConfigError(
                [
                    Problem(key, f"unknown keyword, with the value {show(value)}", choose(key, known, "keyword"))
                    for key, value in unknown.items()
                ]
            )
        return function(*args, **keywords)

    return cast(Function, checked)
