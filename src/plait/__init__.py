"""Plait trains large PyTorch models: say once what to train, and in one small section how it is spread.

    import plait

    plait.Runner(
        model=MyModel(),
        data=dataset,
        optim=plait.AdamWOptim(lr=1e-3),
        strategy=plait.Strategy(zero=3, layout=plait.Layout(tp=2)),
    ).train()

A section of the run description is an object, a mapping (`dict(zero=3)`) or, where it has one, its short word
(`"zero3"`). Everything that is named here is public; docs/api.md says what that means.

Names are loaded on first use, so that `import plait` costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

from plait import errors

if TYPE_CHECKING:
    from plait.config.data import (
        Cifar10Data,
        ImageFolderData,
        ImportedData,
        JsonlData,
        MixtureData,
        TextData,
        TokensData,
    )
    from plait.config.model import GptConfig as GptModel
    from plait.config.model import HFConfig as HFModel
    from plait.config.model import ImportedModel
    from plait.config.model import LlamaConfig as LlamaModel
    from plait.config.model import MoeConfig as MoeModel
    from plait.config.model import ResNetConfig as ResNetModel
    from plait.config.offload import OffloadConfig as Offload
    from plait.config.online import GrpoConfig as Grpo
    from plait.config.online import PpoConfig as Ppo
    from plait.config.online import RolloutConfig as Rollout
    from plait.config.online import VllmConfig as Vllm
    from plait.config.optim import AdafactorConfig as AdafactorOptim
    from plait.config.optim import AdagradConfig as AdagradOptim
    from plait.config.optim import AdamConfig as AdamOptim
    from plait.config.optim import AdamW8bitConfig as AdamW8bitOptim
    from plait.config.optim import AdamWConfig as AdamWOptim
    from plait.config.optim import LambConfig as LambOptim
    from plait.config.optim import LionConfig as LionOptim
    from plait.config.optim import MuonConfig as MuonOptim
    from plait.config.optim import SGDConfig as SGDOptim
    from plait.config.plan import PlanConfig as Plan
    from plait.config.posttrain import DpoConfig as Dpo
    from plait.config.posttrain import FileData, Gsm8kData, TaskData
    from plait.config.posttrain import LoraConfig as Lora
    from plait.config.posttrain import PosttrainConfig as Posttrain
    from plait.config.posttrain import RewardConfig as Reward
    from plait.config.posttrain import SftConfig as Sft
    from plait.config.posttrain import TemplateConfig as Template
    from plait.config.precision import Fp8Config as Fp8
    from plait.config.precision import PrecisionConfig as Precision
    from plait.config.precision import ScalerConfig as Scaler
    from plait.config.profile import ProfileConfig as Profile
    from plait.config.schedule import ConstantConfig as ConstantLRSchedule
    from plait.config.schedule import CosineConfig as CosineAnnealingLRSchedule
    from plait.config.schedule import CosineRestartConfig as CosineAnnealingWarmRestartsSchedule
    from plait.config.schedule import ExponentialConfig as ExponentialLRSchedule
    from plait.config.schedule import LinearConfig as LinearLRSchedule
    from plait.config.schedule import LRRangeTestConfig as LRRangeTestSchedule
    from plait.config.schedule import MultiStepConfig as MultiStepLRSchedule
    from plait.config.schedule import OneCycleConfig as OneCycleSchedule
    from plait.config.schedule import PolynomialConfig as PolynomialLRSchedule
    from plait.config.schedule import WarmupConfig as WarmupLRSchedule
    from plait.config.schedule import WarmupCosineConfig as WarmupCosineLRSchedule
    from plait.config.schedule import WarmupDecayConfig as WarmupDecayLRSchedule
    from plait.config.strategy import CompileConfig as Compile
    from plait.config.strategy import ContextConfig as ContextParallel
    from plait.config.strategy import LayoutConfig as Layout
    from plait.config.strategy import PipelineConfig as PipelineParallel
    from plait.config.strategy import RecomputeConfig as Recompute
    from plait.config.strategy import StrategyConfig as Strategy
    from plait.config.strategy import TensorConfig as TensorParallel
    from plait.config.strategy import TilesConfig as Tiles
    from plait.config.strategy import WrapConfig as Wrap
    from plait.config.train import BatchConfig as Batch
    from plait.config.train import BestConfig as Best
    from plait.config.train import CheckpointConfig as Checkpoint
    from plait.config.train import EarlyStopConfig as EarlyStopHook
    from plait.config.train import EmaConfig as EmaHook
    from plait.config.train import GuardConfig as Guard
    from plait.config.train import ImportedHook
    from plait.config.train import LogConfig as Log
    from plait.config.train import RollbackConfig as RollbackHook
    from plait.config.train import TrainConfig as Train
    from plait.runner import Accuracy, Hook, Metric, Runner
    from plait.spec import Event, EventKind, LossTerm, MicroBatch, Sink
    from plait.strategy import Engine, Evaluation, StepResult, prepare
    from plait.world import World

__version__ = "0.1.0"
__all__ = [
    "Accuracy",
    "AdafactorOptim",
    "AdagradOptim",
    "AdamOptim",
    "AdamW8bitOptim",
    "AdamWOptim",
    "Batch",
    "Best",
    "Checkpoint",
    "Cifar10Data",
    "Compile",
    "ConstantLRSchedule",
    "ContextParallel",
    "CosineAnnealingLRSchedule",
    "CosineAnnealingWarmRestartsSchedule",
    "Dpo",
    "EarlyStopHook",
    "EmaHook",
    "Engine",
    "Evaluation",
    "Event",
    "EventKind",
    "ExponentialLRSchedule",
    "FileData",
    "Fp8",
    "GptModel",
    "Grpo",
    "Gsm8kData",
    "Guard",
    "HFModel",
    "Hook",
    "ImageFolderData",
    "ImportedData",
    "ImportedHook",
    "ImportedModel",
    "JsonlData",
    "LRRangeTestSchedule",
    "LambOptim",
    "Layout",
    "LinearLRSchedule",
    "LionOptim",
    "LlamaModel",
    "Log",
    "Lora",
    "LossTerm",
    "Metric",
    "MicroBatch",
    "MixtureData",
    "MoeModel",
    "MultiStepLRSchedule",
    "MuonOptim",
    "Offload",
    "OneCycleSchedule",
    "PipelineParallel",
    "Plan",
    "PolynomialLRSchedule",
    "Posttrain",
    "Ppo",
    "Precision",
    "Profile",
    "Recompute",
    "ResNetModel",
    "Reward",
    "RollbackHook",
    "Rollout",
    "Runner",
    "SGDOptim",
    "Scaler",
    "Sft",
    "Sink",
    "StepResult",
    "Strategy",
    "TaskData",
    "Template",
    "TensorParallel",
    "TextData",
    "Tiles",
    "TokensData",
    "Train",
    "Vllm",
    "WarmupCosineLRSchedule",
    "WarmupDecayLRSchedule",
    "WarmupLRSchedule",
    "World",
    "Wrap",
    "__version__",
    "errors",
    "prepare",
]

# Where a name comes from, as above: type checkers read only that, and Python only this. `Public=Inside`: a section's
# class is called `StrategyConfig` in its own room, where a `Checkpoint` is a checkpoint, and a `Plan` a plan.
_ROOMS = {
    "plait.config.strategy": (
        "Strategy=StrategyConfig Layout=LayoutConfig TensorParallel=TensorConfig "
        "PipelineParallel=PipelineConfig ContextParallel=ContextConfig Wrap=WrapConfig "
        "Recompute=RecomputeConfig Tiles=TilesConfig Compile=CompileConfig"
    ),
    "plait.config.offload": "Offload=OffloadConfig",
    "plait.config.precision": "Precision=PrecisionConfig Scaler=ScalerConfig Fp8=Fp8Config",
    "plait.config.train": (
        "Batch=BatchConfig Train=TrainConfig Guard=GuardConfig Checkpoint=CheckpointConfig "
        "Best=BestConfig Log=LogConfig EmaHook=EmaConfig EarlyStopHook=EarlyStopConfig "
        "RollbackHook=RollbackConfig ImportedHook"
    ),
    "plait.config.plan": "Plan=PlanConfig",
    "plait.config.profile": "Profile=ProfileConfig",
    "plait.config.optim": (
        "AdamWOptim=AdamWConfig AdamOptim=AdamConfig AdamW8bitOptim=AdamW8bitConfig SGDOptim=SGDConfig "
        "AdagradOptim=AdagradConfig LionOptim=LionConfig LambOptim=LambConfig "
        "AdafactorOptim=AdafactorConfig MuonOptim=MuonConfig"
    ),
    "plait.config.schedule": (
        "ConstantLRSchedule=ConstantConfig LinearLRSchedule=LinearConfig "
        "CosineAnnealingLRSchedule=CosineConfig CosineAnnealingWarmRestartsSchedule=CosineRestartConfig "
        "PolynomialLRSchedule=PolynomialConfig MultiStepLRSchedule=MultiStepConfig "
        "ExponentialLRSchedule=ExponentialConfig WarmupLRSchedule=WarmupConfig "
        "WarmupDecayLRSchedule=WarmupDecayConfig WarmupCosineLRSchedule=WarmupCosineConfig "
        "OneCycleSchedule=OneCycleConfig LRRangeTestSchedule=LRRangeTestConfig"
    ),
    "plait.config.model": (
        "GptModel=GptConfig LlamaModel=LlamaConfig MoeModel=MoeConfig ResNetModel=ResNetConfig "
        "HFModel=HFConfig ImportedModel"
    ),
    "plait.config.data": "TokensData TextData JsonlData ImageFolderData Cifar10Data ImportedData MixtureData",
    "plait.config.posttrain": (
        "Posttrain=PosttrainConfig Template=TemplateConfig Lora=LoraConfig Sft=SftConfig "
        "Reward=RewardConfig Dpo=DpoConfig TaskData FileData Gsm8kData"
    ),
    "plait.config.online": "Rollout=RolloutConfig Vllm=VllmConfig Ppo=PpoConfig Grpo=GrpoConfig",
    "plait.runner": "Runner Hook Metric Accuracy",
    "plait.strategy": "prepare Engine StepResult Evaluation",
    "plait.spec": "LossTerm MicroBatch Event EventKind Sink",
    "plait.world": "World",
}
_HOMES = {
    name: (module, inside or name)
    for module, names in _ROOMS.items()
    for name, _, inside in (entry.partition("=") for entry in names.split())
}


if not TYPE_CHECKING:  # to a type checker, a module that has this has every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'plait' has no attribute {name!r}")
        from importlib import import_module

        module, inside = _HOMES[name]
        return getattr(import_module(module), inside)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
