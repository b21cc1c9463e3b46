"""Expert parallelism: the experts of a mixture spread over ranks, and tokens sent to where their experts are."""

from plait.parallel.expert.apply import apply_expert_parallel, check_experts, expert_modules, expert_placement
from plait.parallel.expert.rows import share_rows
from plait.parallel.expert.traffic import expert_traffic

__all__ = [
    "apply_expert_parallel",
    "check_experts",
    "expert_modules",
    "expert_placement",
    "expert_traffic",
    "share_rows",
]
