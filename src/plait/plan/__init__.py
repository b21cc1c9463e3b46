"""What a run will take, known before it starts: memory, time, and the layouts that would do.

[Note: the plan is the code] Nothing here knows how a strategy works. A plan runs `prepare_native` and `train_step`, the
functions that train, in a fake world, and watches: see `simulate`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.plan.aside import in_a_child as in_a_child
    from plait.plan.candidate import Candidate as Candidate
    from plait.plan.classify import classify as classify
    from plait.plan.classify import known_tensors as known_tensors
    from plait.plan.expectation import Forecast as Forecast
    from plait.plan.expectation import forecast as forecast
    from plait.plan.gate import best_ratio as best_ratio
    from plait.plan.gate import best_settings as best_settings
    from plait.plan.hardware import Hardware as Hardware
    from plait.plan.hardware import find_hardware as find_hardware
    from plait.plan.hardware import hardware_here as hardware_here
    from plait.plan.host import host_peaks as host_peaks
    from plait.plan.ladder import Ladder as Ladder
    from plait.plan.ladder import Rung as Rung
    from plait.plan.measure import measure_hardware as measure_hardware
    from plait.plan.plan import Plan as Plan
    from plait.plan.plan import make_plan as make_plan
    from plait.plan.quick_memory import shards_of as shards_of
    from plait.plan.rankplan import Known as Known
    from plait.plan.recorder import Recorder as Recorder
    from plait.plan.space import Space as Space
    from plait.plan.space import candidates as candidates
    from plait.plan.space import that_can_pay as that_can_pay
    from plait.plan.states import account_of as account_of
    from plait.plan.states import count_params as count_params
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
    from plait.plan.timeline import draw_timeline as draw_timeline
    from plait.plan.traffic import message_of as message_of
    from plait.plan.ways import Search as Search
    from plait.plan.ways import in_expected_order as in_expected_order
    from plait.plan.ways import search as search
    from plait.plan.work import flops_of as flops_of
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "aside": ["in_a_child"],
            "candidate": ["Candidate"],
            "classify": ["classify", "known_tensors"],
            "expectation": ["Forecast", "forecast"],
            "gate": ["best_ratio", "best_settings"],
            "hardware": ["Hardware", "find_hardware", "hardware_here"],
            "host": ["host_peaks"],
            "ladder": ["Ladder", "Rung"],
            "measure": ["measure_hardware"],
            "plan": ["Plan", "make_plan"],
            "quick_memory": ["shards_of"],
            "rankplan": ["Known"],
            "recorder": ["Recorder"],
            "space": ["Space", "candidates", "that_can_pay"],
            "states": [
                "account_of",
                "count_params",
                "estimate_zero2_model_states_mem_needs",
                "estimate_zero2_model_states_mem_needs_all_cold",
                "estimate_zero2_model_states_mem_needs_all_live",
                "estimate_zero3_model_states_mem_needs",
                "estimate_zero3_model_states_mem_needs_all_cold",
                "estimate_zero3_model_states_mem_needs_all_live",
                "zero2_table",
                "zero3_table",
            ],
            "timeline": ["draw_timeline"],
            "traffic": ["message_of"],
            "ways": ["Search", "in_expected_order", "search"],
            "work": ["flops_of"],
        },
    )
