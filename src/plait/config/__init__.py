"""The frozen, closed description of a run. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.config import dialect as dialect
    from plait.config import jsonc as jsonc
    from plait.config.arguments import BackendArgument as BackendArgument
    from plait.config.arguments import BatchArgument as BatchArgument
    from plait.config.arguments import CheckpointArgument as CheckpointArgument
    from plait.config.arguments import DataArgument as DataArgument
    from plait.config.arguments import DeviceArgument as DeviceArgument
    from plait.config.arguments import DpoArgument as DpoArgument
    from plait.config.arguments import GrpoArgument as GrpoArgument
    from plait.config.arguments import HookArgument as HookArgument
    from plait.config.arguments import LogArgument as LogArgument
    from plait.config.arguments import LoraArgument as LoraArgument
    from plait.config.arguments import MetricArgument as MetricArgument
    from plait.config.arguments import ModelArgument as ModelArgument
    from plait.config.arguments import OptimArgument as OptimArgument
    from plait.config.arguments import PhaseArgument as PhaseArgument
    from plait.config.arguments import PlanArgument as PlanArgument
    from plait.config.arguments import PosttrainArgument as PosttrainArgument
    from plait.config.arguments import PpoArgument as PpoArgument
    from plait.config.arguments import PrecisionArgument as PrecisionArgument
    from plait.config.arguments import ProfileArgument as ProfileArgument
    from plait.config.arguments import RewardArgument as RewardArgument
    from plait.config.arguments import RolloutArgument as RolloutArgument
    from plait.config.arguments import ScheduleArgument as ScheduleArgument
    from plait.config.arguments import SftArgument as SftArgument
    from plait.config.arguments import StrategyArgument as StrategyArgument
    from plait.config.arguments import TrainArgument as TrainArgument
    from plait.config.arguments import own_part as own_part
    from plait.config.arguments import refuse_unknown_keywords as refuse_unknown_keywords
    from plait.config.base import Many as Many
    from plait.config.base import NonNegativeInt as NonNegativeInt
    from plait.config.base import PathText as PathText
    from plait.config.base import PositiveInt as PositiveInt
    from plait.config.base import Section as Section
    from plait.config.data import OWN_DATA as OWN_DATA
    from plait.config.data import SMALLEST_BPE as SMALLEST_BPE
    from plait.config.data import Cifar10Data as Cifar10Data
    from plait.config.data import DataConfig as DataConfig
    from plait.config.data import DataPart as DataPart
    from plait.config.data import ImageFolderData as ImageFolderData
    from plait.config.data import ImportedData as ImportedData
    from plait.config.data import JsonlData as JsonlData
    from plait.config.data import MixtureData as MixtureData
    from plait.config.data import TextData as TextData
    from plait.config.data import TokensData as TokensData
    from plait.config.data import leaves as leaves
    from plait.config.data import texts as texts
    from plait.config.data import unit_of as unit_of
    from plait.config.draft import origin_of as origin_of
    from plait.config.draft import own_words as own_words
    from plait.config.engines import ENGINES as ENGINES
    from plait.config.engines import GOVERNED as GOVERNED
    from plait.config.engines import EnginePart as EnginePart
    from plait.config.engines import EngineTraits as EngineTraits
    from plait.config.engines import as_native as as_native
    from plait.config.engines import check_library as check_library
    from plait.config.engines import in_deepspeed_words as in_deepspeed_words
    from plait.config.engines import told as told
    from plait.config.explain import explain_section as explain_section
    from plait.config.model import LAYER_KEYS as LAYER_KEYS
    from plait.config.model import OWN_MODEL as OWN_MODEL
    from plait.config.model import GptConfig as GptConfig
    from plait.config.model import HFConfig as HFConfig
    from plait.config.model import ImportedModel as ImportedModel
    from plait.config.model import LlamaConfig as LlamaConfig
    from plait.config.model import ModelConfig as ModelConfig
    from plait.config.model import ModelPart as ModelPart
    from plait.config.model import MoeConfig as MoeConfig
    from plait.config.model import ResNetConfig as ResNetConfig
    from plait.config.model import depth_of as depth_of
    from plait.config.model import with_depth as with_depth
    from plait.config.online import ONLINE as ONLINE
    from plait.config.online import GrpoConfig as GrpoConfig
    from plait.config.online import PpoConfig as PpoConfig
    from plait.config.online import RolloutConfig as RolloutConfig
    from plait.config.online import VllmConfig as VllmConfig
    from plait.config.optim import AdafactorConfig as AdafactorConfig
    from plait.config.optim import AdagradConfig as AdagradConfig
    from plait.config.optim import AdamConfig as AdamConfig
    from plait.config.optim import AdamW8bitConfig as AdamW8bitConfig
    from plait.config.optim import AdamWConfig as AdamWConfig
    from plait.config.optim import LambConfig as LambConfig
    from plait.config.optim import LionConfig as LionConfig
    from plait.config.optim import MuonConfig as MuonConfig
    from plait.config.optim import OptimConfig as OptimConfig
    from plait.config.optim import OptimPart as OptimPart
    from plait.config.optim import SGDConfig as SGDConfig
    from plait.config.parse import Parsed as Parsed
    from plait.config.parse import check_complete as check_complete
    from plait.config.parse import parse as parse
    from plait.config.parse import parse_sections as parse_sections
    from plait.config.parse import parse_stored as parse_stored
    from plait.config.part import Imported as Imported
    from plait.config.part import Kind as Kind
    from plait.config.part import Part as Part
    from plait.config.part import choose_type as choose_type
    from plait.config.paths import missing_paths as missing_paths
    from plait.config.paths import missing_starts as missing_starts
    from plait.config.paths import starts_of as starts_of
    from plait.config.posttrain import PHASES as PHASES
    from plait.config.posttrain import DpoConfig as DpoConfig
    from plait.config.posttrain import ExampleData as ExampleData
    from plait.config.posttrain import FileData as FileData
    from plait.config.posttrain import Gsm8kData as Gsm8kData
    from plait.config.posttrain import LoraConfig as LoraConfig
    from plait.config.posttrain import PosttrainConfig as PosttrainConfig
    from plait.config.posttrain import RewardConfig as RewardConfig
    from plait.config.posttrain import SftConfig as SftConfig
    from plait.config.posttrain import TaskData as TaskData
    from plait.config.posttrain import TemplateConfig as TemplateConfig
    from plait.config.posttrain import split_shares as split_shares
    from plait.config.precision import Fp8Config as Fp8Config
    from plait.config.precision import PrecisionConfig as PrecisionConfig
    from plait.config.precision import ScalerConfig as ScalerConfig
    from plait.config.read import ENDINGS as ENDINGS
    from plait.config.read import as_utf8 as as_utf8
    from plait.config.read import half_character as half_character
    from plait.config.read import is_below as is_below
    from plait.config.read import parse_json as parse_json
    from plait.config.read import parse_text as parse_text
    from plait.config.read import read as read
    from plait.config.read import read_json_object as read_json_object
    from plait.config.read import read_lines as read_lines
    from plait.config.read import read_name as read_name
    from plait.config.read import split_override as split_override
    from plait.config.read import text_of as text_of
    from plait.config.read import weight_map as weight_map
    from plait.config.rules import check as check
    from plait.config.rules import violations as violations
    from plait.config.rules.engines import unsupported as unsupported
    from plait.config.rules.posttrain import no_examples as no_examples
    from plait.config.rules.strategy import check_graphs as check_graphs
    from plait.config.rules.strategy import may_record as may_record
    from plait.config.rules.strategy import with_graphs_decided as with_graphs_decided
    from plait.config.run import RunConfig as RunConfig
    from plait.config.schedule import ConstantConfig as ConstantConfig
    from plait.config.schedule import CosineConfig as CosineConfig
    from plait.config.schedule import CosineRestartConfig as CosineRestartConfig
    from plait.config.schedule import ExponentialConfig as ExponentialConfig
    from plait.config.schedule import LinearConfig as LinearConfig
    from plait.config.schedule import LRRangeTestConfig as LRRangeTestConfig
    from plait.config.schedule import MultiStepConfig as MultiStepConfig
    from plait.config.schedule import OneCycleConfig as OneCycleConfig
    from plait.config.schedule import PolynomialConfig as PolynomialConfig
    from plait.config.schedule import ScheduleConfig as ScheduleConfig
    from plait.config.schedule import SchedulePart as SchedulePart
    from plait.config.schedule import WarmupConfig as WarmupConfig
    from plait.config.schedule import WarmupCosineConfig as WarmupCosineConfig
    from plait.config.schedule import WarmupDecayConfig as WarmupDecayConfig
    from plait.config.schedule import WSDConfig as WSDConfig
    from plait.config.show import describe as describe
    from plait.config.show import rows as rows
    from plait.config.show import to_dict as to_dict
    from plait.config.show import to_yaml as to_yaml
    from plait.config.strategy import SHORTHANDS as SHORTHANDS
    from plait.config.strategy import CompileConfig as CompileConfig
    from plait.config.strategy import ContextConfig as ContextConfig
    from plait.config.strategy import Layout as Layout
    from plait.config.strategy import LayoutConfig as LayoutConfig
    from plait.config.strategy import OffloadConfig as OffloadConfig
    from plait.config.strategy import PipelineConfig as PipelineConfig
    from plait.config.strategy import PipelineSchedulePart as PipelineSchedulePart
    from plait.config.strategy import RecomputeConfig as RecomputeConfig
    from plait.config.strategy import RecomputePart as RecomputePart
    from plait.config.strategy import StrategyConfig as StrategyConfig
    from plait.config.strategy import TensorConfig as TensorConfig
    from plait.config.strategy import TensorPlanPart as TensorPlanPart
    from plait.config.strategy import TilesConfig as TilesConfig
    from plait.config.strategy import WrapConfig as WrapConfig
    from plait.config.strategy import least_ranks as least_ranks
    from plait.config.strategy import resolve_layout as resolve_layout
    from plait.config.text import choose as choose
    from plait.config.text import counted as counted
    from plait.config.text import listed as listed
    from plait.config.text import nearest as nearest
    from plait.config.text import show as show
    from plait.config.text import whole_number as whole_number
    from plait.config.train import OWN_HOOK as OWN_HOOK
    from plait.config.train import AccuracyConfig as AccuracyConfig
    from plait.config.train import BatchConfig as BatchConfig
    from plait.config.train import BestConfig as BestConfig
    from plait.config.train import CheckpointConfig as CheckpointConfig
    from plait.config.train import EarlyStopConfig as EarlyStopConfig
    from plait.config.train import EmaConfig as EmaConfig
    from plait.config.train import FolderStorageConfig as FolderStorageConfig
    from plait.config.train import GuardConfig as GuardConfig
    from plait.config.train import HookConfig as HookConfig
    from plait.config.train import ImportedHook as ImportedHook
    from plait.config.train import LogConfig as LogConfig
    from plait.config.train import MetricConfig as MetricConfig
    from plait.config.train import MetricPart as MetricPart
    from plait.config.train import PlanConfig as PlanConfig
    from plait.config.train import ProfileConfig as ProfileConfig
    from plait.config.train import ResolvedBatch as ResolvedBatch
    from plait.config.train import RollbackConfig as RollbackConfig
    from plait.config.train import SinkPart as SinkPart
    from plait.config.train import StorageConfig as StorageConfig
    from plait.config.train import TrainConfig as TrainConfig
    from plait.config.train import resolve_batch as resolve_batch
    from plait.config.trust import StoredName as StoredName
    from plait.config.trust import code_keys as code_keys
    from plait.config.trust import entry_points_of as entry_points_of
    from plait.config.trust import load_code as load_code
    from plait.config.trust import load_module as load_module
    from plait.config.trust import load_plugin as load_plugin
    from plait.config.trust import plugin_kinds as plugin_kinds
    from plait.config.trust import transformers_code as transformers_code
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["dialect", "jsonc"],
            "arguments": [
                "BackendArgument",
                "BatchArgument",
                "CheckpointArgument",
                "DataArgument",
                "DeviceArgument",
                "DpoArgument",
                "GrpoArgument",
                "HookArgument",
                "LogArgument",
                "LoraArgument",
                "MetricArgument",
                "ModelArgument",
                "OptimArgument",
                "PhaseArgument",
                "PlanArgument",
                "PosttrainArgument",
                "PpoArgument",
                "PrecisionArgument",
                "ProfileArgument",
                "RewardArgument",
                "RolloutArgument",
                "ScheduleArgument",
                "SftArgument",
                "StrategyArgument",
                "TrainArgument",
                "own_part",
                "refuse_unknown_keywords",
            ],
            "base": ["Many", "NonNegativeInt", "PathText", "PositiveInt", "Section"],
            "data": [
                "Cifar10Data",
                "DataConfig",
                "DataPart",
                "ImageFolderData",
                "ImportedData",
                "JsonlData",
                "MixtureData",
                "OWN_DATA",
                "SMALLEST_BPE",
                "TextData",
                "TokensData",
                "leaves",
                "texts",
                "unit_of",
            ],
            "draft": ["origin_of", "own_words"],
            "engines": [
                "ENGINES",
                "EnginePart",
                "EngineTraits",
                "GOVERNED",
                "as_native",
                "check_library",
                "in_deepspeed_words",
                "told",
            ],
            "explain": ["explain_section"],
            "model": [
                "GptConfig",
                "HFConfig",
                "ImportedModel",
                "LAYER_KEYS",
                "LlamaConfig",
                "ModelConfig",
                "ModelPart",
                "MoeConfig",
                "OWN_MODEL",
                "ResNetConfig",
                "depth_of",
                "with_depth",
            ],
            "online": ["GrpoConfig", "ONLINE", "PpoConfig", "RolloutConfig", "VllmConfig"],
            "optim": [
                "AdafactorConfig",
                "AdagradConfig",
                "AdamConfig",
                "AdamW8bitConfig",
                "AdamWConfig",
                "LambConfig",
                "LionConfig",
                "MuonConfig",
                "OptimConfig",
                "OptimPart",
                "SGDConfig",
            ],
            "parse": ["Parsed", "check_complete", "parse", "parse_sections", "parse_stored"],
            "part": ["Imported", "Kind", "Part", "choose_type"],
            "paths": ["missing_paths", "missing_starts", "starts_of"],
            "posttrain": [
                "DpoConfig",
                "ExampleData",
                "FileData",
                "Gsm8kData",
                "LoraConfig",
                "PHASES",
                "PosttrainConfig",
                "RewardConfig",
                "SftConfig",
                "TaskData",
                "TemplateConfig",
                "split_shares",
            ],
            "precision": ["Fp8Config", "PrecisionConfig", "ScalerConfig"],
            "read": [
                "ENDINGS",
                "as_utf8",
                "half_character",
                "is_below",
                "parse_json",
                "parse_text",
                "read",
                "read_json_object",
                "read_lines",
                "read_name",
                "split_override",
                "text_of",
                "weight_map",
            ],
            "rules": ["check", "violations"],
            "rules.engines": ["unsupported"],
            "rules.posttrain": ["no_examples"],
            "rules.strategy": ["check_graphs", "may_record", "with_graphs_decided"],
            "run": ["RunConfig"],
            "schedule": [
                "ConstantConfig",
                "CosineConfig",
                "CosineRestartConfig",
                "ExponentialConfig",
                "LRRangeTestConfig",
                "LinearConfig",
                "MultiStepConfig",
                "OneCycleConfig",
                "PolynomialConfig",
                "ScheduleConfig",
                "SchedulePart",
                "WSDConfig",
                "WarmupConfig",
                "WarmupCosineConfig",
                "WarmupDecayConfig",
            ],
            "show": ["describe", "rows", "to_dict", "to_yaml"],
            "strategy": [
                "CompileConfig",
                "ContextConfig",
                "Layout",
                "LayoutConfig",
                "OffloadConfig",
                "PipelineConfig",
                "PipelineSchedulePart",
                "RecomputeConfig",
                "RecomputePart",
                "SHORTHANDS",
                "StrategyConfig",
                "TensorConfig",
                "TensorPlanPart",
                "TilesConfig",
                "WrapConfig",
                "least_ranks",
                "resolve_layout",
            ],
            "text": ["choose", "counted", "listed", "nearest", "show", "whole_number"],
            "train": [
                "AccuracyConfig",
                "BatchConfig",
                "BestConfig",
                "CheckpointConfig",
                "EarlyStopConfig",
                "EmaConfig",
                "FolderStorageConfig",
                "GuardConfig",
                "HookConfig",
                "ImportedHook",
                "LogConfig",
                "MetricConfig",
                "MetricPart",
                "OWN_HOOK",
                "PlanConfig",
                "ProfileConfig",
                "ResolvedBatch",
                "RollbackConfig",
                "SinkPart",
                "StorageConfig",
                "TrainConfig",
                "resolve_batch",
            ],
            "trust": [
                "StoredName",
                "code_keys",
                "entry_points_of",
                "load_code",
                "load_module",
                "load_plugin",
                "plugin_kinds",
                "transformers_code",
            ],
        },
    )
