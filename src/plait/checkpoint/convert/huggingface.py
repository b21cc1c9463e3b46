"""Folders of `transformers`: `config.json`, weights in safetensors files, and an index if there are several files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.convert.files import FileTensor, SafetensorsFile, TorchFile, read_file_tensor
from plait.checkpoint.convert.source import Source, TensorEntry
from plait.checkpoint.tensorfile import DTYPES, TensorFileWriter
from plait.config import read_json_object, weight_map
from plait.errors import CheckpointError
from plait.precision import QuantizedTensor, StoredShape, quantized_tensors

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OLD_INDEX, OLD_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Names of the files of a model other than its weights and its `config.json`."""


def is_huggingface(folder: Path) -> bool:
    """Whether a folder holds weights of `transformers`."""
    return any((folder / name).is_file() for name in (INDEX, SINGLE, OLD_INDEX, OLD_SINGLE))


class HuggingFaceSource(Source):
    """The weights of a `transformers` folder, in safetensors files or in the older files of `torch.save`.

    Quantized tensors appear as full ones in fp32; see `plait.precision.quantized_tensors`.
    """

    kind = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        files_of = _tensor_files(path)
        self._files: dict[Path, SafetensorsFile | TorchFile] = {}
        self._homes: dict[str, Path] = {}
        self._quantized: dict[str, QuantizedTensor] = {}
        entries_of: dict[str, TensorEntry] = {}
        try:
            for file in dict.fromkeys(files_of.values()):
                self._files[file] = TorchFile(file) if file.suffix == ".bin" else SafetensorsFile(file)
            for name, file in files_of.items():
                entries = _entries(self._files[file])
                if name not in entries:
                    raise CheckpointError(f"{path / INDEX} says that {name} is in {file.name}, but it is not")
                entries_of[name] = entries[name]
                self._homes[name] = file
            stored = {name: StoredShape(*entry) for name, entry in entries_of.items()}
            config = (read_description(path) or {}).get("quantization_config")
            self._quantized, packed = quantized_tensors(stored, config, self._read_stored, CheckpointError)
        except BaseException:
            self.close()
            raise
        self.entries = {f"model.{name}": entry for name, entry in entries_of.items() if name not in packed}
        for name, tensor in self._quantized.items():
            self.entries[f"model.{name}"] = TensorEntry(tensor.shape, torch.float32)
        self.state = {}
        self.facts = self._facts()

    def _facts(self) -> dict[str, str]:
        facts = {"files": str(len(self._files))}
        description = read_description(self.path)
        if description is None:
            return {**facts, "config.json": "none"}
        if isinstance(description.get("architectures"), list):
            facts["architecture"] = ", ".join(map(str, description["architectures"]))
        if description.get("model_type"):
            facts["model type"] = str(description["model_type"])
        return facts

    def read(self, name: str) -> Tensor:
        """Return one whole tensor."""
        quantized = self._quantized.get(name.removeprefix("model."))
        if quantized is None:
            return self._read_stored(name.removeprefix("model."))
        return quantized.make(*(self._read_stored(source) for source in quantized.sources))

    def _read_stored(self, stored: str) -> Tensor:
        file = self._files[self._homes[stored]]
        return read_file_tensor(file.content[stored]) if isinstance(file, TorchFile) else file.read(stored)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def read_description(folder: Path) -> dict[str, Any] | None:
    """Return the content of `config.json` in a folder; None if it is absent."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    return read_json_object(path, CheckpointError)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the path of the file of each tensor, by tensor name."""
    for name in (INDEX, OLD_INDEX):
        index = folder / name
        if index.is_file():
            files = {tensor: folder / file for tensor, file in weight_map(index, CheckpointError).items()}
            lost = sorted({file.name for file in files.values() if not file.is_file()})
            if lost:
                raise CheckpointError(f"{index} names files that are not there: {', '.join(lost)}; copy them too")
            return files
    single = next(folder / name for name in (SINGLE, OLD_SINGLE) if (folder / name).is_file())
    file = TorchFile(single) if single.suffix == ".bin" else SafetensorsFile(single)
    try:
        return dict.fromkeys(_entries(file), single)
    finally:
        file.close()


def _entries(file: SafetensorsFile | TorchFile) -> Mapping[str, TensorEntry]:
    if isinstance(file, SafetensorsFile):
        return file.entries
    if not isinstance(file.content, Mapping):
        raise CheckpointError(f"{file.path} holds a {type(file.content).__name__}, and a state dict was expected")
    return {str(k): TensorEntry(t.shape, t.dtype) for k, t in file.content.items() if isinstance(t, FileTensor)}


@dataclass(frozen=True)
class Description:
    """The contents of a `transformers` folder other than the weights."""

    config: Mapping[str, Any]
    """The contents of `config.json`; the dtype is added when the weights are written."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Paths of files to copy, by their new name."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Contents of files to write, by file name."""


def companions(folder: Path) -> dict[str, Path]:
    """Return the paths of the files in a folder that `COMPANIONS` names, by name."""
    return {name: folder / name for name in COMPANIONS if (folder / name).is_file()}


def write_huggingface(source: Source, target: Path, description: Description, *, shard_size: int) -> int:
    """Write the `model.` entries as a `transformers` folder, one tensor at a time; return its size."""
    entries = {name.removeprefix("model."): e for name, e in source.entries.items() if name.startswith("model.")}
    odd = [name for name, entry in entries.items() if entry.dtype not in DTYPES.values()]
    if odd:
        raise CheckpointError(
            f"safetensors does not have {entries[odd[0]].dtype}, the dtype of {odd[0]}; choose a --dtype"
        )
    target.mkdir()
    shards = _shards(entries, shard_size)
    width = len(shards)
    files = (
        [f"model-{number:05d}-of-{width:05d}.safetensors" for number in range(1, width + 1)] if width > 1 else [SINGLE]
    )
    for file, names in zip(files, shards, strict=True):
        contents = [(name, entries[name].dtype, entries[name].shape) for name in names]
        with TensorFileWriter(target / file, contents, about={"format": "pt"}) as output:
            for name in names:
                output.write(name, source.read(f"model.{name}").contiguous())
    if width > 1:
        index = {
            "metadata": {"total_size": sum(entry.bytes for entry in entries.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        _write_json(target / INDEX, index)
    for name, path in description.files.items():
        shutil.copyfile(path, target / name)
    for name, text in description.texts.items():
        (target / name).write_text(text, encoding="utf-8")
    config = {key: value for key, value in description.config.items() if key not in ("dtype", "torch_dtype")}
    # All versions of transformers read the dtype under this name.
    _write_json(target / CONFIG, {**config, "torch_dtype": _main_dtype(entries)})
    return sum(file.stat().st_size for file in target.iterdir())


def _main_dtype(entries: Mapping[str, TensorEntry]) -> str:
    """Return the dtype that most of the weights have."""
    sizes: dict[torch.dtype, int] = {}
    for entry in entries.values():
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.shape.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return str(most).removeprefix("torch.")


def _shards(entries: Mapping[str, TensorEntry], limit: int) -> list[list[str]]:
    """Return the names in each file, in order; a tensor larger than the limit has its own file."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.bytes
    return shards


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
