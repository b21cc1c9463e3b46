"""How parameters move: groups, optimizers, schedules, clipping."""

from plait.optim.adopt import Adoption, OptimizerSource, bare_step
from plait.optim.build import build_optimizer, is_one_pass, supports_grad_scale
from plait.optim.clip import clip_by_value, grad_norm, norm_of, part_norms, whole_norm
from plait.optim.groups import GroupSpec, ParameterInfo, ViewGroup, parameter_infos, split_groups
from plait.optim.kinds import Sees, is_known, what_it_sees
from plait.optim.parts import base_rate, make_part
from plait.optim.schedule import OwnRates, Schedule, build_schedule

__all__ = [
    "Adoption",
    "GroupSpec",
    "OptimizerSource",
    "OwnRates",
    "ParameterInfo",
    "Schedule",
    "Sees",
    "ViewGroup",
    "bare_step",
    "base_rate",
    "build_optimizer",
    "build_schedule",
    "clip_by_value",
    "grad_norm",
    "is_known",
    "is_one_pass",
    "make_part",
    "norm_of",
    "parameter_infos",
    "part_norms",
    "split_groups",
    "supports_grad_scale",
    "what_it_sees",
    "whole_norm",
]
