"""Detecting the format of a checkpoint, and opening it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from plait.checkpoint.convert.dcp import METADATA
from plait.checkpoint.convert.deepspeed import is_deepspeed
from plait.checkpoint.convert.huggingface import is_huggingface
from plait.checkpoint.convert.megatron import is_megatron
from plait.checkpoint.convert.source import Source, TensorEntry
from plait.checkpoint.folder import newest_in
from plait.checkpoint.manifest import MANIFEST_NAME as MANIFEST
from plait.config import read_name
from plait.errors import CheckpointError, ConfigError, Problem
from plait.plugins import call, find

UNDERSTOOD = """  a Plait checkpoint, or the work_dir of a run
  a Hugging Face folder: model.safetensors, or several with an index
  a folder of torch.distributed.checkpoint (FSDP): .metadata and .distcp files
  a DeepSpeed checkpoint: the folder with `latest`, or one of its tags
  a Megatron checkpoint: the folder with `latest_checkpointed_iteration.txt`, or one of its iterations
  a state dict: a file of torch.save (.pt, .pth, .bin) or a .safetensors file"""

OPENERS: Mapping[str, str] = MappingProxyType(
    {
        "plait": "plait.checkpoint.convert.plait:PlaitSource",
        "hf": "plait.checkpoint.convert.huggingface:HuggingFaceSource",
        "dcp": "plait.checkpoint.convert.dcp:DcpSource",
        "deepspeed": "plait.checkpoint.convert.deepspeed:DeepSpeedSource",
        "megatron": "plait.checkpoint.convert.megatron:open_megatron",
        "torch": "plait.checkpoint.convert.torchfile:TorchSource",
        "state dict": "plait.checkpoint.convert.torchfile:StateDictSource",
    }
)
"""The reader of each format that Plait knows, as `module:name`, loaded like a user's reader."""
_KEY = "--from"
_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".th")


def open_source(path: Path, reader: str | None = None) -> Source:
    """Open a checkpoint in any format. Raise `CheckpointError` if the path does not hold one.

    `reader` names a user-provided reader for it; see `Reader`.
    """
    if not path.exists():
        raise CheckpointError(f"there is nothing at {path}")
    if reader is not None:
        return _open_with(reader, path)
    if path.is_file():
        return _open_file(path)
    path = newest_tag(path, "plait") or path
    format = kind_of(path)
    if format is not None:
        return _open(format, path)
    newest = newest_in(path)
    if newest is not None:
        return _open("plait" if kind_of(newest) == "plait" else "dcp", newest)
    raise CheckpointError(f"{path} is not a checkpoint: {_contents(path)}. These formats can be read:\n{UNDERSTOOD}")


def _open(format: str, path: Path) -> Source:
    opened: Source = find("converter", OPENERS[format], _KEY)(path)
    return opened


class Reader(Protocol):
    """A user-provided reader for `plait convert --from`: a function or class that opens a file or folder."""

    def __call__(self, path: Path, /) -> Source | Mapping[str, Tensor]:
        """Return a `Source`, which reads one tensor at a time; or a mapping of all weights by name."""


class MappingSource(Source):
    """Weights that a user-provided reader returned as a mapping."""

    def __init__(self, path: Path, reader: str, tensors: Mapping[str, Tensor]) -> None:
        self.path, self.kind, self.state = path, reader, {}
        self._tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        self.entries = {name: TensorEntry(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}
        self.facts = {"holds": f"weights, as {reader} reads them"}

    def read(self, name: str) -> Tensor:
        """Return one whole tensor."""
        return self._tensors[name].detach().cpu()

    def close(self) -> None:
        """Release the tensors."""
        self._tensors = {}


def _open_with(reader: str, path: Path) -> Source:
    made = call(find("converter", reader, _KEY), _KEY, path, name=reader, arguments={})
    if isinstance(made, Source):
        return made
    if isinstance(made, Mapping) and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in made.items()):
        return MappingSource(path, reader, made)
    message = f"{reader!r} returned a {type(made).__name__} for {path}"
    raise ConfigError(Problem(_KEY, message, "Return a plait.checkpoint.convert.Source, or tensors by name."))


def kind_of(path: Path) -> str | None:
    """Return the format by file names: `plait`, `hf`, `dcp`, `deepspeed`, `megatron` or `torch`; None for others."""
    if path.is_file():
        return "torch" if path.suffix in (*_TORCH_ENDINGS, ".safetensors") else None
    if is_megatron(path):
        return "megatron"  # checked first, as its files may be DCP
    if (path / METADATA).is_file():
        return "dcp"  # also Plait's own checkpoints of format 1
    if (path / MANIFEST).is_file():
        return "plait"
    if is_huggingface(path):
        return "hf"
    if is_deepspeed(path):
        return "deepspeed"
    return None


def newest_tag(path: Path, format: str) -> Path | None:
    """Return the folder that `latest` names, as DeepSpeed writes it; None without one, or if its format differs."""
    latest = path / "latest"
    tagged = path / read_name(latest, CheckpointError) if latest.is_file() else path
    return tagged if tagged != path and kind_of(tagged) == format else None


def _open_file(path: Path) -> Source:
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty")
    if path.suffix == ".safetensors":
        return _open("state dict", path)
    with path.open("rb") as file:
        head = file.read(4)
    if path.suffix in _TORCH_ENDINGS or head == b"PK\x03\x04":
        return _open("torch", path)
    raise CheckpointError(f"{path} does not have the name of a checkpoint. These formats can be read:\n{UNDERSTOOD}")


def _contents(path: Path) -> str:
    if not path.is_dir():
        return "it is neither a file nor a folder"
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir())
    if not names:
        return "the folder is empty"
    return f"it holds {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
