"""One linear layer with an adapter.

[Note: an adapter is a child and a hook]
The layer stays what it is: the same module, class and forward, so every technique that knows linear layers still does,
and no parameter changes its name. `lora_A` and `lora_B` become its children, and a hook adds what they say. The file
format of `peft` has the same names.
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
from torch.nn import functional as F

from plait.atomic_write import staging_path
from plait.checkpoint import Recipe, Source, View
from plait.config import LoraConfig, parse_stored, read_json_object
from plait.distributed import is_sharded
from plait.errors import CheckpointError, ConfigError, ModelError, Problem
from plait.models import build_model

# Modules that post-training adds to a model. Each fills itself, whatever the model thinks of initial values.


class AddedModule(nn.Module):
    """A module that was added to the described model."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        raise NotImplementedError


class LoraDown(nn.Linear, AddedModule):
    """`A`: from the features to the rank. Starts as any linear layer of torch does, and as `peft` has it."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__(features, rank, bias=False)


class LoraUp(nn.Linear, AddedModule):
    """`B`: from the rank to the features. Starts at zero, so that the adapter changes nothing at first."""

    def __init__(self, rank: int, features: int) -> None:
        super().__init__(rank, features, bias=False)

    def reset_parameters(self) -> None:
        """All zero."""
        nn.init.zeros_(self.weight)


class ValueHead(AddedModule):
    """One number for each token, in the place of the layer that gave logits. Always in fp32.

    It is called as that layer was, and lets go what it does not need: labels, and the embedding of a tied head.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(features, 1, bias=False).weight.detach())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small, so that all answers are worth about the same at first."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor, *_: object) -> Tensor:
        """(…, features) to (…)."""
        return F.linear(hidden.float(), self.weight.float()).squeeze(-1)


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is `Conv1D` of `transformers`, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether an adapter may stand beside a module."""
    plain = isinstance(module, nn.Linear) and not isinstance(module, LoraDown | LoraUp)
    return plain or is_transposed(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Input and output features."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if is_transposed(module) else (columns, rows)


def add_adapter(module: nn.Module, *, rank: int, scale: float, dropout: float) -> None:
    """Put an adapter beside a linear layer, on the layer's device and in its dtype."""
    inputs, outputs = features_of(module)
    weight: Any = module.weight
    down, up = LoraDown(inputs, rank), LoraUp(rank, outputs)
    module.lora_A = down.to(device=weight.device, dtype=weight.dtype)
    module.lora_B = up.to(device=weight.device, dtype=weight.dtype)
    layer: Any = module
    layer.lora_scale, layer.lora_dropout, layer.lora_on = scale, dropout, True
    module.register_forward_hook(_add_adapter, with_kwargs=True)


def has_adapter(module: nn.Module) -> bool:
    """Whether there is one."""
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
    """The model as it would be without its adapters."""
    layers: list[Any] = [module for module in model.modules() if has_adapter(module) and module.lora_on]
    for layer in layers:
        layer.lora_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_on = True


def merge(model: nn.Module) -> int:
    """Add every adapter to its layer's weight and switch it off; returns how many there were. For whole weights."""
    return _move(model, 1.0)


def unmerge(model: nn.Module) -> int:
    """Take every merged adapter out of its layer's weight again and switch it on; returns how many there were."""
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
    """What an adapter adds to a weight of (out, in)."""
    return (up @ down) * scale


# Which layers get an adapter, and what learns afterwards.


ALL = "linear"
"""The word for every linear layer inside the blocks."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """How large adapters are and how much they count."""

    rank: int
    alpha: float
    dropout: float = 0.0
    scaled_by_root: bool = False

    @classmethod
    def of(cls, config: LoraConfig) -> AdapterSpec:
        """As the section says."""
        return cls(config.rank, config.alpha, config.dropout, config.scaled_by_root)

    @property
    def scale(self) -> float:
        """What the product of both matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.scaled_by_root else self.rank)


def attach(model: nn.Module, spec: AdapterSpec, targets: Sequence[str]) -> list[str]:
    """Give every target an adapter; returns their names. A word that fits no linear layer is an error."""
    names = find_targets(model, targets)
    for name in names:
        add_adapter(model.get_submodule(name), rank=spec.rank, scale=spec.scale, dropout=spec.dropout)
    return names


