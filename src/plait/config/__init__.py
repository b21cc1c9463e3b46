"""The frozen, closed description of a run. Imports no torch."""

from plait.config.batch import ResolvedBatch, resolve_batch
from plait.config.parse import Parsed, parse, parse_sections
from plait.config.rules import check
from plait.config.run import RunConfig
from plait.config.show import describe, to_dict, to_yaml

__all__ = [
    "Parsed",
    "ResolvedBatch",
    "RunConfig",
    "check",
    "describe",
    "parse",
    "parse_sections",
    "resolve_batch",
    "to_dict",
    "to_yaml",
]
