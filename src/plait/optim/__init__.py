"""Optimizers, parameter groups, learning-rate schedules, gradient norms, and offloaded updates."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.optim.base import MakeState as MakeState
    from plait.optim.base import ParamForm as ParamForm
    from plait.optim.base import PlaitOptimizer as PlaitOptimizer
    from plait.optim.base import is_builtin as is_builtin
    from plait.optim.base import param_form_of as param_form_of
    from plait.optim.clip import clip_by_value as clip_by_value
    from plait.optim.clip import grad_norm as grad_norm
    from plait.optim.clip import norm_of as norm_of
    from plait.optim.clip import part_norms as part_norms
    from plait.optim.clip import whole_norm as whole_norm
    from plait.optim.examine import OptimizerNeeds as OptimizerNeeds
    from plait.optim.examine import clone_factory as clone_factory
    from plait.optim.examine import examine_optimizer as examine_optimizer
    from plait.optim.examine import has_two_modes as has_two_modes
    from plait.optim.full_params import OwnedParams as OwnedParams
    from plait.optim.fused_adam import OnePassAdam as OnePassAdam
    from plait.optim.groups import GroupSpec as GroupSpec
    from plait.optim.groups import OptimizerGroup as OptimizerGroup
    from plait.optim.groups import parameter_infos as parameter_infos
    from plait.optim.groups import split_groups as split_groups
    from plait.optim.lamb import Lamb as Lamb
    from plait.optim.lion import Lion as Lion
    from plait.optim.offload import Offload as Offload
    from plait.optim.offload import OffloadOptions as OffloadOptions
    from plait.optim.offload import device_buffer_bytes as device_buffer_bytes
    from plait.optim.optimizers import base_rate as base_rate
    from plait.optim.optimizers import build_optimizer as build_optimizer
    from plait.optim.optimizers import is_one_pass as is_one_pass
    from plait.optim.optimizers import make_custom_optimizer as make_custom_optimizer
    from plait.optim.optimizers import supports_grad_scale as supports_grad_scale
    from plait.optim.schedule import Curves as Curves
    from plait.optim.schedule import OptimizerRates as OptimizerRates
    from plait.optim.schedule import Schedule as Schedule
    from plait.optim.schedule import ScheduleSpan as ScheduleSpan
    from plait.optim.schedule import build_schedule as build_schedule
    from plait.optim.state import OptimizerRecord as OptimizerRecord
    from plait.optim.state import flat_tensors as flat_tensors
    from plait.optim.state import leaves as leaves
    from plait.optim.state import merge_records as merge_records
    from plait.optim.swapper import bucket_elements as bucket_elements
    from plait.optim.swapper import check_space as check_space
    from plait.optim.swapper import host_need as host_need
    from plait.optim.swapper import state_bytes as state_bytes
    from plait.optim.swapper import updates_on_device as updates_on_device
    from plait.optim.wrap import OptimizerSource as OptimizerSource
    from plait.optim.wrap import WrappedOptimizer as WrappedOptimizer
    from plait.optim.wrap import bare_step as bare_step
    from plait.torch_internals import count_schedule_step as count_schedule_step
    from plait.torch_internals import schedule_steps as schedule_steps
else:
    from plait.lazy import attach_names

    attach_names(__name__)
