"""LoRA adapters: in a model, under tensor parallelism, in files of `peft`, and with base weights of 4 or 8 bits.

[Note: an adapter is a child and a hook]
A linear layer with an adapter stays the same module with the same class and `forward`, so everything that handles
linear layers (sharding, tensor parallelism, kernels) still applies, and no parameter changes its name. Two matrices,
`lora_A` and `lora_B`, become its children, and a forward hook adds `lora_B(lora_A(x)) * scale` to its output. The files
of `peft` have the same names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from plait.atomic_write import staging_path
from plait.checkpoint import Recipe, Source, View
from plait.config import LoraConfig, parse_stored, read_json_object
from plait.distributed import is_sharded
from plait.errors import CheckpointError, ConfigError, ModelError, Problem
from plait.models import build_model

# Modules that post-training adds to a model. They set their own initial values; the model's initializer does not.


class AddedModule(nn.Module):
    """A module that post-training adds to a model: a matrix of an adapter, or a value head."""

    def reset_parameters(self) -> None:
        """Set the initial values of the parameters."""
        raise NotImplementedError


class LoraDown(nn.Linear, AddedModule):
    """`A`: from the input features to the rank. Initialized like `nn.Linear`, as in `peft`."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__(features, rank, bias=False)


class LoraUp(nn.Linear, AddedModule):
    """`B`: from the rank to the output features. Initialized to zero, so that the adapter changes nothing at first."""

    def __init__(self, rank: int, features: int) -> None:
        super().__init__(rank, features, bias=False)

    def reset_parameters(self) -> None:
        """Set all values to zero."""
        nn.init.zeros_(self.weight)


class ValueHead(AddedModule):
    """An output layer that returns one number for each token instead of logits. It computes in fp32.

    It is called with the arguments of the layer that it replaces, and ignores those that it does not need: labels, and
    the weight of a tied embedding.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(features, 1, bias=False).weight.detach())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set small random values, so that all answers have about the same value at first."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor, *_: object) -> Tensor:
        """Return a value for each token: from (…, features) to (…)."""
        return F.linear(hidden.float(), self.weight.float()).squeeze(-1)


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is `Conv1D` of `transformers`, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether a module can have an adapter: a linear layer that is not part of an adapter itself."""
    plain = isinstance(module, nn.Linear) and not isinstance(module, LoraDown | LoraUp)
    return (plain and _returns_product(module)) or is_transposed(module)


