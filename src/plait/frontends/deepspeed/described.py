"""The optimizer and the schedule that a DeepSpeed configuration describes, for whichever loop takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config import MuonConfig, OptimConfig, RunConfig, parse_sections
from plait.errors import ModelError
from plait.frontends.deepspeed.config import translate
from plait.frontends.deepspeed.runtime.lr_schedules import Scheduler
from plait.optim import ViewGroup, build_optimizer, split_groups

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class Recipe:
    """The sections `optimizer` and `scheduler`, which may leave values open until a script has named them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.sections = {name: config[name] for name in ("optimizer", "scheduler") if config.get(name) is not None}

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer is described."""
        return "optimizer" in self.sections

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule is described."""
        return "scheduler" in self.sections

    def optimizer(self, model: nn.Module, params: Parameters, auto: Mapping[str, Any] | None = None) -> Optimizer:
        """The optimizer over parameters or groups of a model; `auto` has values for what is left open."""
        optim = self._run("optimizer", auto).optim
        groups = as_groups(params)
        if isinstance(optim, MuonConfig) and len(groups) == 1:  # one of two rules for each parameter
            found = dict(model.named_parameters())
            groups = [
                {"params": [found[name] for name in spec.names], **spec.options} for spec in split_groups(model, optim)
            ]
        return over_groups(model, groups, optim)

    def schedule(self, optimizer: Optimizer, auto: Mapping[str, Any] | None = None) -> Scheduler:
        """The schedule of an optimizer's rates, to be stepped after each update."""
        found = self._run("scheduler", auto).schedule
        assert found is not None
        return Scheduler(optimizer, [found] * len(optimizer.param_groups))

    def _run(self, name: str, auto: Mapping[str, Any] | None) -> RunConfig:
        found = translate({name: self.sections[name]}, auto=auto)
        found.account.raise_refusals()
        wanted = {key: found.sections[key] for key in ("optim", "schedule") if key in found.sections}
        return parse_sections(**wanted).config


def as_groups(params: Parameters) -> list[dict[str, Any]]:
    """Parameters as groups of an optimizer: those that were given, or one of them all."""
    given: list[Any] = list(params)
    return given if any(isinstance(each, Mapping) for each in given) else [{"params": given}]


def over_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]], optim: OptimConfig) -> Optimizer:
    """An optimizer over these groups of a model's parameters, as `optim` says."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    views = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        params = [param for param in params if param.requires_grad]
        if strangers := [param for param in params if param not in names]:
            shape = tuple(strangers[0].shape)
            raise ModelError(f"model_parameters has a tensor of shape {shape} that is no parameter of the model")
        options = {key: value for key, value in group.items() if key != "params"}
        if params:
            views.append(ViewGroup([names[param] for param in params], params, options))
    optimizer = build_optimizer(optim, views, in_place=False)
    if getattr(optim, "implementation", None) == "auto":
        for group in optimizer.param_groups:  # chosen when the tensors are known that it is to update
            group["fused"] = group["foreach"] = None
    optimizer.state.clear()  # so is the state
    return optimizer
