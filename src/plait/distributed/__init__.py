"""World, collectives and the parallel techniques; `engine/prepare.py` applies them in order."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.distributed import compile as compile
    from plait.distributed import fsdp as fsdp
    from plait.distributed import materialize as materialize
    from plait.distributed.activation_checkpointing import Activations as Activations
    from plait.distributed.activation_checkpointing import RecomputeLevel as RecomputeLevel
    from plait.distributed.activation_checkpointing import UnitMemory as UnitMemory
    from plait.distributed.activation_checkpointing import apply_recompute as apply_recompute
    from plait.distributed.activation_checkpointing import count_activations as count_activations
    from plait.distributed.activation_checkpointing import kept_operations as kept_operations
    from plait.distributed.collectives import Channel as Channel
    from plait.distributed.collectives import all_gather_flat as all_gather_flat
    from plait.distributed.collectives import on_main as on_main
    from plait.distributed.compile import reason_not_to_compile as reason_not_to_compile
    from plait.distributed.compile import undo_compile as undo_compile
    from plait.distributed.context_parallel import apply_context_parallel as apply_context_parallel
    from plait.distributed.context_parallel_attention import split_batch as split_batch
    from plait.distributed.ddp import GradientBuckets as GradientBuckets
    from plait.distributed.ddp import Gradients as Gradients
    from plait.distributed.ddp import LocalGradients as LocalGradients
    from plait.distributed.ddp import average_buffers as average_buffers
    from plait.distributed.ddp import combine_collectors as combine_collectors
    from plait.distributed.ddp import persistent_buffers as persistent_buffers
    from plait.distributed.deferred_init import ConstructionRecord as ConstructionRecord
    from plait.distributed.deferred_init import Replay as Replay
    from plait.distributed.device import device_from_env as device_from_env
    from plait.distributed.device import export_ranks as export_ranks
    from plait.distributed.device import open_group_of_one as open_group_of_one
    from plait.distributed.dtensor import dtensor_like as dtensor_like
    from plait.distributed.dtensor import is_sharded as is_sharded
    from plait.distributed.dtensor import local_grad as local_grad
    from plait.distributed.dtensor import to_local as to_local
    from plait.distributed.expert_parallel import apply_expert_parallel as apply_expert_parallel
    from plait.distributed.expert_parallel import check_experts as check_experts
    from plait.distributed.expert_parallel import expert_placement as expert_placement
    from plait.distributed.expert_parallel import share_router_sums as share_router_sums
    from plait.distributed.fake import fake_world as fake_world
    from plait.distributed.fake import replaced as replaced
    from plait.distributed.fsdp import UnshardedParams as UnshardedParams
    from plait.distributed.fsdp import add_fsdp_roots as add_fsdp_roots
    from plait.distributed.heartbeat import wait_for as wait_for
    from plait.distributed.materialize import Attributes as Attributes
    from plait.distributed.materialize import Initializer as Initializer
    from plait.distributed.materialize import InitializerChain as InitializerChain
    from plait.distributed.materialize import assign_full_tensor as assign_full_tensor
    from plait.distributed.materialize import copy_from_main as copy_from_main
    from plait.distributed.materialize import find_initializer as find_initializer
    from plait.distributed.materialize import find_shared_storage as find_shared_storage
    from plait.distributed.materialize import gradient_hooks as gradient_hooks
    from plait.distributed.materialize import local_shard_of as local_shard_of
    from plait.distributed.materialize import param_attributes as param_attributes
    from plait.distributed.materialize import restore_attributes as restore_attributes
    from plait.distributed.materialize import unregistered_tensors as unregistered_tensors
    from plait.distributed.materialize import why_not_on_meta as why_not_on_meta
    from plait.distributed.offload.activations import activations_on_host as activations_on_host
    from plait.distributed.offload.activations import offload_activations as offload_activations
    from plait.distributed.offload.gradients import GradientOffloadQueue as GradientOffloadQueue
    from plait.distributed.offload.gradients import OffloadedGradient as OffloadedGradient
    from plait.distributed.offload.gradients import StreamedGradients as StreamedGradients
    from plait.distributed.offload.gradients import gathering_stream as gathering_stream
    from plait.distributed.offload.gradients import listen_to_reductions as listen_to_reductions
    from plait.distributed.offload.layout import STATE_SEPARATOR as STATE_SEPARATOR
    from plait.distributed.offload.layout import Bucket as Bucket
    from plait.distributed.offload.layout import BucketSpan as BucketSpan
    from plait.distributed.offload.layout import Home as Home
    from plait.distributed.offload.layout import Key as Key
    from plait.distributed.offload.layout import OffloadFile as OffloadFile
    from plait.distributed.offload.layout import Sink as Sink
    from plait.distributed.offload.layout import copy_options as copy_options
    from plait.distributed.offload.layout import map_state as map_state
    from plait.distributed.offload.layout import optimizer_for as optimizer_for
    from plait.distributed.offload.layout import plan_spans as plan_spans
    from plait.distributed.offload.layout import state_tensors as state_tensors
    from plait.distributed.offload.params import ParamLimits as ParamLimits
    from plait.distributed.offload.params import ParamStream as ParamStream
    from plait.distributed.offload.params import WeightStream as WeightStream
    from plait.distributed.offload.params import stream_weights as stream_weights
    from plait.distributed.offload.streams import CopyStreams as CopyStreams
    from plait.distributed.offload.streams import Scratch as Scratch
    from plait.distributed.pipeline_parallel import Bubble as Bubble
    from plait.distributed.pipeline_parallel import Pipeline as Pipeline
    from plait.distributed.pipeline_schedule import check_pipeline as check_pipeline
    from plait.distributed.pipeline_schedule import draw_schedule as draw_schedule
    from plait.distributed.pipeline_schedule import is_legal as is_legal
    from plait.distributed.pipeline_schedule import make_table as make_table
    from plait.distributed.pipeline_schedule import theoretical_bubble as theoretical_bubble
    from plait.distributed.pipeline_split import Stage as Stage
    from plait.distributed.pipeline_split import TensorOf as TensorOf
    from plait.distributed.pipeline_split import broadcast_costs as broadcast_costs
    from plait.distributed.pipeline_split import make_stages as make_stages
    from plait.distributed.pipeline_split import measure_layers as measure_layers
    from plait.distributed.pipeline_split import outline_of as outline_of
    from plait.distributed.pipeline_split import plan_stages as plan_stages
    from plait.distributed.pipeline_split import tie_stages as tie_stages
    from plait.distributed.ranks import Ranks as Ranks
    from plait.distributed.ranks import accelerate_environment as accelerate_environment
    from plait.distributed.ranks import detect_ranks as detect_ranks
    from plait.distributed.seeding import make_deterministic as make_deterministic
    from plait.distributed.seeding import restore_rng_state as restore_rng_state
    from plait.distributed.seeding import rng_state as rng_state
    from plait.distributed.seeding import seed_everything as seed_everything
    from plait.distributed.tensor_parallel import apply_tensor_parallel as apply_tensor_parallel
    from plait.distributed.tensor_parallel import enclosing_module as enclosing_module
    from plait.distributed.tensor_parallel import experts_are_replicated as experts_are_replicated
    from plait.distributed.tensor_parallel import is_transformers_model as is_transformers_model
    from plait.distributed.tensor_parallel import load_tensor_plan as load_tensor_plan
    from plait.distributed.tensor_parallel import resolve_plan as resolve_plan
    from plait.distributed.tensor_parallel import train_without_caches as train_without_caches
    from plait.distributed.tensor_parallel import transformers_styles as transformers_styles
    from plait.distributed.tensor_parallel_styles import sharding_dim as sharding_dim
    from plait.distributed.tiling import tile_sequence as tile_sequence
    from plait.distributed.world import World as World
    from plait.distributed.world import make_mesh as make_mesh
    from plait.distributed.world import open_world as open_world
    from plait.distributed.wrap import WrapUnit as WrapUnit
    from plait.distributed.wrap import find_wrap_units as find_wrap_units
    from plait.distributed.wrap import first_input as first_input
    from plait.torch_internals import OptimizedModule as OptimizedModule
    from plait.torch_internals import module_wrap_classes as module_wrap_classes
    from plait.torch_internals import original_module_of as original_module_of
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["compile", "fsdp", "materialize"],
            "collectives": ["Channel", "all_gather_flat", "on_main"],
            "compile": ["undo_compile", "reason_not_to_compile"],
            "context_parallel": ["apply_context_parallel"],
            "context_parallel_attention": ["split_batch"],
            "ddp": [
                "GradientBuckets",
                "Gradients",
                "LocalGradients",
                "combine_collectors",
                "average_buffers",
                "persistent_buffers",
            ],
            "device": ["device_from_env", "export_ranks", "open_group_of_one"],
            "dtensor": ["is_sharded", "to_local", "dtensor_like", "local_grad"],
            "expert_parallel": ["apply_expert_parallel", "check_experts", "expert_placement", "share_router_sums"],
            "fake": ["fake_world", "replaced"],
            "fsdp": ["UnshardedParams", "add_fsdp_roots"],
            "heartbeat": ["wait_for"],
            "materialize": [
                "Attributes",
                "InitializerChain",
                "Initializer",
                "assign_full_tensor",
                "param_attributes",
                "copy_from_main",
                "find_initializer",
                "restore_attributes",
                "gradient_hooks",
                "unregistered_tensors",
                "find_shared_storage",
                "local_shard_of",
                "why_not_on_meta",
            ],
            "offload.activations": ["activations_on_host", "offload_activations"],
            "offload.gradients": [
                "GradientOffloadQueue",
                "OffloadedGradient",
                "StreamedGradients",
                "gathering_stream",
                "listen_to_reductions",
            ],
            "offload.layout": [
                "Bucket",
                "BucketSpan",
                "Home",
                "Key",
                "OffloadFile",
                "STATE_SEPARATOR",
                "Sink",
                "copy_options",
                "state_tensors",
                "map_state",
                "plan_spans",
                "optimizer_for",
            ],
            "offload.params": ["ParamLimits", "ParamStream", "WeightStream", "stream_weights"],
            "offload.streams": ["CopyStreams", "Scratch"],
            "pipeline_parallel": ["Bubble", "Pipeline"],
            "pipeline_schedule": ["check_pipeline", "draw_schedule", "is_legal", "make_table", "theoretical_bubble"],
            "pipeline_split": [
                "TensorOf",
                "Stage",
                "broadcast_costs",
                "make_stages",
                "measure_layers",
                "outline_of",
                "plan_stages",
                "tie_stages",
            ],
            "ranks": ["Ranks", "accelerate_environment", "detect_ranks"],
            "activation_checkpointing": [
                "Activations",
                "UnitMemory",
                "RecomputeLevel",
                "apply_recompute",
                "count_activations",
                "kept_operations",
            ],
            "deferred_init": ["ConstructionRecord", "Replay"],
            "seeding": ["make_deterministic", "restore_rng_state", "rng_state", "seed_everything"],
            "tensor_parallel": [
                "apply_tensor_parallel",
                "is_transformers_model",
                "enclosing_module",
                "load_tensor_plan",
                "resolve_plan",
                "experts_are_replicated",
                "train_without_caches",
                "transformers_styles",
            ],
            "tensor_parallel_styles": ["sharding_dim"],
            "tiling": ["tile_sequence"],
            "world": ["World", "make_mesh", "open_world"],
            "wrap": ["WrapUnit", "find_wrap_units", "first_input"],
            "plait.torch_internals": ["OptimizedModule", "module_wrap_classes", "original_module_of"],
        },
    )
