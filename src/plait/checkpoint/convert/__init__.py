"""Checkpoints of other kinds: opened without executing anything in them, and written, one tensor at a time."""

from plait.checkpoint.convert.detect import Reader, kind_of, newest_tag, open_source
from plait.checkpoint.convert.huggingface import Description, companions, read_description
from plait.checkpoint.convert.megatron import without_padding
from plait.checkpoint.convert.sinks import KINDS, SHARD_SIZE, ConversionResult, Kind, Writer, convert, part_for
from plait.checkpoint.convert.source import Source, TensorEntry, Watched, averaged, cast, translated, with_state

__all__ = [
    "KINDS",
    "SHARD_SIZE",
    "ConversionResult",
    "Description",
    "Kind",
    "Reader",
    "Source",
    "TensorEntry",
    "Watched",
    "Writer",
    "averaged",
    "cast",
    "companions",
    "convert",
    "kind_of",
    "newest_tag",
    "open_source",
    "part_for",
    "read_description",
    "translated",
    "with_state",
    "without_padding",
]