def _returns_product(module: nn.Module) -> bool:
    """Whether a linear layer returns its product alone. A router that is a subclass returns the chosen experts too."""
    if type(module).forward is nn.Linear.forward or type(module).__module__.startswith("plait."):
        return True
    inputs, outputs = features_of(module)
    tensors = {name: tensor.to("meta") for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    x = torch.empty(1, inputs, device="meta", dtype=module.weight.dtype)  # type: ignore[arg-type]
    try:
        output = functional_call(module, tensors, (x,))
    except (RuntimeError, ValueError, IndexError, TypeError):  # it takes more than one row of features
        return False
    return isinstance(output, Tensor) and output.shape == (1, outputs)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if is_transposed(module) else (columns, rows)


def add_adapter(module: nn.Module, *, rank: int, scale: float, dropout: float) -> None:
    """Add an adapter to a linear layer, on the layer's device and in its dtype."""
    inputs, outputs = features_of(module)
    weight: Any = module.weight
    down, up = LoraDown(inputs, rank), LoraUp(rank, outputs)
    module.lora_A = down.to(device=weight.device, dtype=weight.dtype)
    module.lora_B = up.to(device=weight.device, dtype=weight.dtype)
    layer: Any = module
    layer.lora_scale, layer.lora_dropout, layer.lora_on = scale, dropout, True
    module.register_forward_hook(_add_adapter, with_kwargs=True)


def has_adapter(module: nn.Module) -> bool:
    """Whether a module has an adapter."""
    return isinstance(module._modules.get("lora_B"), LoraUp)


def _add_adapter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    layer: Any = module
    if not layer.lora_on:
        return output
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    x = F.dropout(x, layer.lora_dropout, layer.training)
    added: Tensor = layer.lora_B(layer.lora_A(x)) * layer.lora_scale
    if added.shape != output.shape:
        raise ModelError(
            f"an adapter of {layer.lora_B.weight.shape[0]} features stands beside a layer that answers with "
            f"{output.shape[-1]} on this rank, where the adapter has {added.shape[-1]}: strategy.layout.tp cuts the "
            "heads of this layer unevenly; leave it out of lora.targets, or use fewer ranks"
        )
    return output + added


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a model in this context."""
    layers: list[Any] = [module for module in model.modules() if has_adapter(module) and module.lora_on]
    for layer in layers:
        layer.lora_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_on = True


def merge(model: nn.Module) -> int:
    """Add every adapter to its layer's weight and disable it; return how many there were.

    Raise a `ModelError` if the weights are sharded or quantized.
    """
    return _move(model, 1.0)


def unmerge(model: nn.Module) -> int:
    """Subtract every merged adapter from its layer's weight and enable it again; return how many there were."""
    return _move(model, -1.0)


def _move(model: nn.Module, sign: float) -> int:
    count = 0
    for module in model.modules():
        layer: Any = module
        if not has_adapter(module) or layer.lora_on is (sign < 0):
            continue
        if any(is_sharded(param) for param in module.parameters()):
            raise ModelError("an adapter of a sharded model cannot be merged in place; merge what was saved of it")
        if "weight" not in module._parameters:
            raise ModelError("an adapter cannot be merged into a matrix of 4 or 8 bits; build the model with full ones")
        with torch.no_grad():
            change = difference(layer.lora_A.weight, layer.lora_B.weight, layer.lora_scale)
            layer.weight.add_(change.t() if is_transposed(module) else change, alpha=sign)
        layer.lora_on = sign < 0
        count += 1
    return count


def difference(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the matrix (out, in) that an adapter adds to its layer's weight."""
    return (up @ down) * scale


# Which layers get an adapter, and which parameters are trained.


ALL = "linear"
"""The value of `lora.targets` for every linear layer inside the blocks."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The rank, scale and dropout of adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    scaled_by_root: bool = False

    @classmethod
    def of(cls, config: LoraConfig) -> AdapterSpec:
        """Return the values of the section `lora`."""
        return cls(config.rank, config.alpha, config.dropout, config.scaled_by_root)

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.scaled_by_root else self.rank)


def attach(model: nn.Module, spec: AdapterSpec, targets: Sequence[str]) -> list[str]:
    """Add an adapter to every target; return their names. A target that matches no layer raises a `ConfigError`."""
    names = find_targets(model, targets)
    for name in names:
        add_adapter(model.get_submodule(name), rank=spec.rank, scale=spec.scale, dropout=spec.dropout)
    return names


def lora_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that have an adapter."""
    return [name for name, module in model.named_modules() if has_adapter(module)]


def find_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that the targets match, in the order of the model."""
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    inside = _inside_blocks(model, linear)
    chosen: set[str] = set()
    problems = []
    for target in targets:
        matches = inside if target == ALL else [name for name in linear if _fits(name, target)]
        chosen.update(matches)
        if not matches:
            known = sorted({name.rpartition(".")[2] for name in linear})
            message = f"{target!r} matches no linear layer of this model"
            problems.append(Problem("lora.targets", message, f"Last names of its layers: {', '.join(known)}."))
    for name in sorted(chosen & _tied(model)):
        message = f"{name!r} shares its matrix with another layer, which an adapter beside it would change when merged"
        problems.append(Problem("lora.targets", message, "Leave it out, or train it whole with `lora.also`."))
    if problems:
        raise ConfigError(problems)
    return [name for name in linear if name in chosen]


def freeze_others(model: nn.Module, also: Sequence[str]) -> None:
    """Freeze all parameters but those of added modules and those whose names match a pattern of `also`.

    A pattern that matches no parameter raises a `ConfigError`.
    """
    trained = {
        id(param)
        for child in model.modules()
        if isinstance(child, AddedModule)
        for param in child.parameters(recurse=False)
    }
    problems = []
    for pattern in also:
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
            problems.append(Problem("lora.also", f"{pattern!r} fits no parameter of this model", "Use full names."))
    if problems:
        raise ConfigError(problems)
    for name, param in model.named_parameters():
        param.requires_grad_(id(param) in trained or any(fnmatchcase(name, pattern) for pattern in also))


def _inside_blocks(model: nn.Module, linear: list[str]) -> list[str]:
    classes = getattr(model, "block_classes", ())
    blocks = [name for name, module in model.named_modules() if classes and isinstance(module, classes)]
    if blocks:
        return [name for name in linear if any(name.startswith(f"{block}.") for block in blocks)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [name for name in linear if model.get_submodule(name) is not head]


def _tied(model: nn.Module) -> set[str]:
    """Return the names of modules that share their weight with another module."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            owners.setdefault(id(weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


# How the ranks of a tensor-parallel group divide an adapter: as they divide its layer.
#
# If the layer is cut along its output features, `B` is cut along them too, and every rank has all of `A`, whose
# gradient is the sum of those of the ranks. If the layer is cut along its input features, `A` is cut along them too,
# the ranks' outputs of `A` are summed, and every rank has all of `B`.


_COLUMNS = frozenset({"colwise", "colwise_gather", "gathered", "heads", "kv_heads"})
_ROWS = frozenset({"rowwise", "rowwise_split"})


def with_adapters(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the tensor plan (a style per module) of a model with adapters, given the one without them."""
    from plait.distributed import enclosing_module

    extended = dict(styles)
    for name, module in model.named_modules():
        style = styles.get(name)
        if not has_adapter(module) or style in (None, "replicate", "inner"):
            continue
        # Inside a region, the region sums the gradient of its input over ranks, and `A` has partial gradients; outside
        # of one, `B` sums the gradient of its own input.
        before = "inner" if enclosing_module(name, styles, "region") is not None else "sequence"
        if style in _COLUMNS:
            down, up = before, str(style) if style in ("colwise_gather", "gathered") else "colwise"
        elif style in _ROWS:
            down, up = str(style), "sequence"
        elif style == "qkv_heads":
            down, up = before, "qkv_heads"
            parent = model.get_submodule(name.rpartition(".")[0])
            module.head_dim = parent.head_dim  # `B` is cut by heads too, and reads their width from its parent
        else:
            message = f"{name!r} has an adapter, and the tensor plan gives it {style!r}, which an adapter cannot follow"
            raise ConfigError(Problem("lora.targets", message, "Leave it out, or use strategy.layout.tp: 1."))
        extended[f"{name}.lora_A"], extended[f"{name}.lora_B"] = down, up
    return extended


# A checkpoint with adapters, presented as one without: each adapter is added to its weight when that is read.


_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def has_adapters(source: Source) -> bool:
    """Whether a checkpoint has adapters."""
    return any(name.startswith("model.") and name.endswith(_UP) for name in source.entries)


def merged(source: Source, *, trust_code: bool = False) -> Source:
    """Return the checkpoint of a run with `lora`, with its adapters merged into the weights.

    It has no optimizer state, since that belongs to the adapters. A checkpoint with quantized weights, or without the
    frozen ones, raises a `CheckpointError`.
    """
    config: Mapping[str, Any] = source.state.get("config") or {}
    if any(name.endswith(".weight_codes") for name in source.entries):
        raise CheckpointError(
            f"{source.path} holds matrices in 4 or 8 bits, to which nothing can be added. Merge the adapter into the "
            "model that it was trained on: start another phase from that model with lora.base: full and lora.adapter"
        )
    if frozen := source.state.get("frozen"):
        raise CheckpointError(
            f"{source.path} holds only what was trained; {len(frozen['names'])} other tensors are not in it"
        )
    scale = AdapterSpec.of(LoraConfig(**config["lora"])).scale
    layers = [name.removesuffix(_UP) for name in source.entries if name.endswith(_UP) and name.startswith("model.")]
    turned = _transposed(source, layers, trust_code)
    recipes: dict[str, Recipe] = {}
    for name in source.entries:
        layer = name.removesuffix(".weight")
        if not name.startswith("model.") or name.endswith((_DOWN, _UP)):
            continue
        if layer in layers:
            recipes[name] = (name, f"{layer}{_DOWN}", f"{layer}{_UP}"), _adding(scale, turned=layer in turned)
        else:
            recipes[name] = (name,), _same
    return View(source, recipes, state={"config": {key: value for key, value in config.items() if key != "lora"}})


def _transposed(source: Source, layers: list[str], trust_code: bool) -> set[str]:
    """Return the layers whose weight is (in, out): `Conv1D` of `transformers`."""
    stored = {"model": source.state["config"]["model"]}
    described = parse_stored(stored, source.description, trust_code=trust_code).model
    if described is None or described.type != "hf":
        return set()
    with torch.device("meta"):
        model: nn.Module = build_model(described, trust_code=trust_code)
    return {layer for layer in layers if is_transposed(model.get_submodule(layer.removeprefix("model.")))}


def _adding(scale: float, *, turned: bool) -> Callable[..., Tensor]:
    return partial(_add_difference, scale, turned)


def _add_difference(scale: float, turned: bool, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    change = difference(down.float(), up.float(), scale)
    return weight + (change.t() if turned else change).to(weight.dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor


# Adapters in files: `adapter_config.json` and `adapter_model.safetensors`, as `peft` reads and writes them.


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "value_head.safetensors"
"""File with the value head of a reward model, which the format of `peft` has no place for."""
PREFIX = "base_model.model."
"""The prefix of every tensor name in the files of `peft`."""

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
"""Options of `peft` that are not supported, each with the value that means it is off."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read from a folder: its spec, the names of its layers, and its matrices by name."""

    path: Path
    spec: AdapterSpec
    layers: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """The value head of a reward model, by its name in the model."""
    base: str | None = None
    """The path or name of its base model, from its file."""

    def strange_base(self, base: str | None) -> str | None:
        """Return a warning if the adapter names another base model; None if not.

        Only the last parts of the paths are compared, since folders may have been moved.
        """
        if self.base is None or base is None or Path(self.base).name == Path(base).name:
            return None
        return (
            f"the adapter in {self.path} says that it was trained on {self.base!r}, and its base here is {base!r}; if "
            "those are not the same weights, its answers will be poor"
        )

    def check(self, model: nn.Module) -> None:
        """Raise a `ModelError` if the adapter has other layers or shapes than the adapters of the model."""
        have = set(lora_layers(model))
        problems = [f"{name}: the model has no adapter there" for name in self.layers if name not in have]
        problems += [f"{name}: not in the file" for name in sorted(have - set(self.layers))]
        for name in have & set(self.layers):
            for key in ("lora_A", "lora_B"):
                shape = tuple(model.get_parameter(f"{name}.{key}.weight").shape)
                actual = tuple(self.tensors[f"{name}.{key}.weight"].shape)
                if actual != shape:
                    problems.append(f"{name}.{key}: {actual} in the file, {shape} in the model")
        if problems:
            more = f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else ""
            raise ModelError(f"the adapter in {self.path} does not fit:\n  " + "\n  ".join(problems[:12]) + more)


def read_adapter(path: str | Path, model: nn.Module | None = None) -> Adapter:
    """Return the adapter in a folder that `peft` or `save_adapter` wrote.

    Raise a `CheckpointError` if it has options that are not supported here (other ranks for some layers, DoRA, biases,
    whole modules). With `model`, raise a `ModelError` if a layer is not one of its linear layers.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds no adapter: {CONFIG} is missing")
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
            raise ModelError(f"the adapter in {folder} is for {strange[0]}, which is not a linear layer of this model")
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
        raise CheckpointError(f"{file.parent} holds no adapter: {file.name} is missing") from None
    except (SafetensorError, OSError, UnicodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy it again") from error


def _plain(folder: Path, stored: str) -> str:
    name = stored.removeprefix(PREFIX)
    if not re.search(r"\.lora_[AB]\.weight$", name):
        raise CheckpointError(f"{folder / WEIGHTS} holds {stored}, which is not a matrix of a plain adapter")
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
    """Write an adapter in the format of `peft`, and read it back to verify it; return the folder.

    `tensors` are not sharded, and have their names in the model: `….lora_A.weight`, `….lora_B.weight`. `transposed`:
    the layers are `Conv1D` of `transformers`. `task` is the `task_type` of `peft`; with `CAUSAL_LM` it expects a model
    with the `generate` of `transformers`. `head` is the value head of a reward model.
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
        with staging_path(folder / "adapter") as staged:  # all files are written before any is moved to its final name
            staged.mkdir()
            weights = {f"{PREFIX}{name}": tensor for name, tensor in kept.items()}
            save_file(weights, staged / WEIGHTS, metadata={"format": "pt"})
            (staged / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            if head:
                save_file({name: tensor.detach().cpu().contiguous() for name, tensor in head.items()}, staged / HEAD)
            else:
                (folder / HEAD).unlink(missing_ok=True)
            for file in staged.iterdir():
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
    """Whether the layers are `Conv1D` of `transformers`; raise a `ModelError` if only some are.

    The files of `peft` have one value for all layers.
    """
    orientations = {is_transposed(model.get_submodule(name)) for name in layers}
    if len(orientations) > 1:
        raise ModelError("adapters beside both Linear and Conv1D layers cannot be saved in one folder")
    return orientations == {True}


# Frozen weights quantized to 8 or 4 bits, with adapters in full precision (QLoRA; Dettmers et al., 2023).
#
# 64 consecutive values of a weight are a block with one fp32 scale. `int8`: 255 equidistant levels. `nf4`: 16 quantiles
# of the normal distribution, two codes per byte. Codes are buffers, which every rank has completely: ZeRO shards only
# the trained parameters of such a model. Only the gradient of the input is computed; the backward pass unpacks the
# weight a second time, so that the unpacked weight is never kept.


QuantFormat = Literal["int8", "nf4"]
BLOCK = 64


def _normal_levels() -> tuple[float, ...]:
    """Return 16 quantiles of a normal distribution scaled to [-1, 1]: 7 below zero, zero, and 8 above."""
    outermost, cut = 0.9677083, NormalDist().inv_cdf
    above = [cut(outermost + (0.5 - outermost) * step / 8) for step in range(8)]
    below = [-cut(outermost + (0.5 - outermost) * step / 7) for step in range(7)]
    return tuple(level / above[0] for level in sorted([*above, 0.0, *below]))


NF4 = _normal_levels()


def pack(weight: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a matrix."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    unit = blocks / torch.where(scales > 0, scales, 1.0)
    if fmt == "int8":
        return (unit * 127).round().to(torch.int8), scales
    levels = torch.tensor(NF4, device=weight.device)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return codes[:, 0::2] * 16 + codes[:, 1::2], scales


def unpack(codes: Tensor, scales: Tensor, fmt: QuantFormat, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the matrix that codes and scales represent."""
    if fmt == "int8":
        unit = codes.float() / 127
    else:
        both = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
        unit = torch.tensor(NF4, device=codes.device)[both.int()]
    return (unit * scales).flatten()[: shape.numel()].view(shape).to(dtype)


class Quantized(nn.Module):
    """The base class that `quantize` adds to a linear layer: its weight is stored as codes and scales."""

    weight_codes: Tensor
    weight_scales: Tensor
    packed_format: QuantFormat
    packed_shape: torch.Size

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the linear layer, in the dtype of the input."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        bias = self._parameters.get("bias")
        return y if bias is None else y + bias.to(y.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a matrix (out, in)."""
        whole = unpack(self.weight_codes, self.weight_scales, self.packed_format, self.packed_shape, dtype)
        return whole.t() if is_transposed(self) else whole


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Quantized) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.unpacked(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.unpacked(grad.dtype), None


def quantize(model: nn.Module, names: list[str], fmt: QuantFormat) -> None:
    """Quantize the weights of linear layers, in place. All other tensors keep their names."""
    for name in names:
        module = model.get_submodule(name)
        weight = module._parameters.pop("weight")
        assert weight is not None
        original = type(module)
        members = {"__module__": original.__module__, "packed_format": fmt, "packed_shape": weight.shape}
        module.__class__ = type(original.__name__, (Quantized, original), members)
        codes, scales = pack(weight, fmt)
        module.register_buffer("weight_codes", codes)
        module.register_buffer("weight_scales", scales)


@contextmanager
def whole_weight(module: nn.Module) -> Iterator[None]:
    """Give a quantized layer an unquantized weight in this context, to be set; quantize it when the context ends.

    Other modules are not changed.
    """
    if not isinstance(module, Quantized):
        yield
        return
    device = module.weight_codes.device
    weight = nn.Parameter(torch.empty(module.packed_shape, device=device), requires_grad=False)
    module._parameters["weight"] = weight
    try:
        yield
    finally:
        del module._parameters["weight"]
    codes, scales = pack(weight, module.packed_format)
    module.weight_codes.copy_(codes)
    module.weight_scales.copy_(scales)
