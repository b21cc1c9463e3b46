"""Plain state dicts: files of `torch.save`, read and written, and single safetensors files, read."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plait.checkpoint.convert.files import (
    FileTensor,
    SafetensorsFile,
    TorchFile,
    data_begins,
    read_file_tensor,
    tensors_in,
)
from plait.checkpoint.convert.source import Source, TensorEntry
from plait.checkpoint.tensorfile import BLOCK, as_bytes
from plait.errors import CheckpointError

# The keys that other programs use for the parts of a checkpoint.


MODEL_WORDS = frozenset({"model", "module", "state_dict", "model_state_dict"})
"""Keys of a whole state dict."""
OPTIMIZER_WORDS = frozenset({"optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict"})
"""Keys of an optimizer's state."""
STEP_WORDS = ("step", "steps", "global_step", "global_steps", "iteration", "iter_num")
"""Keys of a count of optimizer steps."""

_PIECE = re.compile(r"state\.(?P<parameter>.+)\.(?P<key>[^.]+)")
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def plait_name(path: Sequence[Any]) -> str | None:
    """Return Plait's name for the tensor at a path of keys; None if it belongs to neither model nor optimizer.

    `("optim", "state", "0.weight", "exp_avg")` and `("optim", "state.0.weight.exp_avg")`, the two forms that
    torch's `get_optimizer_state_dict` makes, become `optim.0.weight.exp_avg`.
    """
    head, rest = str(path[0]), ".".join(str(key) for key in path[1:])
    if head in ("app", "app_state") and rest:
        return plait_name(path[1:])
    if head in MODEL_WORDS and rest:
        return f"model.{clean(rest)}"
    if (head in OPTIMIZER_WORDS or re.fullmatch(r"optimizer_\d+", head)) and rest:
        return _optimizer(rest)
    whole = ".".join(str(key) for key in path)
    return _optimizer(whole) or (f"model.{clean(whole)}" if len(path) == 1 else None)


def _optimizer(text: str) -> str | None:
    match = _PIECE.fullmatch(text)
    return f"optim.{clean(match['parameter'])}.{match['key']}" if match else None


