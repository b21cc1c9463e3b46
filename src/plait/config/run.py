"""The whole run description."""

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
    """What to train, and how. `model` and the data may be absent here when they are given as objects."""

    work_dir: PathText = "runs/default"
    seed: NonNegativeInt = 0
    deterministic: bool = False
    """The same bits every time, where torch can promise it; slower."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    backend: Literal["auto", "gloo", "nccl", "xccl", "mpi"] = "auto"
    """`auto`: the one that belongs to the device."""
    timeout_s: PositiveFloat = 600.0
    """How long a collective may wait."""
    model: ModelConfig | None = None
    data: DataConfig | None = None
    val_data: DataConfig | None = None
    test_data: DataConfig | None = None
    model_inputs: PositiveInt | Annotated[Many[str], Field(min_length=1)] | None = None
    """What of a micro-batch the model gets, where a `loss_fn` is given the rest: how many of a row's first values, or
    the names of fields. Absent: as the signature of its `forward` says."""
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
    """Record a few steps and write where their time went; absent: no step is looked into."""
    trust_code: bool = False
    """Run code that files of others name: `auto_map` in a Hugging Face folder, the model in a checkpoint that is opened
    beside this run, all of a `config.yaml` that a run left. What this description names itself runs anyway."""
    hooks: Many[HookConfig] = ()
    metrics: Many[MetricConfig] = ()
    """What validation and test measure besides the loss."""
    phase: Phase | None = None
    """Set by `plait sft`, `plait reward`, `plait dpo`, `plait ppo` and `plait grpo`; absent: plain training."""
    posttrain: PosttrainConfig | None = None
    """Examples, tokens and first weights of the phases after pretraining."""
    lora: LoraConfig | None = None
    """Small matrices beside frozen ones; absent: the model itself learns."""
    sft: SftConfig | None = None
    """What is particular to `plait sft`."""
    reward: RewardConfig | None = None
    """What is particular to `plait reward`."""
    dpo: DpoConfig | None = None
    """What is particular to `plait dpo`."""
    rollout: RolloutConfig | None = None
    """How `plait ppo` and `plait grpo` make answers."""
    ppo: PpoConfig | None = None
    """What is particular to `plait ppo`."""
    grpo: GrpoConfig | None = None
    """What is particular to `plait grpo`."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """An `optim` without a `type` is AdamW, as no `optim` at all is."""
        optim = value.get("optim") if isinstance(value, Mapping) else None
        if isinstance(optim, Mapping) and "type" not in optim:
            return {**value, "optim": {"type": "AdamW", **optim}}
        return value
