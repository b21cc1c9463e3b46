"""How parameters move: groups, optimizers, schedules, clipping."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.optim.adopt import Adoption as Adoption
    from plait.optim.adopt import OptimizerSource as OptimizerSource
    from plait.optim.adopt import bare_step as bare_step
    from plait.optim.base import MakeState as MakeState
    from plait.optim.base import OwnOptimizer as OwnOptimizer
    from plait.optim.build import ViewGroup as ViewGroup
    from plait.optim.build import build_optimizer as build_optimizer
    from plait.optim.build import is_elementwise as is_elementwise
    from plait.optim.build import is_one_pass as is_one_pass
    from plait.optim.build import supports_grad_scale as supports_grad_scale
    from plait.optim.clip import clip_by_value as clip_by_value
    from plait.optim.clip import grad_norm as grad_norm
    from plait.optim.clip import norm_of as norm_of
    from plait.optim.clip import part_norms as part_norms
    from plait.optim.clip import whole_norm as whole_norm
    from plait.optim.groups import GroupSpec as GroupSpec
    from plait.optim.groups import parameter_infos as parameter_infos
    from plait.optim.groups import split_groups as split_groups
    from plait.optim.lamb import Lamb as Lamb
    from plait.optim.lion import Lion as Lion
    from plait.optim.one_pass import OnePassAdam as OnePassAdam
    from plait.optim.schedule import OwnRates as OwnRates
    from plait.optim.schedule import Schedule as Schedule
    from plait.optim.schedule import build_schedule as build_schedule
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "adopt": ["Adoption", "OptimizerSource", "bare_step"],
            "base": ["MakeState", "OwnOptimizer"],
            "build": ["ViewGroup", "build_optimizer", "is_elementwise", "is_one_pass", "supports_grad_scale"],
            "clip": ["clip_by_value", "grad_norm", "norm_of", "part_norms", "whole_norm"],
            "groups": ["GroupSpec", "parameter_infos", "split_groups"],
            "lamb": ["Lamb"],
            "lion": ["Lion"],
            "one_pass": ["OnePassAdam"],
            "schedule": ["OwnRates", "Schedule", "build_schedule"],
        },
    )