def clean(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile, FSDP and activation checkpointing."""
    return _WRAPPERS.sub("", name)


def without_wrapper(names: Mapping[str, str]) -> dict[str, str]:
    """Return the mapping with the prefix `module.` of DDP removed from its values, if all have it."""
    bare = [name.partition(".")[2] for name in names.values()]
    if not names or not all(name.startswith("module.") for name in bare):
        return dict(names)
    return {key: name.replace(".module.", ".", 1) for key, name in names.items()}


def guessed_paths(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the path of keys of each name, guessed because the writer did not store it.

    `model.` may be the key of a whole state dict or a prefix of the parameter names; it is taken for the key if
    there is an optimizer beside it, or nothing else.
    """
    split = {name: name.partition(".") for name in names}
    heads = {head for head, _, _ in split.values()}
    nested = bool(heads & OPTIMIZER_WORDS) or (bool(heads) and heads <= MODEL_WORDS)
    nesting_keys = OPTIMIZER_WORDS | (MODEL_WORDS if nested else frozenset())
    return {name: (head, rest) if rest and head in nesting_keys else (name,) for name, (head, _, rest) in split.items()}


def steps_of(content: Mapping[Any, Any]) -> int | None:
    """Return the step count under one of `STEP_WORDS`; None if there is none."""
    values = (content.get(key) for key in STEP_WORDS)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def engine_state(source: Source, steps: int | None) -> dict[str, Any]:
    """Return the `state` of a source that was not written by Plait: empty if it has no optimizer state.

    `steps` is the stored step count; if it is None, the count in the optimizer state is used.
    """
    if not any(name.startswith("optim.") for name in source.entries):
        return {}
    if steps is None:
        counts = (name for name in source.entries if name.startswith("optim.") and name.endswith(".step"))
        first = next(counts, None)
        steps = 0 if first is None else int(source.read(first).item())
    return {"engine": {"steps": steps, "skips_in_a_row": 0, "scaler": None}}


class StateDictSource(Source):
    """A state dict in one safetensors file."""

    kind = "torch"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        self.entries = {f"model.{name}": entry for name, entry in self._file.entries.items()}
        self.state = {}
        self.facts = {"holds": "a state dict, in a safetensors file"}

    def read(self, name: str) -> Tensor:
        """Return one whole tensor."""
        return self._file.read(name.removeprefix("model."))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TorchSource(Source):
    """A file of `torch.save`: a state dict, or one with an optimizer's beside it under the usual keys."""

    kind = "torch"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = TorchFile(path)
        content = self._file.content
        if not isinstance(content, Mapping) or not tensors_in(content):
            raise CheckpointError(
                f"{path} holds {_type_name(content)}, and a state dict was expected: names and tensors"
            )
        model = _model_in(content)
        optimizer = next((content[key] for key in content if key in OPTIMIZER_WORDS), None)
        names = without_wrapper({name: f"model.{clean(name)}" for name in model})
        self._tensors: dict[str, FileTensor] = {names[name]: tensor for name, tensor in model.items()}
        self.facts = {"holds": "a state dict, in a file of torch.save"}
        if optimizer is not None:
            states = dict(_optimizer_state(model, names, optimizer))
            self._tensors.update(states)
            if not states:
                self.facts["optimizer"] = (
                    "left out: its parameters are numbered, and the file does not have their order"
                )
        self.entries = {name: TensorEntry(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}
        ours = content.get("state")
        if isinstance(ours, Mapping) and "engine" in ours:
            self.state = dict(ours)
        else:
            self.state = engine_state(self, steps_of(content))

    def read(self, name: str) -> Tensor:
        """Return one whole tensor."""
        return read_file_tensor(self._tensors[name])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _type_name(content: Any) -> str:
    if isinstance(content, FileTensor):
        return "a single tensor"
    return f"a {type(content).__name__}" + (" without tensors" if isinstance(content, Mapping) else "")


def _model_in(content: Mapping[Any, Any]) -> dict[str, FileTensor]:
    for key in content:
        if key in MODEL_WORDS and isinstance(content[key], Mapping) and tensors_in(content[key]):
            return _model_in(content[key])
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, FileTensor)}


def _optimizer_state(
    model: Mapping[str, FileTensor], names: Mapping[str, str], optimizer: Any
) -> Iterator[tuple[str, FileTensor]]:
    """Yield `optim.<parameter>.<key>` and its tensor. Numbered states are matched with names as in `_numbered`."""
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("state"), Mapping):
        return
    per_parameter: Mapping[Any, Any] = optimizer["state"]
    owner = {name: name for name in model}
    if any(isinstance(key, int) for key in per_parameter):
        owner = _numbered(model, optimizer)
    for key, pieces in per_parameter.items():
        if key in owner and isinstance(pieces, Mapping):
            parameter = names[owner[key]].removeprefix("model.")
            yield from ((f"optim.{parameter}.{k}", t) for k, t in pieces.items() if isinstance(t, FileTensor))


def _numbered(model: Mapping[str, FileTensor], optimizer: Mapping[Any, Any]) -> dict[Any, str]:
    """Return the name of each number: from the groups' names, or in the model's order if there is one group."""
    groups = optimizer.get("param_groups") or []
    numbers = [number for group in groups for number in group.get("params", ())]
    if all("param_names" in group for group in groups):
        names = [str(name) for group in groups for name in group["param_names"]]
    else:
        names = list(model) if len(groups) == 1 else []
    names_of = dict(zip(numbers, names, strict=True)) if len(numbers) == len(names) else {}
    for number, pieces in optimizer["state"].items():
        average = pieces.get("exp_avg", pieces.get("momentum_buffer"))
        name = names_of.get(number)
        if (
            name is None
            or name not in model
            or (isinstance(average, FileTensor) and average.shape != model[name].shape)
        ):
            return {}
    return names_of


