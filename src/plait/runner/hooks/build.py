"""From the section `hooks` to hooks."""

from __future__ import annotations

from collections.abc import Sequence

from plait.config import EarlyStopConfig, EmaConfig, HookConfig, ImportedHook, ProfileConfig, RollbackConfig, load_code
from plait.errors import ConfigError, Problem
from plait.runner.hooks.base import Hook
from plait.runner.hooks.early_stop import EarlyStop
from plait.runner.hooks.ema import Ema
from plait.runner.hooks.rollback import Rollback


def build_hooks(configs: Sequence[HookConfig], profile: ProfileConfig | None = None) -> list[Hook]:
    """Build each hook of the section `hooks`, and the one that the section `profile` asks for."""
    hooks: list[Hook] = []
    for index, config in enumerate(configs):
        if isinstance(config, EmaConfig):
            hooks.append(Ema(config))
        elif isinstance(config, EarlyStopConfig):
            hooks.append(EarlyStop(config))
        elif isinstance(config, RollbackConfig):
            hooks.append(Rollback(config))
        else:
            hooks.append(_import(config, f"hooks.{index}.target"))
    if profile is not None:
        from plait.runner.profile import Profile  # late: most runs have no use for it

        hooks.append(Profile(profile))
    return hooks


def _import(config: ImportedHook, path: str) -> Hook:
    make = load_code(config.target, key=path)
    try:
        hook = make(**config.args)
    except TypeError as error:
        raise ConfigError(
            Problem(path, f"{config.target!r} cannot be used: {error}", "Write it as package.module:HookClass.")
        ) from error
    if not isinstance(hook, Hook):
        raise ConfigError(
            Problem(path, f"{config.target!r} made a {type(hook).__name__}", "Derive it from plait.runner.Hook.")
        )
    hook.priority = config.priority
    return hook
