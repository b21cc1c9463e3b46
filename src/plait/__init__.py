"""Plait trains large PyTorch models: describe once what to train, and in one small section how to distribute it.

    import plait

    plait.Runner(
        model=MyModel(),
        data=dataset,
        optim=plait.AdamWOptim(lr=1e-3),
        strategy=plait.Strategy(zero=3, layout=plait.Layout(tp=2)),
    ).train()

A section of the run description is an object, a mapping (`dict(zero=3)`) or, if it has one, its short form
(`"zero3"`). Every name offered here is public; docs/api.md defines what that means.

Names are loaded on first use, so that `import plait` costs next to nothing.
"""

from typing import TYPE_CHECKING

from plait import errors

__version__ = "0.1.0"

if TYPE_CHECKING:
    from plait.checkpoint import Storage as Storage
    from plait.config import AccuracyConfig as AccuracyMetric
    from plait.config import AdafactorConfig as AdafactorOptim
    from plait.config import AdagradConfig as AdagradOptim
    from plait.config import AdamConfig as AdamOptim
    from plait.config import AdamW8bitConfig as AdamW8bitOptim
    from plait.config import AdamWConfig as AdamWOptim
    from plait.config import BatchConfig as Batch
    from plait.config import BestConfig as Best
    from plait.config import CheckpointConfig as Checkpoint
    from plait.config import Cifar10Data as Cifar10Data
    from plait.config import CompileConfig as Compile
    from plait.config import ConstantConfig as ConstantLRSchedule
    from plait.config import ContextConfig as ContextParallel
    from plait.config import CosineConfig as CosineAnnealingLRSchedule
    from plait.config import CosineRestartConfig as CosineAnnealingWarmRestartsSchedule
    from plait.config import DenoisingObjective as DenoisingObjective
    from plait.config import DpoConfig as Dpo
    from plait.config import EarlyStopConfig as EarlyStopHook
    from plait.config import EmaConfig as EmaHook
    from plait.config import ExponentialConfig as ExponentialLRSchedule
    from plait.config import FileData as FileData
    from plait.config import FolderStorageConfig as FolderStorage
    from plait.config import Fp8Config as Fp8
    from plait.config import GptConfig as GptModel
    from plait.config import GrpoConfig as Grpo
    from plait.config import Gsm8kData as Gsm8kData
    from plait.config import GuardConfig as Guard
    from plait.config import HFConfig as HFModel
    from plait.config import ImageChatData as ImageChatData
    from plait.config import ImageFolderData as ImageFolderData
    from plait.config import ImageTextData as ImageTextData
    from plait.config import ImportedData as ImportedData
    from plait.config import ImportedHook as ImportedHook
    from plait.config import ImportedModel as ImportedModel
    from plait.config import JsonlData as JsonlData
    from plait.config import LambConfig as LambOptim
    from plait.config import LayoutConfig as Layout
    from plait.config import LinearConfig as LinearLRSchedule
    from plait.config import LionConfig as LionOptim
    from plait.config import LlamaConfig as LlamaModel
    from plait.config import LogConfig as Log
    from plait.config import LoraConfig as Lora
    from plait.config import LRRangeTestConfig as LRRangeTestSchedule
    from plait.config import MaskedImageObjective as MaskedImageObjective
    from plait.config import MaskedObjective as MaskedObjective
    from plait.config import MixtureData as MixtureData
    from plait.config import MoeConfig as MoeModel
    from plait.config import MultiStepConfig as MultiStepLRSchedule
    from plait.config import MuonConfig as MuonOptim
    from plait.config import OffloadConfig as Offload
    from plait.config import OneCycleConfig as OneCycleSchedule
    from plait.config import PipelineConfig as PipelineParallel
    from plait.config import PlanConfig as Plan
    from plait.config import PolynomialConfig as PolynomialLRSchedule
    from plait.config import PosttrainConfig as Posttrain
    from plait.config import PpoConfig as Ppo
    from plait.config import PrecisionConfig as Precision
    from plait.config import ProfileConfig as Profile
    from plait.config import RecomputeConfig as Recompute
    from plait.config import ResNetConfig as ResNetModel
    from plait.config import RewardConfig as Reward
    from plait.config import RollbackConfig as RollbackHook
    from plait.config import RolloutConfig as Rollout
    from plait.config import ScalerConfig as Scaler
    from plait.config import Seq2SeqObjective as Seq2SeqObjective
    from plait.config import SftConfig as Sft
    from plait.config import SGDConfig as SGDOptim
    from plait.config import SpanCorruptionObjective as SpanCorruptionObjective
    from plait.config import SpeechData as SpeechData
    from plait.config import StrategyConfig as Strategy
    from plait.config import TaskData as TaskData
    from plait.config import TemplateConfig as Template
    from plait.config import TensorConfig as TensorParallel
    from plait.config import TextClassificationData as TextClassificationData
    from plait.config import TextData as TextData
    from plait.config import TilesConfig as Tiles
    from plait.config import TokensData as TokensData
    from plait.config import TrainConfig as Train
    from plait.config import VllmConfig as Vllm
    from plait.config import WarmupConfig as WarmupLRSchedule
    from plait.config import WarmupCosineConfig as WarmupCosineLRSchedule
    from plait.config import WarmupDecayConfig as WarmupDecayLRSchedule
    from plait.config import WrapConfig as Wrap
    from plait.config import WSDConfig as WSDSchedule
    from plait.config import custom_part as part
    from plait.data import MicroBatch as MicroBatch
    from plait.distributed import World as World
    from plait.engine import BuiltModel as BuiltModel
    from plait.engine import Engine as Engine
    from plait.engine import Evaluation as Evaluation
    from plait.engine import LossNormalizer as LossNormalizer
    from plait.engine import Preparation as Preparation
    from plait.engine import Skips as Skips
    from plait.engine import SteppingEngine as SteppingEngine
    from plait.engine import StepResult as StepResult
    from plait.engine import WeightedLoss as WeightedLoss
    from plait.engine import build_full_model as build_full_model
    from plait.engine import prepare as prepare
    from plait.engine import read_loss as read_loss
    from plait.models import LossTerm as LossTerm
    from plait.monitor import Event as Event
    from plait.monitor import EventKind as EventKind
    from plait.monitor import Sink as Sink
    from plait.trainer import Accuracy as Accuracy
    from plait.trainer import Hook as Hook
    from plait.trainer import Metric as Metric
    from plait.trainer import Runner as Runner
