"""What the two methods have in common, read off a run description once."""

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
    """What the policy is held to, `auto` resolved."""

    @classmethod
    def of(cls, config: RunConfig) -> Online:
        """As a run description says."""
        method: PpoConfig | GrpoConfig
        method = (config.ppo or PpoConfig()) if config.phase == "ppo" else (config.grpo or GrpoConfig())
        reference = method.reference
        if reference == "auto":
            # An adapter that was trained before is part of the first weights, and the base lacks it.
            from_nothing = config.lora is not None and config.lora.adapter is None and config.lora.only
            reference = "base" if from_nothing else "start"
        return cls(config.rollout or RolloutConfig(), method, reference)

    @property
    def group(self) -> int:
        """Answers to each prompt."""
        return self.method.group if isinstance(self.method, GrpoConfig) else 1

    @property
    def answers(self) -> int:
        """Answers of a rollout."""
        return self.rollout.prompts * self.group
