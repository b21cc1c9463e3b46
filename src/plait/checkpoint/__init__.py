"""Checkpoints: files store tensors by name and global shape, so a run with any sharding can load them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.checkpoint import convert as convert
    from plait.checkpoint.convert.conversion import Format as Format
    from plait.checkpoint.convert.deepspeed import DeepSpeedSource as DeepSpeedSource
    from plait.checkpoint.convert.deepspeed import find_files as find_files
    from plait.checkpoint.convert.detect import kind_of as kind_of
    from plait.checkpoint.convert.detect import newest_tag as newest_tag
    from plait.checkpoint.convert.detect import open_source as open_source
    from plait.checkpoint.convert.files import FileTensor as FileTensor
    from plait.checkpoint.convert.files import PickledTensor as PickledTensor
    from plait.checkpoint.convert.files import TorchFile as TorchFile
    from plait.checkpoint.convert.files import load_values as load_values
    from plait.checkpoint.convert.files import open_file as open_file
    from plait.checkpoint.convert.files import read_file_tensor as read_file_tensor
    from plait.checkpoint.convert.huggingface import Description as Description
    from plait.checkpoint.convert.huggingface import companions as companions
    from plait.checkpoint.convert.huggingface import read_description as read_description
    from plait.checkpoint.convert.megatron import without_padding as without_padding
    from plait.checkpoint.convert.plait import PlaitSource as PlaitSource
    from plait.checkpoint.convert.source import Recipe as Recipe
    from plait.checkpoint.convert.source import Source as Source
    from plait.checkpoint.convert.source import TensorEntry as TensorEntry
    from plait.checkpoint.convert.source import View as View
    from plait.checkpoint.convert.source import translated as translated
    from plait.checkpoint.convert.source import with_state as with_state
    from plait.checkpoint.convert.summary import group_totals as group_totals
    from plait.checkpoint.convert.summary import summary_rows as summary_rows
    from plait.checkpoint.fingerprint import fingerprint as fingerprint
    from plait.checkpoint.folder import CheckpointFolder as CheckpointFolder
    from plait.checkpoint.folder import remove_checkpoint as remove_checkpoint
    from plait.checkpoint.load import Fetch as Fetch
    from plait.checkpoint.load import Mismatch as Mismatch
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
    from plait.checkpoint.memory import WRITERS as WRITERS
    from plait.checkpoint.memory import SavedTensor as SavedTensor
    from plait.checkpoint.memory import checkpoint_memory as checkpoint_memory
    from plait.checkpoint.memory import saved_tensor as saved_tensor
    from plait.checkpoint.memory import thread_count as thread_count
    from plait.checkpoint.node_local import find_node_local as find_node_local
    from plait.checkpoint.pieces import STRIP as STRIP
    from plait.checkpoint.pieces import DeferredTensor as DeferredTensor
    from plait.checkpoint.pieces import Entry as Entry
    from plait.checkpoint.pieces import WriteAssignment as WriteAssignment
    from plait.checkpoint.pieces import held_pieces as held_pieces
    from plait.checkpoint.ranks import collective_call as collective_call
    from plait.checkpoint.save import CheckpointWriter as CheckpointWriter
    from plait.checkpoint.save import Saved as Saved
    from plait.checkpoint.save import save_checkpoint as save_checkpoint
    from plait.checkpoint.save import write_single_process as write_single_process
    from plait.checkpoint.storage import Storage as Storage
    from plait.checkpoint.storage import build_storage as build_storage
    from plait.checkpoint.tensorfile import BLOCK as BLOCK
    from plait.checkpoint.tensorfile import as_bytes as as_bytes
    from plait.checkpoint.tensorfile import contiguous_bytes as contiguous_bytes
    from plait.checkpoint.tensorfile import digest as digest
else:
    from plait.lazy import attach_names

    attach_names(__name__)