else:
    from plait.lazy import attach_names

    attach_names(__name__)

__all__ = [
    "Accuracy",
    "AccuracyMetric",
    "AdafactorOptim",
    "AdagradOptim",
    "AdamOptim",
    "AdamW8bitOptim",
    "AdamWOptim",
    "Batch",
    "Best",
    "BuiltModel",
    "Checkpoint",
    "Cifar10Data",
    "Compile",
    "ConstantLRSchedule",
    "ContextParallel",
    "CosineAnnealingLRSchedule",
    "CosineAnnealingWarmRestartsSchedule",
    "DenoisingObjective",
    "Dpo",
    "EarlyStopHook",
    "EmaHook",
    "Engine",
    "Evaluation",
    "Event",
    "EventKind",
    "ExponentialLRSchedule",
    "FileData",
    "FolderStorage",
    "Fp8",
    "GptModel",
    "Grpo",
    "Gsm8kData",
    "Guard",
    "HFModel",
    "Hook",
    "ImageChatData",
    "ImageFolderData",
    "ImageTextData",
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
    "LossNormalizer",
    "LossTerm",
    "MaskedImageObjective",
    "MaskedObjective",
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
    "Preparation",
    "Profile",
    "Recompute",
    "ResNetModel",
    "Reward",
    "RollbackHook",
    "Rollout",
    "Runner",
    "SGDOptim",
    "Scaler",
    "Seq2SeqObjective",
    "Sft",
    "Sink",
    "Skips",
    "SpanCorruptionObjective",
    "SpeechData",
    "StepResult",
    "SteppingEngine",
    "Storage",
    "Strategy",
    "TaskData",
    "Template",
    "TensorParallel",
    "TextClassificationData",
    "TextData",
    "Tiles",
    "TokensData",
    "Train",
    "Vllm",
    "WSDSchedule",
    "WarmupCosineLRSchedule",
    "WarmupDecayLRSchedule",
    "WarmupLRSchedule",
    "WeightedLoss",
    "World",
    "Wrap",
    "__version__",
    "build_full_model",
    "errors",
    "part",
    "prepare",
    "read_loss",
]
