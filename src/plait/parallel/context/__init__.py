"""Context parallelism: long rows of tokens, each rank with a part of every row."""

from plait.parallel.context.apply import apply_context_parallel
from plait.parallel.context.split import KINDS, Kind, cut, join, padded_length, split_batch
from plait.parallel.context.traffic import Traffic, context_traffic

__all__ = [
    "KINDS",
    "Kind",
    "Traffic",
    "apply_context_parallel",
    "context_traffic",
    "cut",
    "join",
    "padded_length",
    "split_batch",
]
