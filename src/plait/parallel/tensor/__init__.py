"""Tensor and sequence parallelism: the ranks share each layer's work."""

from plait.parallel.tensor.apply import apply_tensor_parallel, stays_whole, words_of
from plait.parallel.tensor.async_tp import why_no_async
from plait.parallel.tensor.parameters import sharding_dim
from plait.parallel.tensor.plan import WORDS, plan_of, read_plan
from plait.parallel.tensor.sequence import check_sequence
from plait.parallel.tensor.traffic import Traffic, tensor_traffic

__all__ = [
    "WORDS",
    "Traffic",
    "apply_tensor_parallel",
    "check_sequence",
    "plan_of",
    "read_plan",
    "sharding_dim",
    "stays_whole",
    "tensor_traffic",
    "why_no_async",
    "words_of",
]