def write_torch(source: Source, target: Path, *, optimizer: bool) -> int:
    """Write one file of `torch.save`; return its size in bytes.

    The content is `{name: tensor}`, or with `optimizer` `{"model": …, "optim": {"state": {name: {key: tensor}},
    "param_groups": …}, "state": …}`; `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict` takes `optim`.
    torch first writes the archive without the tensors' bytes; then these are filled in, one tensor after another.
    """
    names = [name for name in source.entries if name.startswith("model.")]
    if optimizer:
        names += [name for name in source.entries if name.startswith("optim.")]
    _write_frame(source, target, names, optimizer=optimizer)
    with target.open("r+b") as file, zipfile.ZipFile(target) as archive:
        records = [info for info in archive.infolist() if info.filename.split("/")[1] == "data"]
        assert [int(info.filename.rpartition("/")[2]) for info in records] == list(range(len(names)))
        checksums = dict(zip((r.filename for r in records), _fill(source, file, records, names), strict=True))
        _correct_directory(file, archive, checksums)
    return target.stat().st_size


def _write_frame(source: Source, target: Path, names: list[str], *, optimizer: bool) -> None:
    """Write the archive with room for the tensors' bytes, in the order of `names`."""
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    with _hollow(target, max((source.entries[name].bytes for name in names), default=0)) as make:
        for name in names:
            section, _, rest = name.partition(".")
            tensor = make(source.entries[name])
            if section == "model":
                model[rest] = tensor
            else:
                parameter, _, key = rest.rpartition(".")
                state.setdefault(parameter, {})[key] = tensor
        content: Any = model
        if optimizer:
            groups = [{**_hyperparameters(source.state), "params": list(state)}]
            content = {"model": model, "optim": {"state": state, "param_groups": groups}, "state": dict(source.state)}
        with torch.serialization.skip_data():
            torch.save(content, target)


@contextmanager
def _hollow(target: Path, size: int) -> Iterator[Callable[[TensorEntry], Tensor]]:
    """Yield a function that makes tensors without memory: each is a memory map of one sparse file."""
    hole = target.with_name(f".{target.name}.hole")
    try:
        hole.touch()
        os.truncate(hole, size)

        def make(entry: TensorEntry) -> Tensor:
            count = entry.shape.numel()
            if count == 0:
                return torch.empty(entry.shape, dtype=entry.dtype)
            return torch.from_file(str(hole), shared=True, size=count, dtype=entry.dtype).view(entry.shape)

        yield make
    finally:
        hole.unlink(missing_ok=True)


def _hyperparameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's hyperparameters of the run description, under torch's keys."""
    described = (state.get("config") or {}).get("optim") or {}
    settings = {key: described[key] for key in ("lr", "betas", "eps", "weight_decay") if described.get(key) is not None}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _fill(source: Source, file: BinaryIO, records: list[zipfile.ZipInfo], names: list[str]) -> Iterator[int]:
    for record, name in zip(records, names, strict=True):
        assert record.file_size == source.entries[name].bytes, name
        crc, at = 0, data_begins(file, record.header_offset)
        data = as_bytes(source.read(name).contiguous()) if record.file_size else memoryview(b"")
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            crc = zlib.crc32(block, crc)
            file.seek(at)
            file.write(block)
            at += len(block)
        if len(data):
            file.seek(at + 4)  # after the signature of the data descriptor
            file.write(crc.to_bytes(4, "little"))
        yield crc


def _correct_directory(file: BinaryIO, archive: zipfile.ZipFile, checksums: Mapping[str, int]) -> None:
    """Write the tensors' checksums into the zip directory: other zip readers verify them, though torch does not."""
    at = archive.start_dir
    for info in archive.infolist():
        file.seek(at)
        head = file.read(46)
        assert head[:4] == b"PK\x01\x02"
        if info.filename in checksums:
            file.seek(at + 16)
            file.write(checksums[info.filename].to_bytes(4, "little"))
        at += 46 + sum(int.from_bytes(head[offset : offset + 2], "little") for offset in (28, 30, 32))
    file.flush()
    os.fsync(file.fileno())
