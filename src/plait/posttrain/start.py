"""The initial weights of a phase, read one tensor at a time.

The model's initializer (`init_weights`, which `extend` sets) reads them. The engine calls it module by module, so no
rank holds more than one unsharded module. A resumed run reads the same frozen weights again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import Source, open_source, read_description, translated
from plait.config import GptConfig, HFConfig, LlamaConfig, LoraConfig, ModelConfig
from plait.errors import CheckpointError, ModelError
from plait.fake_tensors import on_fake_tensors
from plait.models import are_unchanged, from_transformers, made_from_stored
from plait.posttrain.lora import (
    Adapter,
    AdapterSpec,
    AddedModule,
    LoraDown,
    LoraUp,
    Quantized,
    ValueHead,
    difference,
    has_adapter,
    is_transposed,
    whole_weight,
    with_adapters,
)
from plait.torch_internals import non_persistent_buffers

_SHOWN = 12
_SCORE = "score.weight"
"""The name of the value head in models for sequence classification of `transformers`."""


class Start:
    """Initial values of parameters and buffers, by their names in the model.

    Adapters in the checkpoint `source` are merged into its weights; `adapter` sets the adapter of the model.
    """

    def __init__(self, source: Source | None, adapter: Adapter | None = None, *, prefix: str = "") -> None:
        """`prefix` is the `base_model_prefix` of `transformers`, which a name may have only in the checkpoint or
        only in the model.
        """
        self._source = source
        self._adapter = adapter
        self._prefix = prefix
        entries = {} if source is None else source.entries
        self._names = {name.removeprefix("model.") for name in entries if name.startswith("model.")}
        self._scale = _scale_of(source)

    def check(self, model: nn.Module) -> None:
        """Raise a `ModelError` if a tensor of the model has no value or one of another shape, before any is read.

        Added modules (adapters, value heads) need no values.
        """
        if self._adapter is not None:
            self._adapter.check(model)
        if self._source is None:
            return
        problems: list[str] = []
        for names, tensor, module in _base_tensors(model):
            stored = next((match for name in names if (match := self._stored(name)) is not None), None)
            shape = None if stored is None else self._source.entries[f"model.{stored}"].shape
            if isinstance(module, AddedModule):
                continue
            if stored is None:
                problems.append(f"{names[0]}: not there")
            elif shape != tensor.shape:
                problems.append(f"{names[0]}: {tuple(shape or ())} there, {tuple(tensor.shape)} in the model")
        if problems:
            more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            table = "\n  ".join(problems[:_SHOWN])
            raise ModelError(f"the weights in {self._source.path} are not of this model:\n  {table}{more}")

    def fill(self, model: nn.Module, module: nn.Module) -> None:
        """Set those parameters and buffers of one module, without its children, that have a value."""
        prefix = next(name for name, child in model.named_modules() if child is module)
        for key, tensor in _direct(module):
            name = f"{prefix}.{key}" if prefix else key
            if not self._knows(name, tensor, module):
                continue
            if tensor.is_meta:
                self._show_set(tensor, name, module)
            else:
                self._set(tensor, name, module)

    def _show_set(self, tensor: Tensor, name: str, module: nn.Module) -> None:
        tensor.zero_()  # there are no values to set: this only marks the tensor as initialized

    @on_fake_tensors(_show_set, argument=1)
    def _set(self, tensor: Tensor, name: str, module: nn.Module) -> None:
        tensor.copy_(self._read(name, module))

    def _knows(self, name: str, tensor: Tensor, module: nn.Module) -> bool:
        if isinstance(module, LoraDown | LoraUp):
            return self._adapter is not None
        if self._adapter is not None and name in self._adapter.head and isinstance(module, AddedModule):
            return True
        stored = self._stored(name, module)
        if stored is None or self._source is None:
            return False
        # A head of the same name may be of the other kind, for logits instead of values: the shape shows that.
        return not isinstance(module, AddedModule) or self._source.entries[f"model.{stored}"].shape == tensor.shape

    def _read(self, name: str, module: nn.Module) -> Tensor:
        if isinstance(module, LoraDown | LoraUp):
            assert self._adapter is not None
            return self._adapter.tensors[name]
        if self._adapter is not None and name in self._adapter.head:
            return self._adapter.head[name]
        stored = self._stored(name, module)
        assert self._source is not None
        value = self._source.read(f"model.{stored}")
        base = name.removesuffix(".weight")
        down = self._stored(f"{base}.lora_A.weight") if name.endswith(".weight") else None
        if down is None:
            return value
        up = self._stored(f"{base}.lora_B.weight")
        first, second = (self._source.read(f"model.{matrix}").float() for matrix in (down, up))
        change = difference(first, second, self._scale)
        return value + (change.t() if is_transposed(module) else change).to(value.dtype)

    def _stored(self, name: str, module: nn.Module | None = None) -> str | None:
        candidates = (name, f"{self._prefix}{name}", name.removeprefix(self._prefix)) if self._prefix else (name,)
        if isinstance(module, ValueHead):
            candidates = (_SCORE, *candidates)
        return next((candidate for candidate in candidates if candidate in self._names), None)


def open_start(path: str | None, model: ModelConfig, adapter: Adapter | None, built: nn.Module) -> Start | None:
    """Return the values from `posttrain.start` (else a pretrained `model.path`) and from the adapter, checked.

    None if there is neither.
    """
    if path is None and isinstance(model, HFConfig) and model.path is not None and model.pretrained:
        path = model.path
    source = None if path is None else _open(path, model, built)
    if source is None and adapter is None:
        return None
    start = Start(source, adapter, prefix=_prefix(built))
    start.check(built)
    return start


def _open(path: str, model: ModelConfig, built: nn.Module) -> Source:
    source = open_source(Path(path))
    if frozen := source.state.get("frozen"):
        raise CheckpointError(
            f"{source.path} holds only what was trained; {len(frozen['names'])} other tensors are not in it. Start "
            "from the model that it was trained on, with `lora.adapter` as its adapter"
        )
    if source.kind == "hf" and isinstance(model, GptConfig | LlamaConfig):
        shapes = {n.removeprefix("model."): e.shape for n, e in source.entries.items() if n.startswith("model.")}
        adopted = from_transformers(model.type, read_description(source.path), shapes)
        return translated(source, adopted.made, unused=adopted.unused)
    if source.kind == "hf" and isinstance(model, HFConfig):
        shapes = {n.removeprefix("model."): e.shape for n, e in source.entries.items() if n.startswith("model.")}
        made = made_from_stored(built, shapes)
        return source if are_unchanged(made) else translated(source, made)
    return source


def _scale_of(source: Source | None) -> float:
    """Return the scale of the adapters in a checkpoint; 0 if it has none."""
    lora: Mapping[str, Any] | None = None if source is None else (source.state.get("config") or {}).get("lora")
    return AdapterSpec.of(LoraConfig(**lora)).scale if lora else 0.0


def _prefix(model: nn.Module) -> str:
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""


def _direct(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of one module without its children, by name."""
    for key, param in module._parameters.items():
        if param is not None:
            yield key, param
    if isinstance(module, Quantized) and "weight" not in module._parameters:  # only its shape is used
        yield "weight", torch.empty(module.packed_shape, device="meta")
    for key, buffer in module._buffers.items():
        if isinstance(module, Quantized) and key in ("weight_codes", "weight_scales"):
            continue
        if buffer is not None and key not in non_persistent_buffers(module):
            yield key, buffer


