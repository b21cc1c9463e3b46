"""Adapters in files: `adapter_config.json` and `adapter_model.safetensors`, as `peft` reads and writes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from plait.config import read_json_object
from plait.errors import CheckpointError, ModelError
from plait.ops import drafting
from plait.posttrain.lora.attach import AdapterSpec, lora_layers
from plait.posttrain.lora.layer import is_linear, is_transposed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "value_head.safetensors"
"""Beside the adapter of a reward model: its head, which `peft` does not know."""
PREFIX = "base_model.model."
"""What `peft` puts before every name."""

_MUST_BE_OFF: Mapping[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layer_replication": None,
    "lora_bias": False,
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""What `peft` can do beyond plain adapters, and the value with which it does not."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read: what it is like, which layers it belongs to, and its matrices by name."""

    path: Path
    spec: AdapterSpec
    layers: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """The value head of a reward model, by its name in the model."""
    base: str | None = None
    """The model that it was trained on, as its file names it."""

    def strange_base(self, base: str | None) -> str | None:
        """What is to be said where it names another base than this one; folders may have been moved."""
        if self.base is None or base is None or Path(self.base).name == Path(base).name:
            return None
        return (
            f"the adapter in {self.path} says that it was trained on {self.base!r}, and its base here is {base!r}; if "
            "those are not the same weights, its answers will be poor"
        )

    def check(self, model: nn.Module) -> None:
        """Refuse an adapter that is of other layers, or of other sizes."""
        have = set(lora_layers(model))
        problems = [f"{name}: the model has no adapter there" for name in self.layers if name not in have]
        problems += [f"{name}: not in the file" for name in sorted(have - set(self.layers))]
        for name in have & set(self.layers):
            for key in ("lora_A", "lora_B"):
                shape = tuple(model.get_parameter(f"{name}.{key}.weight").shape)
                found = tuple(self.tensors[f"{name}.{key}.weight"].shape)
                if found != shape:
                    problems.append(f"{name}.{key}: {found} in the file, {shape} in the model")
        if problems:
            more = f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else ""
            raise ModelError(f"the adapter in {self.path} does not fit:\n  " + "\n  ".join(problems[:12]) + more)


def read_adapter(path: str | Path, model: nn.Module | None = None) -> Adapter:
    """Read a folder that `peft` or `save_adapter` wrote.

    What plain adapters cannot express (other ranks for some layers, DoRA, biases, whole modules) is an error that
    names it. With a `model`, layers must be its linear ones.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds no adapter: there is no {CONFIG}")
    config = read_json_object(folder / CONFIG, CheckpointError)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder} holds an adapter of type {config.get('peft_type')!r}; only LORA can be read")
    for key, off in _MUST_BE_OFF.items():
        if (config.get(key) or off) != off:
            raise CheckpointError(f"{folder / CONFIG} has {key} {config[key]!r}, which has no counterpart here")
    tensors = {_plain(folder, stored): tensor for stored, tensor in _read(folder / WEIGHTS).items()}
    if not tensors:
        raise CheckpointError(f"{folder / WEIGHTS} holds no matrix: the adapter is empty")
    layers = tuple(dict.fromkeys(re.sub(r"\.lora_[AB]\.weight$", "", name) for name in tensors))
    missing = [f"{n}.{k}.weight" for n in layers for k in ("lora_A", "lora_B") if f"{n}.{k}.weight" not in tensors]
    if missing:
        raise CheckpointError(f"{folder / WEIGHTS} has one matrix of a pair without the other: no {missing[0]}")
    if model is not None:
        known = {name for name, module in model.named_modules() if is_linear(module)}
        strange = sorted(set(layers) - known)
        if strange:
            raise ModelError(f"the adapter in {folder} is for {strange[0]}, which is no linear layer of this model")
    spec = _spec(folder / CONFIG, config)
    head = _read(folder / HEAD) if (folder / HEAD).is_file() else {}
    return Adapter(folder, spec, layers, tensors, head, config.get("base_model_name_or_path"))


def _spec(file: Path, config: Mapping[str, Any]) -> AdapterSpec:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    dropout, by_root = config.get("lora_dropout") or 0.0, config.get("use_rslora") or False
    wrong = {
        "r": type(rank) is not int or rank < 1,
        "lora_alpha": isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf,
        "lora_dropout": isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1,
        "use_rslora": not isinstance(by_root, bool),
    }
    if bad := [key for key, is_wrong in wrong.items() if is_wrong]:
        raise CheckpointError(
            f"{file} has {bad[0]} {config.get(bad[0])!r:.80}, which no adapter can have; copy it again"
        )
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    return AdapterSpec(rank, float(alpha), float(dropout), by_root)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} holds no adapter: there is no {file.name}") from None
    except (SafetensorError, OSError, UnicodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy it again") from error


def _plain(folder: Path, stored: str) -> str:
    name = stored.removeprefix(PREFIX)
    if not re.search(r"\.lora_[AB]\.weight$", name):
        raise CheckpointError(f"{folder / WEIGHTS} holds {stored}, which is no matrix of a plain adapter")
    return name


def save_adapter(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    spec: AdapterSpec,
    *,
    transposed: bool = False,
    base: str | None = None,
    task: str | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write an adapter, and read it back to be sure that it is there.

    `tensors` are whole, by their names in the model: `….lora_A.weight`, `….lora_B.weight`. `transposed`: the layers
    are `Conv1D` of `transformers`. `task` is the word of `peft` for what the model does (`CAUSAL_LM`); it then expects
    a model that generates as those of `transformers` do. `head` is the value head of a reward model.
    """
    folder = Path(path)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    layers = list(dict.fromkeys(re.sub(r"\.lora_[AB]\.weight$", "", name) for name in kept))
    if not layers:
        raise CheckpointError(f"{folder} would hold an empty adapter: none of the layers has one")
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.scaled_by_root,
        "target_modules": layers,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }
    try:
        with drafting(folder / "adapter") as draft:  # all is written before the first file gets its name
            draft.mkdir()
            weights = {f"{PREFIX}{name}": tensor for name, tensor in kept.items()}
            save_file(weights, draft / WEIGHTS, metadata={"format": "pt"})
            (draft / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            if head:
                save_file({name: tensor.detach().cpu().contiguous() for name, tensor in head.items()}, draft / HEAD)
            else:
                (folder / HEAD).unlink(missing_ok=True)
            for file in draft.iterdir():
                file.replace(folder / file.name)
    except OSError as error:
        raise CheckpointError(f"the adapter was not written to {folder}: {error}") from error
    _verify(folder, kept)
    return folder


def _verify(folder: Path, kept: Mapping[str, Tensor]) -> None:
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        stored = {name.removeprefix(PREFIX) for name in file.keys()}  # noqa: SIM118  # no mapping
        wrong = stored ^ kept.keys()
        wrong |= {n for n in kept if n in stored and not torch.equal(file.get_tensor(f"{PREFIX}{n}"), kept[n])}
    if wrong:
        raise CheckpointError(f"{folder / WEIGHTS} was written, and {min(wrong)} reads back differently")


def has_transposed(model: nn.Module, layers: Sequence[str]) -> bool:
    """Whether the layers are `Conv1D` of `transformers`. Files say it once for all."""
    kinds = {is_transposed(model.get_submodule(name)) for name in layers}
    if len(kinds) > 1:
        raise ModelError("adapters beside both Linear and Conv1D layers cannot be saved in one folder")
    return kinds == {True}
