"""Checkpoints: logical names and whole shapes on disk, any layout in memory."""

from plait.checkpoint.folder import CheckpointFolder
from plait.checkpoint.load import entries, load_into, verify
from plait.checkpoint.manifest import Manifest, read_manifest
from plait.checkpoint.save import save_checkpoint

__all__ = ["CheckpointFolder", "Manifest", "entries", "load_into", "read_manifest", "save_checkpoint", "verify"]
