"""From the sections `hooks` and `profile` to hooks."""

from __future__ import annotations

from collections.abc import Sequence

from plait.config import OWN_HOOK, HookConfig, ProfileConfig
from plait.plugins import make
from plait.runner.hooks.base import Hook


def build_hooks(configs: Sequence[HookConfig], profile: ProfileConfig | None = None) -> list[Hook]:
    """Build each hook of the section `hooks`, and the one that the section `profile` asks for."""
    hooks: list[Hook] = []
    for index, config in enumerate(configs):
        hook: Hook = make(config, f"hooks.{index}", kind=Hook)
        if isinstance(config, OWN_HOOK) and config.priority is not None:
            hook.priority = config.priority
        hooks.append(hook)
    if profile is not None:
        hooks.append(make(profile, "profile", kind=Hook))
    return hooks
