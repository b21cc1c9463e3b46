"""Checkpoints in other formats: read without executing code in them, and written, one tensor at a time."""

from plait.checkpoint.convert.conversion import (
    FORMATS,
    SHARD_SIZE,
    ConversionResult,
    Format,
    Writer,
    convert,
    select_for,
)
from plait.checkpoint.convert.detect import Reader, kind_of, newest_tag, open_source
from plait.checkpoint.convert.huggingface import Description, companions, read_description
from plait.checkpoint.convert.megatron import without_padding
from plait.checkpoint.convert.source import ProgressSource, Source, TensorEntry, averaged, cast, translated, with_state

__all__ = [
    "FORMATS",
    "SHARD_SIZE",
    "ConversionResult",
    "Description",
    "Format",
    "ProgressSource",
    "Reader",
    "Source",
    "TensorEntry",
    "Writer",
    "averaged",
    "cast",
    "companions",
    "convert",
    "kind_of",
    "newest_tag",
    "open_source",
    "read_description",
    "select_for",
    "translated",
    "with_state",
    "without_padding",
]