def _base_tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor, nn.Module]]:
    """Yield every tensor with all of its names, and a module that holds it."""
    tensors: dict[int, tuple[list[str], Tensor, nn.Module]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in _direct(module):
            name = f"{prefix}.{key}" if prefix else key
            tensors.setdefault(id(tensor), ([], tensor, module))[0].append(name)
    yield from tensors.values()


def fill_all(model: nn.Module, start: Start) -> None:
    """Set the initial values of a model whose tensors are allocated."""
    with torch.no_grad():
        for module in model.modules():
            with whole_weight(module):
                start.fill(model, module)


# The model of a phase: with adapters, another head, or a `forward` that returns a loss.
#
# [Note: a model is extended, not wrapped]
# The model's class is replaced by a subclass with additional base classes, as `models.hf` does it. So every parameter
# keeps its name: a checkpoint of one phase can be loaded into the model of another one, and code that handles the model
# (sharding, tensor parallelism, checkpoints) needs no change.


def extend(
    model: nn.Module,
    *,
    start: Start | None = None,
    mixins: tuple[type[nn.Module], ...] = (),
    rates: Mapping[str, float] | None = None,
) -> nn.Module:
    """Replace the class of a model by a subclass, and return the model.

    The subclass initializes added modules, reads the values of `start`, and has the tensor plan of the model with its
    adapters; `mixins` come before the original class, and may have a `forward` of their own. `rates` are learning rates
    by patterns of parameter names.
    """
    original = type(model)
    members: dict[str, Any] = {"__module__": original.__module__, "tensor_plan": _tensor_plan(original)}
    inherited = getattr(original, "init_weights", None)
    if inherited is not None or start is not None:
        members["init_weights"] = _initializer(inherited, start)
    if rates:
        members["learning_rates"] = dict(rates)
    model.__class__ = type(original.__name__, (*mixins, original), members)
    if start is not None and not any(param.is_meta for param in model.parameters()):
        fill_all(model, start)
    return model


def swap_head(model: nn.Module) -> str:
    """Replace the output layer of a model by a value head; return its name."""
    name = head_name(model)
    features = _features(model)
    device = next(model.parameters()).device
    parent = model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], ValueHead(features).to(device))
    return name


