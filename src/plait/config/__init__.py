"""The frozen, closed description of a run. Imports no torch."""

from plait.config.batch import ResolvedBatch, resolve_batch
from plait.config.layout import Layout, resolve_layout
from plait.config.parse import Parsed, parse, parse_sections, parse_stored
from plait.config.rules import check
from plait.config.run import RunConfig
from plait.config.show import describe, to_dict, to_yaml

__all__ = [
    "Layout",
    "Parsed",
    "ResolvedBatch",
    "RunConfig",
    "check",
    "describe",
    "parse",
    "parse_sections",
    "parse_stored",
    "resolve_batch",
    "resolve_layout",
    "to_dict",
    "to_yaml",
]
