"""How parameters move: groups, optimizers, schedules, clipping."""

from plait.optim.adopt import Adoption, OptimizerSource, bare_step
from plait.optim.build import ViewGroup, build_optimizer, is_elementwise, is_one_pass, supports_grad_scale
from plait.optim.clip import clip_by_value, grad_norm, norm_of, part_norms, whole_norm
from plait.optim.groups import GroupSpec, ParameterInfo, parameter_infos, split_groups
from plait.optim.schedule import OwnRates, Schedule, build_schedule

__all__ = [
    "Adoption",
    "GroupSpec",
    "OptimizerSource",
    "OwnRates",
    "ParameterInfo",
    "Schedule",
    "ViewGroup",
    "bare_step",
    "build_optimizer",
    "build_schedule",
    "clip_by_value",
    "grad_norm",
    "is_elementwise",
    "is_one_pass",
    "norm_of",
    "parameter_infos",
    "part_norms",
    "split_groups",
    "supports_grad_scale",
    "whole_norm",
]
