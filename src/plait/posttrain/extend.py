"""A model as a phase needs it: with adapters, with another head, with another answer.

[Note: a model is extended, not wrapped]
Its class is extended in place, as `models.hf` does it. So every parameter keeps its name: a checkpoint of any phase
fits the model of any other, and all techniques see the model that they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.posttrain.lora.cut import with_adapters
from plait.posttrain.lora.layer import has_adapter
from plait.posttrain.lora.quantized import whole_weight
from plait.posttrain.parts import Part, ValueHead
from plait.posttrain.start import Start, fill_all


def extend(
    model: nn.Module,
    *,
    start: Start | None = None,
    mixins: tuple[type[nn.Module], ...] = (),
    rates: Mapping[str, float] | None = None,
) -> nn.Module:
    """Let a model fill what was added to it, begin with given weights, tell how ranks share it, and answer anew.

    `rates` are learning rates of parameters whose names fit a pattern, where those have their own.
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
    """Put a value head in the place of the layer that gives logits; returns its name."""
    name = head_name(model)
    features = _features(model)
    device = next(model.parameters()).device
    parent = model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], ValueHead(features).to(device))
    return name


def head_name(model: nn.Module) -> str:
    """The name of the layer that gives logits."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    name: str
    for name, module in model.named_modules():
        if name and (module is found or (found is None and name in ("head", "lm_head"))):
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
        if module is None:  # the word of `transformers` for all of the model
            for each in self.modules():
                init_weights(self, each)
            return
        with whole_weight(module):
            if isinstance(module, Part):
                module.reset_parameters()
            elif inherited is not None:
                inherited(self, module)
            if start is not None:
                start.fill(self, module)

    return init_weights


def _tensor_plan(original: type[nn.Module]) -> Callable[[nn.Module], dict[str, str]]:
    def tensor_plan(self: nn.Module) -> dict[str, str]:
        """How ranks share its layers, and with them what was added."""
        from plait.parallel import is_transformers_model, read_plan, transformers_words

        with _without_adapters(self):
            declared = getattr(original, "tensor_plan", None)
            if declared is not None:
                words = read_plan(self, declared(self), stage=True)
            elif is_transformers_model(self):
                words = transformers_words(self)
            else:
                raise ModelError(
                    f"nothing says how the ranks share the layers of a {original.__name__}: give it a method "
                    "`tensor_plan()`, or use layout.tp: 1"
                )
        words = {
            name: "replicate" if isinstance(self.get_submodule(name), ValueHead) else word
            for name, word in words.items()
        }
        return with_adapters(self, words)

    return tensor_plan


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as whoever wrote its plan knows it."""
    layers = [module for module in model.modules() if has_adapter(module)]
    taken = [(layer, {key: layer._modules.pop(key) for key in ("lora_A", "lora_B")}) for layer in layers]
    try:
        yield
    finally:
        for layer, children in taken:
            layer._modules.update(children)