def lora_layers(model: nn.Module) -> list[str]:
    """Names of the layers that have an adapter."""
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
    """Let only what was added learn, and parameters whose names fit `also`."""
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
    """Modules whose weight is another one's too."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            owners.setdefault(id(weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


# How the ranks of a tensor-parallel group share adapters: as they share the layers beside them.
#
# A layer whose output features are shared has a whole `A`, of which every rank has a summand of the gradient, and a `B`
# by output features. One whose input features are shared has an `A` by input features, whose results are added, and a
# whole `B`.


_COLUMNS = frozenset({"colwise", "colwise_gather", "heads", "kv_heads"})
_ROWS = frozenset({"rowwise", "rowwise_split"})


def with_adapters(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """A tensor plan for a model with adapters, from the plan of the model without them."""
    from plait.distributed import enclosing_module

    extended = dict(styles)
    for name, module in model.named_modules():
        style = styles.get(name)
        if not has_adapter(module) or style in (None, "replicate", "inner"):
            continue
        # Inside a region the input has been brought into shared work; elsewhere `B` does so itself.
        before = "inner" if enclosing_module(name, styles, "region") is not None else "sequence"
        if style in _COLUMNS:
            down, up = before, "colwise_gather" if style == "colwise_gather" else "colwise"
        elif style in _ROWS:
            down, up = str(style), "sequence"
        elif style == "qkv_heads":
            down, up = before, "qkv_heads"
            parent = model.get_submodule(name.rpartition(".")[0])
            module.head_dim = parent.head_dim  # `B` is cut by heads too, and looks for their width around itself
        else:
            message = f"{name!r} has an adapter, and the tensor plan gives it {style!r}, which an adapter cannot follow"
            raise ConfigError(Problem("lora.targets", message, "Leave it out, or use strategy.layout.tp: 1."))
        extended[f"{name}.lora_A"], extended[f"{name}.lora_B"] = down, up
    return extended


# A checkpoint with adapters, seen as one without: every adapter added to its matrix as it is read.


_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def has_adapters(source: Source) -> bool:
    """Whether there are any."""
    return any(name.startswith("model.") and name.endswith(_UP) for name in source.entries)


def merged(source: Source, *, trust_code: bool = False) -> Source:
    """The model of a run with `lora`, whole; no optimizer goes with it, whose state belongs to the adapters."""
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
    """Layers whose weight is (in, out): `Conv1D` of `transformers`."""
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
                actual = tuple(self.tensors[f"{name}.{key}.weight"].shape)
                if actual != shape:
                    problems.append(f"{name}.{key}: {actual} in the file, {shape} in the model")
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
        with staging_path(folder / "adapter") as staged:  # all is written before the first file gets its name
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
    """Whether the layers are `Conv1D` of `transformers`. Files say it once for all."""
    orientations = {is_transposed(model.get_submodule(name)) for name in layers}
    if len(orientations) > 1:
        raise ModelError("adapters beside both Linear and Conv1D layers cannot be saved in one folder")
    return orientations == {True}


# Frozen matrices in 8 or 4 bits a number, beside adapters in full precision (Dettmers et al., 2023).
#
# A block is 64 neighbours of the matrix, with one fp32 scale. `int8`: 255 even steps. `nf4`: 16 levels that split a
# normal distribution evenly, two codes a byte. Codes are buffers, whole on every rank: of such a model, ZeRO shards
# what is trained. The product is differentiated with respect to its input only, and the matrix is unpacked again for
# that, so that it never lies around whole.


QuantFormat = Literal["int8", "nf4"]
BLOCK = 64


def _normal_levels() -> tuple[float, ...]:
    """16 quantiles of a normal distribution, one of them zero, from -1 to 1; one more above zero than below."""
    outermost, cut = 0.9677083, NormalDist().inv_cdf
    above = [cut(outermost + (0.5 - outermost) * step / 8) for step in range(8)]
    below = [-cut(outermost + (0.5 - outermost) * step / 7) for step in range(7)]
    return tuple(level / above[0] for level in sorted([*above, 0.0, *below]))


NF4 = _normal_levels()


def pack(weight: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix."""
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
    """The matrix that codes and scales stand for."""
    if fmt == "int8":
        unit = codes.float() / 127
    else:
        both = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
        unit = torch.tensor(NF4, device=codes.device)[both.int()]
    return (unit * scales).flatten()[: shape.numel()].view(shape).to(dtype)


class Quantized(nn.Module):
    """What the class of a linear layer is extended by, once its matrix is packed."""

    weight_codes: Tensor
    weight_scales: Tensor
    packed_format: QuantFormat
    packed_shape: torch.Size

    def forward(self, x: Tensor) -> Tensor:
        """The layer's product, in the format of the input."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        bias = self._parameters.get("bias")
        return y if bias is None else y + bias.to(y.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The matrix as (out, in)."""
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
    """Pack the matrices of linear layers, in place. Names of all other tensors stay."""
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
    """A layer with its whole matrix, to be set; packed again afterwards. Any other module stays as it is."""
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
