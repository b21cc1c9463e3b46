"""Predict the memory and the step time of a run before it starts, and search the settings with which it fits.

[Note: the plan is the code] Strategies are not modelled a second time. A plan runs `prepare_native` and
`train_step`, the functions that train, on fake tensors, and records every operation: see `simulate`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.plan.classify import classify as classify
    from plait.plan.classify import known_tensors as known_tensors
    from plait.plan.gate import RunPlan as RunPlan
    from plait.plan.gate import best_ratio as best_ratio
    from plait.plan.gate import best_settings as best_settings
    from plait.plan.gate import plan_run as plan_run
    from plait.plan.gate import run_forked as run_forked
    from plait.plan.hardware import Hardware as Hardware
    from plait.plan.hardware import find_hardware as find_hardware
    from plait.plan.hardware import hardware_here as hardware_here
    from plait.plan.ledger import host_peaks as host_peaks
    from plait.plan.measure import measure_hardware as measure_hardware
    from plait.plan.plan import Plan as Plan
    from plait.plan.plan import draw_timeline as draw_timeline
    from plait.plan.plan import make_plan as make_plan
    from plait.plan.quick import shards_of as shards_of
    from plait.plan.rankplan import Known as Known
    from plait.plan.recorder import MemoryRecorder as MemoryRecorder
    from plait.plan.remedies import Remedy as Remedy
    from plait.plan.remedies import RemedySearch as RemedySearch
    from plait.plan.search import Search as Search
    from plait.plan.search import order_by_estimate as order_by_estimate
    from plait.plan.search import search as search
    from plait.plan.space import Candidate as Candidate
    from plait.plan.space import Space as Space
    from plait.plan.space import candidates as candidates
    from plait.plan.space import useful_dimensions as useful_dimensions
    from plait.plan.states import count_params as count_params
    from plait.plan.states import estimate_states as estimate_states
    from plait.plan.states import estimate_zero2_model_states_mem_needs as estimate_zero2_model_states_mem_needs
    from plait.plan.states import (
        estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,
    )
    from plait.plan.states import (
        estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,
    )
    from plait.plan.states import estimate_zero3_model_states_mem_needs as estimate_zero3_model_states_mem_needs
    from plait.plan.states import (
        estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
    )
    from plait.plan.states import (
        estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,
    )
    from plait.plan.states import zero2_table as zero2_table
    from plait.plan.states import zero3_table as zero3_table
    from plait.plan.timing import flops_of as flops_of
    from plait.plan.timing import message_of as message_of
else:
    from plait.lazy import attach_names

    attach_names(__name__)
