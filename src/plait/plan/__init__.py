"""What a run will take, known before it starts: memory, time, and the layouts that would do.

[Note: the plan is the code] Nothing here knows how a strategy works. A plan runs `prepare_native` and `train_step`, the
functions that train, in a fake world, and watches: see `simulate`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.plan.hardware import Hardware as Hardware
    from plait.plan.hardware import find_hardware as find_hardware
    from plait.plan.hardware import hardware_here as hardware_here
    from plait.plan.plan import Plan as Plan
    from plait.plan.plan import make_plan as make_plan
    from plait.plan.states import (
        estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,
    )
    from plait.plan.states import (
        estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,
    )
    from plait.plan.states import (
        estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
    )
    from plait.plan.states import (
        estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,
    )
    from plait.plan.ways import Search as Search
    from plait.plan.ways import search as search
else:
    from plait.lazy import attach

    attach(
        __name__,
        {
            "hardware": ["Hardware", "find_hardware", "hardware_here"],
            "plan": ["Plan", "make_plan"],
            "states": [
                "estimate_zero2_model_states_mem_needs_all_cold",
                "estimate_zero2_model_states_mem_needs_all_live",
                "estimate_zero3_model_states_mem_needs_all_cold",
                "estimate_zero3_model_states_mem_needs_all_live",
            ],
            "ways": ["Search", "search"],
        },
    )
