"""Checkpoints: logical names and whole shapes on disk, any layout in memory."""

from plait.checkpoint.fingerprint import fingerprint
from plait.checkpoint.folder import CheckpointFolder
from plait.checkpoint.load import Fetch, entries, load_into, nothing_to_fetch, verify
from plait.checkpoint.manifest import Checkpoint, Manifest, open_checkpoint, read_manifest
from plait.checkpoint.misfits import Misfit, matches
from plait.checkpoint.need import Kept, Need, kept, need
from plait.checkpoint.pieces import Shares, held_pieces
from plait.checkpoint.save import CheckpointWriter, Saved, save_checkpoint, write_alone
from plait.checkpoint.scattered import find_scattered
from plait.checkpoint.storage import AtomicStorage, Storage, StoredCheckpoints, build_storage
from plait.checkpoint.together import attempt, together

__all__ = [
    "AtomicStorage",
    "Checkpoint",
    "CheckpointFolder",
    "CheckpointWriter",
    "Fetch",
    "Kept",
    "Manifest",
    "Misfit",
    "Need",
    "Saved",
    "Shares",
    "Storage",
    "StoredCheckpoints",
    "attempt",
    "build_storage",
    "entries",
    "find_scattered",
    "fingerprint",
    "held_pieces",
    "kept",
    "load_into",
    "matches",
    "need",
    "nothing_to_fetch",
    "open_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "together",
    "verify",
    "write_alone",
]