def head_name(model: nn.Module) -> str:
    """Return the name of the output layer, which computes the logits; raise a `ModelError` if there is none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    name: str
    for name, module in model.named_modules():
        if name and (module is head or (head is None and name in ("head", "lm_head"))):
            return name
    raise ModelError(
        f"no head was found in a {type(model).__name__}, so no value can take its place: name the last layer `head` or "
        "`lm_head`, or give the model a method get_output_embeddings()"
    )


def _features(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    size = getattr(config, "dim", None) or getattr(config, "hidden_size", None)
    if isinstance(size, int):
        return size
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise ModelError(
            f"how wide a {type(model).__name__} is cannot be told: it has neither a config nor an embedding"
        )
    return embeddings[0].embedding_dim


def _initializer(inherited: Callable[..., None] | None, start: Start | None) -> Callable[..., None]:
    def init_weights(self: nn.Module, module: nn.Module | None = None) -> None:
        """Fill the direct parameters and buffers of one module."""
        if module is None:  # `transformers` calls it so for the whole model
            for child in self.modules():
                init_weights(self, child)
            return
        with whole_weight(module):
            if isinstance(module, AddedModule):
                module.reset_parameters()
            elif inherited is not None:
                inherited(self, module)
            if start is not None:
                start.fill(self, module)

    return init_weights


def _tensor_plan(original: type[nn.Module]) -> Callable[[nn.Module], dict[str, str]]:
    def tensor_plan(self: nn.Module) -> dict[str, str]:
        """Return the tensor plan (a style per module) of the model with its adapters and value head."""
        from plait.distributed import is_transformers_model, resolve_plan, transformers_styles

        with _without_adapters(self):
            declared = getattr(original, "tensor_plan", None)
            if declared is not None:
                styles = resolve_plan(self, declared(self), stage=True)
            elif is_transformers_model(self):
                styles = transformers_styles(self)
            else:
                raise ModelError(
                    f"nothing says how the ranks share the layers of a {original.__name__}: give it a method "
                    "`tensor_plan()`, or use layout.tp: 1"
                )
        styles = {
            name: "replicate" if isinstance(self.get_submodule(name), ValueHead) else style
            for name, style in styles.items()
        }
        return with_adapters(self, styles)

    return tensor_plan


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Remove the adapters in this context, since the plan is written for the model without them."""
    layers = [module for module in model.modules() if has_adapter(module)]
    taken = [(layer, {key: layer._modules.pop(key) for key in ("lora_A", "lora_B")}) for layer in layers]
    try:
        yield
    finally:
        for layer, children in taken:
            layer._modules.update(children)
