"""The techniques. None of them knows another; they meet in `strategy/native/prepare.py`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.parallel import compiling as compiling
    from plait.parallel import materialize as materialize
    from plait.parallel import recompute as recompute
    from plait.parallel import zero as zero
    from plait.parallel.activations import Activations as Activations
    from plait.parallel.activations import UnitAccount as UnitAccount
    from plait.parallel.attachments import Attributes as Attributes
    from plait.parallel.attachments import attributes_of as attributes_of
    from plait.parallel.attachments import give_attributes as give_attributes
    from plait.parallel.attachments import gradient_hooks as gradient_hooks
    from plait.parallel.attachments import held_elsewhere as held_elsewhere
    from plait.parallel.attachments import memory_in_common as memory_in_common
    from plait.parallel.attachments import why_not_on_meta as why_not_on_meta
    from plait.parallel.budget import measure as measure
    from plait.parallel.budget import ways_to_recompute as ways_to_recompute
    from plait.parallel.buffers import persistent_buffers as persistent_buffers
    from plait.parallel.compiling import undo_compile as undo_compile
    from plait.parallel.compiling import why_not as why_not
    from plait.parallel.context import apply_context_parallel as apply_context_parallel
    from plait.parallel.context import split_batch as split_batch
    from plait.parallel.entrances import open_entrances as open_entrances
    from plait.parallel.expert import apply_expert_parallel as apply_expert_parallel
    from plait.parallel.expert import check_experts as check_experts
    from plait.parallel.expert import expert_placement as expert_placement
    from plait.parallel.expert import share_rows as share_rows
    from plait.parallel.gradients import Gradients as Gradients
    from plait.parallel.gradients import as_one as as_one
    from plait.parallel.hf import is_transformers_model as is_transformers_model
    from plait.parallel.hf import train_without_caches as train_without_caches
    from plait.parallel.initializer import Initializer as Initializer
    from plait.parallel.initializer import InTurn as InTurn
    from plait.parallel.initializer import find_initializer as find_initializer
    from plait.parallel.materialize import assign_whole as assign_whole
    from plait.parallel.materialize import copy_from_main as copy_from_main
    from plait.parallel.materialize import part_of as part_of
    from plait.parallel.offload.activations import activations_on_host as activations_on_host
    from plait.parallel.offload.activations import offload_activations as offload_activations
    from plait.parallel.offload.buckets import Home as Home
    from plait.parallel.offload.collect import StreamedGradients as StreamedGradients
    from plait.parallel.offload.collect import gathering_stream as gathering_stream
    from plait.parallel.offload.collect import listen_to_shards as listen_to_shards
    from plait.parallel.offload.lanes import Lanes as Lanes
    from plait.parallel.offload.params import ParamLimits as ParamLimits
    from plait.parallel.offload.params import ParamStream as ParamStream
    from plait.parallel.offload.space import check_space as check_space
    from plait.parallel.offload.space import host_need as host_need
    from plait.parallel.offload.space import numbers_in_a_bucket as numbers_in_a_bucket
    from plait.parallel.offload.space import state_bytes as state_bytes
    from plait.parallel.offload.space import updates_on_device as updates_on_device
    from plait.parallel.offload.store import Offload as Offload
    from plait.parallel.offload.store import OffloadOptions as OffloadOptions
    from plait.parallel.offload.stream import WeightStream as WeightStream
    from plait.parallel.offload.stream import stream_weights as stream_weights
    from plait.parallel.offload.visit import room_bytes as room_bytes
    from plait.parallel.pipeline import Bubble as Bubble
    from plait.parallel.pipeline import Pipeline as Pipeline
    from plait.parallel.pipeline import Stage as Stage
    from plait.parallel.pipeline import agree as agree
    from plait.parallel.pipeline import check_pipeline as check_pipeline
    from plait.parallel.pipeline import draw_schedule as draw_schedule
    from plait.parallel.pipeline import is_legal as is_legal
    from plait.parallel.pipeline import make_stages as make_stages
    from plait.parallel.pipeline import make_table as make_table
    from plait.parallel.pipeline import measure_layers as measure_layers
    from plait.parallel.pipeline import plan_stages as plan_stages
    from plait.parallel.pipeline import theoretical_bubble as theoretical_bubble
    from plait.parallel.pipeline import tie_stages as tie_stages
    from plait.parallel.pipeline.outline import outline_of as outline_of
    from plait.parallel.pipeline.tied import Find as Find
    from plait.parallel.recompute import Way as Way
    from plait.parallel.recompute import apply_recompute as apply_recompute
    from plait.parallel.recompute import kept_operations as kept_operations
    from plait.parallel.recording import Record as Record
    from plait.parallel.replay import Replay as Replay
    from plait.parallel.replicate import GradientBuckets as GradientBuckets
    from plait.parallel.replicate import average_buffers as average_buffers
    from plait.parallel.single import OwnGradients as OwnGradients
    from plait.parallel.tensor import apply_tensor_parallel as apply_tensor_parallel
    from plait.parallel.tensor import plan_of as plan_of
    from plait.parallel.tensor import sharding_dim as sharding_dim
    from plait.parallel.tensor import stays_whole as stays_whole
    from plait.parallel.tensor.plan import outer as outer
    from plait.parallel.tensor.plan import read_plan as read_plan
    from plait.parallel.tensor.transformers_plan import transformers_words as transformers_words
    from plait.parallel.tiles import tile_layers as tile_layers
    from plait.parallel.units import Unit as Unit
    from plait.parallel.units import find_units as find_units
    from plait.parallel.wholes import Wholes as Wholes
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["compiling", "materialize", "recompute", "zero"],
            "activations": ["Activations", "UnitAccount"],
            "attachments": [
                "Attributes",
                "attributes_of",
                "give_attributes",
                "gradient_hooks",
                "held_elsewhere",
                "memory_in_common",
                "why_not_on_meta",
            ],
            "budget": ["measure", "ways_to_recompute"],
            "buffers": ["persistent_buffers"],
            "compiling": ["undo_compile", "why_not"],
            "context": ["apply_context_parallel", "split_batch"],
            "entrances": ["open_entrances"],
            "expert": ["apply_expert_parallel", "check_experts", "expert_placement", "share_rows"],
            "gradients": ["Gradients", "as_one"],
            "hf": ["is_transformers_model", "train_without_caches"],
            "initializer": ["InTurn", "Initializer", "find_initializer"],
            "materialize": ["assign_whole", "copy_from_main", "part_of"],
            "offload.activations": ["activations_on_host", "offload_activations"],
            "offload.buckets": ["Home"],
            "offload.collect": ["StreamedGradients", "gathering_stream", "listen_to_shards"],
            "offload.lanes": ["Lanes"],
            "offload.params": ["ParamLimits", "ParamStream"],
            "offload.space": ["check_space", "host_need", "numbers_in_a_bucket", "state_bytes", "updates_on_device"],
            "offload.store": ["Offload", "OffloadOptions"],
            "offload.stream": ["WeightStream", "stream_weights"],
            "offload.visit": ["room_bytes"],
            "pipeline": [
                "Bubble",
                "Pipeline",
                "Stage",
                "agree",
                "check_pipeline",
                "draw_schedule",
                "is_legal",
                "make_stages",
                "make_table",
                "measure_layers",
                "plan_stages",
                "theoretical_bubble",
                "tie_stages",
            ],
            "pipeline.outline": ["outline_of"],
            "pipeline.tied": ["Find"],
            "recompute": ["Way", "apply_recompute", "kept_operations"],
            "recording": ["Record"],
            "replay": ["Replay"],
            "replicate": ["GradientBuckets", "average_buffers"],
            "single": ["OwnGradients"],
            "tensor": ["apply_tensor_parallel", "plan_of", "sharding_dim", "stays_whole"],
            "tensor.plan": ["outer", "read_plan"],
            "tensor.transformers_plan": ["transformers_words"],
            "tiles": ["tile_layers"],
            "units": ["Unit", "find_units"],
            "wholes": ["Wholes"],
        },
    )
