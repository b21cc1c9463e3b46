"""Checkpoints: logical names and whole shapes on disk, any layout in memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.checkpoint import convert as convert
    from plait.checkpoint.convert.deepspeed import DeepSpeedSource as DeepSpeedSource
    from plait.checkpoint.convert.deepspeed import find_files as find_files
    from plait.checkpoint.convert.detect import kind_of as kind_of
    from plait.checkpoint.convert.detect import newest_tag as newest_tag
    from plait.checkpoint.convert.detect import open_source as open_source
    from plait.checkpoint.convert.files import Found as Found
    from plait.checkpoint.convert.files import PickledTensor as PickledTensor
    from plait.checkpoint.convert.files import TorchFile as TorchFile
    from plait.checkpoint.convert.files import load_values as load_values
    from plait.checkpoint.convert.files import open_file as open_file
    from plait.checkpoint.convert.files import read_found as read_found
    from plait.checkpoint.convert.huggingface import Description as Description
    from plait.checkpoint.convert.huggingface import companions as companions
    from plait.checkpoint.convert.huggingface import read_description as read_description
    from plait.checkpoint.convert.megatron import without_padding as without_padding
    from plait.checkpoint.convert.plait import PlaitSource as PlaitSource
    from plait.checkpoint.convert.sinks import Kind as Kind
    from plait.checkpoint.convert.source import Recipe as Recipe
    from plait.checkpoint.convert.source import Source as Source
    from plait.checkpoint.convert.source import TensorEntry as TensorEntry
    from plait.checkpoint.convert.source import View as View
    from plait.checkpoint.convert.source import translated as translated
    from plait.checkpoint.convert.source import with_state as with_state
    from plait.checkpoint.convert.summary import parts as parts
    from plait.checkpoint.convert.summary import rows as rows
    from plait.checkpoint.fingerprint import fingerprint as fingerprint
    from plait.checkpoint.folder import CheckpointFolder as CheckpointFolder
    from plait.checkpoint.load import Fetch as Fetch
    from plait.checkpoint.load import Misfit as Misfit
    from plait.checkpoint.load import entries as entries
    from plait.checkpoint.load import load_into as load_into
    from plait.checkpoint.load import matches as matches
    from plait.checkpoint.load import nothing_to_fetch as nothing_to_fetch
    from plait.checkpoint.load import verify as verify
    from plait.checkpoint.manifest import MANIFEST_NAME as MANIFEST_NAME
    from plait.checkpoint.manifest import Checkpoint as Checkpoint
    from plait.checkpoint.manifest import Manifest as Manifest
    from plait.checkpoint.manifest import open_checkpoint as open_checkpoint
    from plait.checkpoint.manifest import read_manifest as read_manifest
    from plait.checkpoint.manifest import saved_at as saved_at
    from plait.checkpoint.need import WRITERS as WRITERS
    from plait.checkpoint.need import Kept as Kept
    from plait.checkpoint.need import kept as kept
    from plait.checkpoint.need import need as need
    from plait.checkpoint.need import workers as workers
    from plait.checkpoint.pieces import STRIP as STRIP
    from plait.checkpoint.pieces import Entry as Entry
    from plait.checkpoint.pieces import Later as Later
    from plait.checkpoint.pieces import Shares as Shares
    from plait.checkpoint.pieces import held_pieces as held_pieces
    from plait.checkpoint.ranks import attempt as attempt
    from plait.checkpoint.ranks import together as together
    from plait.checkpoint.save import CheckpointWriter as CheckpointWriter
    from plait.checkpoint.save import Saved as Saved
    from plait.checkpoint.save import save_checkpoint as save_checkpoint
    from plait.checkpoint.save import write_alone as write_alone
    from plait.checkpoint.scattered import find_scattered as find_scattered
    from plait.checkpoint.storage import Storage as Storage
    from plait.checkpoint.storage import build_storage as build_storage
    from plait.checkpoint.tensorfile import BLOCK as BLOCK
    from plait.checkpoint.tensorfile import as_bytes as as_bytes
    from plait.checkpoint.tensorfile import digest as digest
    from plait.checkpoint.tensorfile import in_a_row as in_a_row
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["convert"],
            "convert.deepspeed": ["DeepSpeedSource", "find_files"],
            "convert.detect": ["kind_of", "newest_tag", "open_source"],
            "convert.files": ["Found", "PickledTensor", "TorchFile", "load_values", "open_file", "read_found"],
            "convert.huggingface": ["Description", "companions", "read_description"],
            "convert.megatron": ["without_padding"],
            "convert.plait": ["PlaitSource"],
            "convert.sinks": ["Kind"],
            "convert.source": ["Recipe", "Source", "TensorEntry", "View", "translated", "with_state"],
            "convert.summary": ["parts", "rows"],
            "fingerprint": ["fingerprint"],
            "folder": ["CheckpointFolder"],
            "load": ["Fetch", "Misfit", "entries", "load_into", "matches", "nothing_to_fetch", "verify"],
            "manifest": ["Checkpoint", "MANIFEST_NAME", "Manifest", "open_checkpoint", "read_manifest", "saved_at"],
            "need": ["Kept", "WRITERS", "kept", "need", "workers"],
            "pieces": ["Entry", "Later", "STRIP", "Shares", "held_pieces"],
            "ranks": ["attempt", "together"],
            "save": ["CheckpointWriter", "Saved", "save_checkpoint", "write_alone"],
            "scattered": ["find_scattered"],
            "storage": ["Storage", "build_storage"],
            "tensorfile": ["BLOCK", "as_bytes", "digest", "in_a_row"],
        },
    )
