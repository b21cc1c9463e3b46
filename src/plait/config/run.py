"""The run description: all sections together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, Shorthand
from plait.config.data import DataConfig
from plait.config.model import ModelConfig
from plait.config.optim import AdamWConfig, OptimConfig
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


class RunConfig(Shorthand):
    """The run description: what to train, and how. `model` and the data may be absent when given as objects."""

    work_dir: PathText = "runs/default"
    seed: NonNegativeInt = 0
    deterministic: bool = False
    """Bitwise reproducible results, where torch supports it; slower."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    backend: Literal["auto", "gloo", "nccl", "xccl", "mpi"] = "auto"
    """`auto`: the device's backend."""
    timeout_s: PositiveFloat = 600.0
    """Timeout of collectives."""
    model: ModelConfig | None = None
    data: DataConfig | None = None
    val_data: DataConfig | None = None
    test_data: DataConfig | None = None
    model_inputs: PositiveInt | Annotated[Many[str], Field(min_length=1)] | None = None
    """Which values of a micro-batch are the model's inputs, where a `loss_fn` gets the others: the number
    of leading ones, or names of fields. Absent: as the signature of its `forward` has them."""
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optim: OptimConfig = Field(default_factory=AdamWConfig)
    schedule: ScheduleConfig | None = None
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    profile: ProfileConfig | None = None
    """Profile a few steps of the run. Absent: none."""
    trust_code: bool = False
    """Run code that stored files name: `auto_map` in a Hugging Face folder, the model in a checkpoint that is opened
    beside this run, all of a `config.yaml` that a run wrote. What this description names itself runs anyway."""
    hooks: Many[HookConfig] = ()
    metrics: Many[MetricConfig] = ()
    """Metrics of validation and test besides the loss."""
    phase: Phase | None = None
    """Set by `plait sft`, `plait reward`, `plait dpo`, `plait ppo` and `plait grpo`. Absent: plain training."""
    posttrain: PosttrainConfig | None = None
    """Examples, tokens and initial weights of the phases after pretraining."""
    lora: LoraConfig | None = None
    """LoRA adapters. Absent: the model itself is trained."""
    sft: SftConfig | None = None
    """Options of `plait sft`."""
    reward: RewardConfig | None = None
    """Options of `plait reward`."""
    dpo: DpoConfig | None = None
    """Options of `plait dpo`."""
    rollout: RolloutConfig | None = None
    """How `plait ppo` and `plait grpo` generate answers."""
    ppo: PpoConfig | None = None
    """Options of `plait ppo`."""
    grpo: GrpoConfig | None = None
    """Options of `plait grpo`."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """An `optim` without a `type` is AdamW, which is the default of `optim`."""
        optim = value.get("optim") if isinstance(value, Mapping) else None
        if isinstance(optim, Mapping) and "type" not in optim:
            return {**value, "optim": {"type": "AdamW", **optim}}
        return value
