"""Checkpoints of other kinds: opened without executing anything in them, and written, one tensor at a time."""

from plait.checkpoint.convert.detect import Reader, kind_of, newest_tag, open_source
from plait.checkpoint.convert.huggingface import Description, companions, read_description
from plait.checkpoint.convert.megatron import without_padding
from plait.checkpoint.convert.sinks import KINDS, SHARD_SIZE, Kind, Writer, Written, convert, part_for
from plait.checkpoint.convert.source import Entry, Source
from plait.checkpoint.convert.view import Watched, averaged, cast, translated, with_state

__all__ = [
    "KINDS",
    "SHARD_SIZE",
    "Description",
    "Entry",
    "Kind",
    "Reader",
    "Source",
    "Watched",
    "Writer",
    "Written",
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
