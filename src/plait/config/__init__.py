"""The frozen, closed description of a run. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.config import yaml_io as yaml_io
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
    from plait.config.arguments import custom_part as custom_part
    from plait.config.arguments import refuse_unknown_keywords as refuse_unknown_keywords
    from plait.config.base import Many as Many
    from plait.config.base import NonNegativeInt as NonNegativeInt
    from plait.config.base import PathText as PathText
    from plait.config.base import PositiveInt as PositiveInt
    from plait.config.base import Section as Section
    from plait.config.data import CUSTOM_DATA as CUSTOM_DATA
    from plait.config.data import SMALLEST_BPE as SMALLEST_BPE
    from plait.config.data import Cifar10Data as Cifar10Data
    from plait.config.data import CustomData as CustomData
    from plait.config.data import DataConfig as DataConfig
    from plait.config.data import ImageFolderData as ImageFolderData
    from plait.config.data import ImportedData as ImportedData
    from plait.config.data import JsonlData as JsonlData
    from plait.config.data import MixtureData as MixtureData
    from plait.config.data import TextData as TextData
    from plait.config.data import TokensData as TokensData
    from plait.config.data import leaf_sources as leaf_sources
    from plait.config.data import sample_unit as sample_unit
    from plait.config.data import text_sources as text_sources
    from plait.config.engines import ENGINE_KEYS as ENGINE_KEYS
    from plait.config.engines import ENGINES as ENGINES
    from plait.config.engines import CustomEngine as CustomEngine
    from plait.config.engines import EngineTraits as EngineTraits
    from plait.config.engines import as_fp16_section as as_fp16_section
    from plait.config.engines import as_native as as_native
    from plait.config.engines import check_library as check_library
    from plait.config.engines import config_value as config_value
    from plait.config.explain import explain_section as explain_section
    from plait.config.model import CUSTOM_MODELS as CUSTOM_MODELS
    from plait.config.model import LAYER_KEYS as LAYER_KEYS
    from plait.config.model import CustomModel as CustomModel
    from plait.config.model import GptConfig as GptConfig
    from plait.config.model import HFConfig as HFConfig
    from plait.config.model import ImportedModel as ImportedModel
    from plait.config.model import LlamaConfig as LlamaConfig
    from plait.config.model import ModelConfig as ModelConfig
    from plait.config.model import MoeConfig as MoeConfig
    from plait.config.model import ResNetConfig as ResNetConfig
    from plait.config.model import depth_of as depth_of
    from plait.config.model import with_depth as with_depth
    from plait.config.optim import AdafactorConfig as AdafactorConfig
    from plait.config.optim import AdagradConfig as AdagradConfig
    from plait.config.optim import AdamConfig as AdamConfig
    from plait.config.optim import AdamW8bitConfig as AdamW8bitConfig
    from plait.config.optim import AdamWConfig as AdamWConfig
    from plait.config.optim import CustomOptim as CustomOptim
    from plait.config.optim import LambConfig as LambConfig
    from plait.config.optim import LionConfig as LionConfig
    from plait.config.optim import MuonConfig as MuonConfig
    from plait.config.optim import OptimConfig as OptimConfig
    from plait.config.optim import SGDConfig as SGDConfig
    from plait.config.parse import Parsed as Parsed
    from plait.config.parse import check_complete as check_complete
    from plait.config.parse import parse as parse
    from plait.config.parse import parse_sections as parse_sections
    from plait.config.parse import parse_stored as parse_stored
    from plait.config.part import CustomPart as CustomPart
    from plait.config.part import ImportedPart as ImportedPart
    from plait.config.part import PluginKind as PluginKind
    from plait.config.part import choose_type as choose_type
    from plait.config.paths import missing_paths as missing_paths
    from plait.config.paths import missing_start_paths as missing_start_paths
    from plait.config.paths import start_paths as start_paths
    from plait.config.posttrain import ONLINE as ONLINE
    from plait.config.posttrain import PHASES as PHASES
    from plait.config.posttrain import DpoConfig as DpoConfig
    from plait.config.posttrain import ExampleData as ExampleData
    from plait.config.posttrain import FileData as FileData
    from plait.config.posttrain import GrpoConfig as GrpoConfig
    from plait.config.posttrain import Gsm8kData as Gsm8kData
    from plait.config.posttrain import LoraConfig as LoraConfig
    from plait.config.posttrain import PosttrainConfig as PosttrainConfig
    from plait.config.posttrain import PpoConfig as PpoConfig
    from plait.config.posttrain import RewardConfig as RewardConfig
    from plait.config.posttrain import RolloutConfig as RolloutConfig
    from plait.config.posttrain import SftConfig as SftConfig
    from plait.config.posttrain import TaskData as TaskData
    from plait.config.posttrain import TemplateConfig as TemplateConfig
    from plait.config.posttrain import VllmConfig as VllmConfig
    from plait.config.posttrain import split_shares as split_shares
    from plait.config.precision import Fp8Config as Fp8Config
    from plait.config.precision import PrecisionConfig as PrecisionConfig
    from plait.config.precision import ScalerConfig as ScalerConfig
    from plait.config.read import SUFFIXES as SUFFIXES
    from plait.config.read import as_utf8 as as_utf8
    from plait.config.read import is_below as is_below
    from plait.config.read import load_jsonc as load_jsonc
    from plait.config.read import lone_surrogate as lone_surrogate
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
    from plait.config.rules.strategy import can_capture as can_capture
    from plait.config.rules.strategy import check_graphs as check_graphs
    from plait.config.rules.strategy import resolve_graphs as resolve_graphs
    from plait.config.run import RunConfig as RunConfig
    from plait.config.schedule import ConstantConfig as ConstantConfig
    from plait.config.schedule import CosineConfig as CosineConfig
    from plait.config.schedule import CosineRestartConfig as CosineRestartConfig
    from plait.config.schedule import CustomSchedule as CustomSchedule
    from plait.config.schedule import ExponentialConfig as ExponentialConfig
    from plait.config.schedule import LinearConfig as LinearConfig
    from plait.config.schedule import LRRangeTestConfig as LRRangeTestConfig
    from plait.config.schedule import MultiStepConfig as MultiStepConfig
    from plait.config.schedule import OneCycleConfig as OneCycleConfig
    from plait.config.schedule import PolynomialConfig as PolynomialConfig
    from plait.config.schedule import ScheduleConfig as ScheduleConfig
    from plait.config.schedule import WarmupConfig as WarmupConfig
    from plait.config.schedule import WarmupCosineConfig as WarmupCosineConfig
    from plait.config.schedule import WarmupDecayConfig as WarmupDecayConfig
    from plait.config.schedule import WSDConfig as WSDConfig
    from plait.config.schema import builtin_names as builtin_names
    from plait.config.schema import origin_of as origin_of
    from plait.config.show import describe as describe
    from plait.config.show import rows as rows
    from plait.config.show import to_dict as to_dict
    from plait.config.show import to_yaml as to_yaml
    from plait.config.strategy import SHORTHANDS as SHORTHANDS
    from plait.config.strategy import CompileConfig as CompileConfig
    from plait.config.strategy import ContextConfig as ContextConfig
    from plait.config.strategy import CustomPipelineSchedule as CustomPipelineSchedule
    from plait.config.strategy import CustomRecompute as CustomRecompute
    from plait.config.strategy import CustomTensorPlan as CustomTensorPlan
    from plait.config.strategy import Layout as Layout
    from plait.config.strategy import LayoutConfig as LayoutConfig
    from plait.config.strategy import OffloadConfig as OffloadConfig
    from plait.config.strategy import PipelineConfig as PipelineConfig
    from plait.config.strategy import RecomputeConfig as RecomputeConfig
    from plait.config.strategy import StrategyConfig as StrategyConfig
    from plait.config.strategy import TensorConfig as TensorConfig
    from plait.config.strategy import TilesConfig as TilesConfig
    from plait.config.strategy import WrapConfig as WrapConfig
    from plait.config.strategy import min_ranks as min_ranks
    from plait.config.strategy import resolve_layout as resolve_layout
    from plait.config.text import choose as choose
    from plait.config.text import counted as counted
    from plait.config.text import listed as listed
    from plait.config.text import nearest as nearest
    from plait.config.text import show as show
    from plait.config.text import whole_number as whole_number
    from plait.config.train import CUSTOM_HOOKS as CUSTOM_HOOKS
    from plait.config.train import AccuracyConfig as AccuracyConfig
    from plait.config.train import BatchConfig as BatchConfig
    from plait.config.train import BestConfig as BestConfig
    from plait.config.train import CheckpointConfig as CheckpointConfig
    from plait.config.train import CustomMetric as CustomMetric
    from plait.config.train import CustomSink as CustomSink
    from plait.config.train import EarlyStopConfig as EarlyStopConfig
    from plait.config.train import EmaConfig as EmaConfig
    from plait.config.train import FolderStorageConfig as FolderStorageConfig
    from plait.config.train import GuardConfig as GuardConfig
    from plait.config.train import HookConfig as HookConfig
    from plait.config.train import ImportedHook as ImportedHook
    from plait.config.train import LogConfig as LogConfig
    from plait.config.train import MetricConfig as MetricConfig
    from plait.config.train import PlanConfig as PlanConfig
    from plait.config.train import ProfileConfig as ProfileConfig
    from plait.config.train import ResolvedBatch as ResolvedBatch
    from plait.config.train import RollbackConfig as RollbackConfig
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
            ".": ["yaml_io"],
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
                "custom_part",
                "refuse_unknown_keywords",
            ],
            "base": ["Many", "NonNegativeInt", "PathText", "PositiveInt", "Section"],
            "data": [
                "CUSTOM_DATA",
                "Cifar10Data",
                "CustomData",
                "DataConfig",
                "ImageFolderData",
                "ImportedData",
                "JsonlData",
                "MixtureData",
                "SMALLEST_BPE",
                "TextData",
                "TokensData",
                "leaf_sources",
                "sample_unit",
                "text_sources",
            ],
            "engines": [
                "CustomEngine",
                "ENGINES",
                "ENGINE_KEYS",
                "EngineTraits",
                "as_fp16_section",
                "as_native",
                "check_library",
                "config_value",
            ],
            "explain": ["explain_section"],
            "model": [
                "CUSTOM_MODELS",
                "CustomModel",
                "GptConfig",
                "HFConfig",
                "ImportedModel",
                "LAYER_KEYS",
                "LlamaConfig",
                "ModelConfig",
                "MoeConfig",
                "ResNetConfig",
                "depth_of",
                "with_depth",
            ],
            "optim": [
                "AdafactorConfig",
                "AdagradConfig",
                "AdamConfig",
                "AdamW8bitConfig",
                "AdamWConfig",
                "CustomOptim",
                "LambConfig",
                "LionConfig",
                "MuonConfig",
                "OptimConfig",
                "SGDConfig",
            ],
            "parse": ["Parsed", "check_complete", "parse", "parse_sections", "parse_stored"],
            "part": ["CustomPart", "ImportedPart", "PluginKind", "choose_type"],
            "paths": ["missing_paths", "missing_start_paths", "start_paths"],
            "posttrain": [
                "DpoConfig",
                "ExampleData",
                "FileData",
                "GrpoConfig",
                "Gsm8kData",
                "LoraConfig",
                "ONLINE",
                "PHASES",
                "PosttrainConfig",
                "PpoConfig",
                "RewardConfig",
                "RolloutConfig",
                "SftConfig",
                "TaskData",
                "TemplateConfig",
                "VllmConfig",
                "split_shares",
            ],
            "precision": ["Fp8Config", "PrecisionConfig", "ScalerConfig"],
            "read": [
                "SUFFIXES",
                "as_utf8",
                "is_below",
                "load_jsonc",
                "lone_surrogate",
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
            "rules.strategy": ["can_capture", "check_graphs", "resolve_graphs"],
            "run": ["RunConfig"],
            "schedule": [
                "ConstantConfig",
                "CosineConfig",
                "CosineRestartConfig",
                "CustomSchedule",
                "ExponentialConfig",
                "LRRangeTestConfig",
                "LinearConfig",
                "MultiStepConfig",
                "OneCycleConfig",
                "PolynomialConfig",
                "ScheduleConfig",
                "WSDConfig",
                "WarmupConfig",
                "WarmupCosineConfig",
                "WarmupDecayConfig",
            ],
            "schema": ["builtin_names", "origin_of"],
            "show": ["describe", "rows", "to_dict", "to_yaml"],
            "strategy": [
                "CompileConfig",
                "ContextConfig",
                "CustomPipelineSchedule",
                "CustomRecompute",
                "CustomTensorPlan",
                "Layout",
                "LayoutConfig",
                "OffloadConfig",
                "PipelineConfig",
                "RecomputeConfig",
                "SHORTHANDS",
                "StrategyConfig",
                "TensorConfig",
                "TilesConfig",
                "WrapConfig",
                "min_ranks",
                "resolve_layout",
            ],
            "text": ["choose", "counted", "listed", "nearest", "show", "whole_number"],
            "train": [
                "AccuracyConfig",
                "BatchConfig",
                "BestConfig",
                "CUSTOM_HOOKS",
                "CheckpointConfig",
                "CustomMetric",
                "CustomSink",
                "EarlyStopConfig",
                "EmaConfig",
                "FolderStorageConfig",
                "GuardConfig",
                "HookConfig",
                "ImportedHook",
                "LogConfig",
                "MetricConfig",
                "PlanConfig",
                "ProfileConfig",
                "ResolvedBatch",
                "RollbackConfig",
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
