"""How parameters move: groups, optimizers, schedules, clipping."""

from plait.optim.build import ViewGroup, build_optimizer, is_elementwise, supports_grad_scale
from plait.optim.clip import clip_by_value, grad_norm, grad_norm_tensor
from plait.optim.groups import GroupSpec, ParameterInfo, parameter_infos, split_groups
from plait.optim.schedule import Schedule, build_schedule

__all__ = [
    "GroupSpec",
    "ParameterInfo",
    "Schedule",
    "ViewGroup",
    "build_optimizer",
    "build_schedule",
    "clip_by_value",
    "grad_norm",
    "grad_norm_tensor",
    "is_elementwise",
    "parameter_infos",
    "split_groups",
    "supports_grad_scale",
]
