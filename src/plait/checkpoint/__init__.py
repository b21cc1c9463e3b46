"""Checkpoints: logical names and whole shapes on disk, any layout in memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.checkpoint import convert as convert
    from plait.checkpoint.convert import Description as Description
    from plait.checkpoint.convert import Kind as Kind
    from plait.checkpoint.convert import Source as Source
    from plait.checkpoint.convert import companions as companions
    from plait.checkpoint.convert import kind_of as kind_of
    from plait.checkpoint.convert import newest_tag as newest_tag
    from plait.checkpoint.convert import open_source as open_source
    from plait.checkpoint.convert import read_description as read_description
    from plait.checkpoint.convert import translated as translated
    from plait.checkpoint.convert import with_state as with_state
    from plait.checkpoint.convert import without_padding as without_padding
    from plait.checkpoint.convert.deepspeed import DeepSpeedSource as DeepSpeedSource
    from plait.checkpoint.convert.deepspeed.folder import find_files as find_files
    from plait.checkpoint.convert.files import Found as Found
    from plait.checkpoint.convert.files import TorchFile as TorchFile
    from plait.checkpoint.convert.files import load_values as load_values
    from plait.checkpoint.convert.files import read_found as read_found
    from plait.checkpoint.convert.pickled import Stored as Stored
    from plait.checkpoint.convert.pickled import open_file as open_file
    from plait.checkpoint.convert.plait import PlaitSource as PlaitSource
    from plait.checkpoint.convert.source import Entry as Entry
    from plait.checkpoint.convert.summary import parts as parts
    from plait.checkpoint.convert.summary import rows as rows
    from plait.checkpoint.convert.view import Recipe as Recipe
    from plait.checkpoint.convert.view import View as View
    from plait.checkpoint.fingerprint import fingerprint as fingerprint
    from plait.checkpoint.folder import CheckpointFolder as CheckpointFolder
    from plait.checkpoint.load import Fetch as Fetch
    from plait.checkpoint.load import entries as entries
    from plait.checkpoint.load import load_into as load_into
    from plait.checkpoint.load import nothing_to_fetch as nothing_to_fetch
    from plait.checkpoint.load import verify as verify
    from plait.checkpoint.manifest import NAME as NAME
    from plait.checkpoint.manifest import Checkpoint as Checkpoint
    from plait.checkpoint.manifest import Manifest as Manifest
    from plait.checkpoint.manifest import open_checkpoint as open_checkpoint
    from plait.checkpoint.manifest import read_manifest as read_manifest
    from plait.checkpoint.manifest import saved_at as saved_at
    from plait.checkpoint.misfits import Misfit as Misfit
    from plait.checkpoint.misfits import matches as matches
    from plait.checkpoint.need import WRITERS as WRITERS
    from plait.checkpoint.need import Kept as Kept
    from plait.checkpoint.need import kept as kept
    from plait.checkpoint.need import need as need
    from plait.checkpoint.need import workers as workers
    from plait.checkpoint.pieces import STRIP as STRIP
    from plait.checkpoint.pieces import Shares as Shares
    from plait.checkpoint.pieces import held_pieces as held_pieces
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
    from plait.checkpoint.together import attempt as attempt
    from plait.checkpoint.together import together as together
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["convert"],
            "convert": [
                "Description",
                "Kind",
                "Source",
                "companions",
                "kind_of",
                "newest_tag",
                "open_source",
                "read_description",
                "translated",
                "with_state",
                "without_padding",
            ],
            "convert.deepspeed": ["DeepSpeedSource"],
            "convert.deepspeed.folder": ["find_files"],
            "convert.files": ["Found", "TorchFile", "load_values", "read_found"],
            "convert.pickled": ["Stored", "open_file"],
            "convert.plait": ["PlaitSource"],
            "convert.source": ["Entry"],
            "convert.summary": ["parts", "rows"],
            "convert.view": ["Recipe", "View"],
            "fingerprint": ["fingerprint"],
            "folder": ["CheckpointFolder"],
            "load": ["Fetch", "entries", "load_into", "nothing_to_fetch", "verify"],
            "manifest": ["Checkpoint", "Manifest", "NAME", "open_checkpoint", "read_manifest", "saved_at"],
            "misfits": ["Misfit", "matches"],
            "need": ["Kept", "WRITERS", "kept", "need", "workers"],
            "pieces": ["STRIP", "Shares", "held_pieces"],
            "save": ["CheckpointWriter", "Saved", "save_checkpoint", "write_alone"],
            "scattered": ["find_scattered"],
            "storage": ["Storage", "build_storage"],
            "tensorfile": ["BLOCK", "as_bytes", "digest", "in_a_row"],
            "together": ["attempt", "together"],
        },
    )
