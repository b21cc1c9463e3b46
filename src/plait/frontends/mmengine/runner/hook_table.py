"""The hooks of a run, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.config import choose
from plait.errors import ConfigError, Problem
from plait.frontends.mmengine import hooks as hooks_module
from plait.frontends.mmengine.hooks.hook import priority_of
from plait.frontends.mmengine.registry import HOOKS

assert hooks_module  # the default hooks register themselves

DEFAULT = {
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "logger": {"type": "LoggerHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "checkpoint": {"type": "CheckpointHook", "interval": 1},
}


class HookTable:
    """Hooks sorted by priority; of equal ones the first registered goes first."""

    def __init__(self, default_hooks: Mapping[str, Any] | None, custom_hooks: Sequence[Any] | None) -> None:
        self.hooks: list[Any] = []
        given = {**DEFAULT, **(default_hooks or {})}
        for name, hook in given.items():
            if name not in DEFAULT and hook is None:
                problem = Problem(f"default_hooks.{name}", "there is no such hook", choose(name, DEFAULT, "name"))
                raise ConfigError(problem)
            if hook is not None:
                self.register(hook)
        for hook in custom_hooks or ():
            self.register(hook)

    def register(self, hook: Any, priority: int | str | None = None) -> None:
        """Add a hook, or a dict that describes one."""
        if isinstance(hook, Mapping):
            options = dict(hook)
            priority = options.pop("priority", priority)
            hook = HOOKS.build(options)
        if not callable(getattr(hook, "before_run", None)):
            message = f"a {type(hook).__name__} has no points of a hook"
            raise ConfigError(Problem("custom_hooks", message, "Derive it from plait.frontends.mmengine.Hook."))
        kind = type(hook)
        if kind.__module__.startswith("mmengine.hooks.") and kind.__name__ in tuple(HOOKS):
            message = f"MMEngine's own {kind.__name__} works on MMEngine's engine"
            raise ConfigError(Problem("custom_hooks", message, f"Write dict(type={kind.__name__!r}, …): the one here."))
        if priority is not None:
            hook.priority = priority
        level = priority_of(hook.priority)
        place = next((i for i, each in enumerate(self.hooks) if priority_of(each.priority) > level), len(self.hooks))
        self.hooks.insert(place, hook)

    def call(self, runner: Any, point: str, **kwargs: Any) -> None:
        """Call one point of every hook that has it."""
        for hook in list(self.hooks):
            if (action := getattr(hook, point, None)) is not None:
                action(runner, **kwargs)

    def info(self) -> str:
        """Which hooks there are, in their order."""
        return "\n".join(f"({each.priority!s:<12}) {type(each).__name__}" for each in self.hooks)
