"""The settings of a run that PPO and GRPO have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.config import GrpoConfig, PpoConfig, RolloutConfig, RunConfig

Reference = Literal["start", "base", "none"]


@dataclass(frozen=True, slots=True)
class Online:
    """The settings of `plait ppo` or `plait grpo`."""

    rollout: RolloutConfig
    method: PpoConfig | GrpoConfig
    reference: Reference
    """The model from which the KL divergence is measured, with `auto` resolved: a copy of the initial policy (`start`),
    the policy without its adapter (`base`), or `none`."""

    @classmethod
    def of(cls, config: RunConfig) -> Online:
        """Return the settings of a run description."""
        method: PpoConfig | GrpoConfig
        method = (config.ppo or PpoConfig()) if config.phase == "ppo" else (config.grpo or GrpoConfig())
        reference = method.reference
        if reference == "auto":
            # An adapter that was trained before is part of the initial policy, and `base` lacks it.
            from_nothing = config.lora is not None and config.lora.adapter is None and config.lora.only
            reference = "base" if from_nothing else "start"
        return cls(config.rollout or RolloutConfig(), method, reference)

    @property
    def group(self) -> int:
        """The number of answers per prompt."""
        return self.method.group if isinstance(self.method, GrpoConfig) else 1

    @property
    def answers(self) -> int:
        """The number of answers per rollout."""
        return self.rollout.prompts * self.group
