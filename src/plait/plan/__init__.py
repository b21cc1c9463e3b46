"""What a run will take, known before it starts: memory, time, and the layouts that would do.

[Note: the plan is the code] Nothing here knows how a strategy works. A plan runs `prepare_native` and `train_step`, the
functions that train, in a fake world, and watches: see `simulate`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.plan.hardware import Hardware, find_hardware, hardware_here
    from plait.plan.plan import Plan, make_plan
    from plait.plan.states import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from plait.plan.ways import Search, search

_HOMES = {
    "Hardware": "hardware",
    "find_hardware": "hardware",
    "hardware_here": "hardware",
    "Plan": "plan",
    "make_plan": "plan",
    "Search": "ways",
    "search": "ways",
    "estimate_zero2_model_states_mem_needs_all_cold": "states",
    "estimate_zero2_model_states_mem_needs_all_live": "states",
    "estimate_zero3_model_states_mem_needs_all_cold": "states",
    "estimate_zero3_model_states_mem_needs_all_live": "states",
}

__all__ = [
    "Hardware",
    "Plan",
    "Search",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "find_hardware",
    "hardware_here",
    "make_plan",
    "search",
]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: an estimate needs no simulation, and a simulation loads much of torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
