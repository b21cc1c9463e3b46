"""Expert parallelism: the experts of a mixture spread over ranks, and tokens sent to where their experts are."""

from plait.parallel.expert.apply import apply_expert_parallel, check_experts, expert_modules, expert_placement
from plait.parallel.expert.rows import share_rows
from plait.parallel.expert.volume import bytes_sent

__all__ = ["apply_expert_parallel", "bytes_sent", "check_experts", "expert_modules", "expert_placement", "share_rows"]
