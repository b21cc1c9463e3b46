"""How parameters move: groups, optimizers, schedules, clipping."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.optim.adopt import Adoption as Adoption
    from plait.optim.adopt import OptimizerSource as OptimizerSource
    from plait.optim.adopt import bare_step as bare_step
    from plait.optim.base import MakeState as MakeState
    from plait.optim.base import OwnOptimizer as OwnOptimizer
    from plait.optim.build import build_optimizer as build_optimizer
    from plait.optim.build import is_one_pass as is_one_pass
    from plait.optim.build import supports_grad_scale as supports_grad_scale
    from plait.optim.clip import clip_by_value as clip_by_value
    from plait.optim.clip import grad_norm as grad_norm
    from plait.optim.clip import norm_of as norm_of
    from plait.optim.clip import part_norms as part_norms
    from plait.optim.clip import whole_norm as whole_norm
    from plait.optim.groups import GroupSpec as GroupSpec
    from plait.optim.groups import ViewGroup as ViewGroup
    from plait.optim.groups import parameter_infos as parameter_infos
    from plait.optim.groups import split_groups as split_groups
    from plait.optim.kinds import Sees as Sees
    from plait.optim.kinds import is_known as is_known
    from plait.optim.kinds import what_it_sees as what_it_sees
    from plait.optim.lamb import Lamb as Lamb
    from plait.optim.lion import Lion as Lion
    from plait.optim.numbers import Record as Record
    from plait.optim.numbers import leaves as leaves
    from plait.optim.numbers import merged as merged
    from plait.optim.numbers import tensors_of as tensors_of
    from plait.optim.one_pass import OnePassAdam as OnePassAdam
    from plait.optim.parts import base_rate as base_rate
    from plait.optim.parts import make_part as make_part
    from plait.optim.schedule import OwnRates as OwnRates
    from plait.optim.schedule import Schedule as Schedule
    from plait.optim.schedule import build_schedule as build_schedule
    from plait.optim.shared_out import SharedOut as SharedOut
    from plait.optim.trial import Asked as Asked
    from plait.optim.trial import has_two_modes as has_two_modes
    from plait.optim.trial import judge as judge
    from plait.optim.trial import twins_of as twins_of
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "adopt": ["Adoption", "OptimizerSource", "bare_step"],
            "base": ["MakeState", "OwnOptimizer"],
            "build": ["build_optimizer", "is_one_pass", "supports_grad_scale"],
            "clip": ["clip_by_value", "grad_norm", "norm_of", "part_norms", "whole_norm"],
            "groups": ["GroupSpec", "ViewGroup", "parameter_infos", "split_groups"],
            "kinds": ["Sees", "is_known", "what_it_sees"],
            "lamb": ["Lamb"],
            "lion": ["Lion"],
            "numbers": ["Record", "leaves", "merged", "tensors_of"],
            "one_pass": ["OnePassAdam"],
            "parts": ["base_rate", "make_part"],
            "schedule": ["OwnRates", "Schedule", "build_schedule"],
            "shared_out": ["SharedOut"],
            "trial": ["Asked", "has_two_modes", "judge", "twins_of"],
        },
    )
