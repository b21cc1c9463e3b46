"""How a `transformers` causal language model is taken apart, its code unedited.

A later stage is called with `inputs_embeds`, so that no token is looked up; whatever else its forward does to
embeddings before the first layer is replaced by something that leaves them as they are. In an earlier stage,
what comes after the layers is replaced in the same way. Nothing of `transformers` is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.fake_tensors import on_fake_tensors
from plait.parallel.pipeline.outline import Call, Extent, Outline, as_keywords, keep_only, parameters_in
from plait.torch_internals import compiled_call_set

_OF_THE_FIRST = ("input_ids", "token_type_ids")
"""Inputs that are looked up in an embedding."""


def outline_transformers(model: nn.Module) -> Outline:
    """The layers of a `transformers` causal language model."""
    return _Transformers(model)


class _Transformers(Outline):
    """See the top of this module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        name = type(model).__name__
        config: Any = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{name} has an encoder and a decoder; a pipeline takes a causal language model")
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                f"{name} with output_router_logits: the balance loss of transformers is made at the end from all "
                "layers, of which a pipeline's last stage has only its own; set output_router_logits: false"
            )
        lists = [(key, found) for key, found in model.named_modules() if isinstance(found, nn.ModuleList)]
        if not lists:
            raise ModelError(f"{name} has no list of layers, so a pipeline cannot share them out")
        self._list, blocks = max(lists, key=lambda entry: len(entry[1]))
        self._holder, _, key = self._list.rpartition(".")
        self._keys = list(blocks._modules)
        self.layers = [f"{self._list}.{block}" for block in self._keys]

        hf: Any = model
        self._embedding = _name_of(model, hf.get_input_embeddings())
        head = hf.get_output_embeddings()
        self._head = None if head is None else _name_of(model, head)
        self._tied = head is not None and getattr(head, "weight", None) is hf.get_input_embeddings().weight
        beside = list(model.get_submodule(self._holder)._modules)
        at = beside.index(key)
        self._before = [self._join(child) for child in beside[:at]]
        self._after = [self._join(child) for child in beside[at + 1 :] if self._has_parameters(child)]
        if not self._after:
            raise ModelError(f"{name} has nothing between its layers and its head, so its stages have no end")
        outside = (child for child in model._modules if child != self._holder.split(".")[0])
        self._outside = [child for child in outside if model._modules[child] is not None]

    def _join(self, child: str) -> str:
        return f"{self._holder}.{child}" if self._holder else child

    def _has_parameters(self, child: str) -> bool:
        return any(True for _ in self._model.get_submodule(self._join(child)).parameters())

    def costs(self) -> list[float]:
        model = self._model
        costs = [parameters_in([model.get_submodule(name)]) for name in self.layers]
        costs[0] += parameters_in(model.get_submodule(name) for name in self._before)
        costs[-1] += parameters_in(model.get_submodule(name) for name in (*self._after, *self._outside))
        return costs

    def whole(self) -> nn.Module:
        return self._model

    def take(self, module: nn.Module, extent: Extent) -> Call:
        keep_only(module.get_submodule(self._list), self._keys[extent.first : extent.end])
        self._cut_layer_types(module, extent)
        if not extent.starts:
            for name in self._before:
                if name == self._embedding:
                    if not (extent.ends and self._tied):
                        _replace(module, name, _Elsewhere(name))
                    continue
                found = module.get_submodule(name)
                if isinstance(found, nn.Embedding):
                    _replace(module, name, _Zero())
                elif isinstance(found, nn.Dropout) or any(True for _ in found.parameters()):
                    _replace(module, name, _Same())
        if extent.ends:
            return _Later(self.layers[extent.first]) if not extent.starts else _last_and_only
        way_out = _WayOut()
        for name in (*self._after, *self._outside):
            _replace(module, name, _Same())
        _replace(module, self._after[0], way_out)
        if self._head is not None:
            _replace(module, self._head, _Again(way_out))
        return _Earlier(way_out) if extent.starts else _Later(self.layers[extent.first], way_out)

    def _cut_layer_types(self, module: nn.Module, extent: Extent) -> None:
        """Some models look the kind of a layer up by its place in the list."""
        holder: Any = module.get_submodule(self._holder)
        kinds = getattr(holder.config, "layer_types", None)
        if kinds is not None and len(set(kinds)) > 1:
            holder.config = copy.copy(holder.config)
            holder.config.layer_types = list(kinds)[extent.first : extent.end]

    def shared(self, extents: Sequence[Extent]) -> Mapping[str, tuple[int, ...]]:
        if not self._tied or len(extents) == 1:
            return {}
        return {f"{self._embedding}.weight": (0, len(extents) - 1)}


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    found: str = next(name for name, module in model.named_modules() if module is wanted)
    return found


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


class _Elsewhere(nn.Module):
    """Stands for a module of another stage, which nothing should call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._called = name

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ModelError(f"{self._called} is in the first pipeline stage, and was called in another")


class _Zero(nn.Module):
    """Stands for an embedding that was added in the first stage already."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.zeros(())


class _Same(nn.Module):
    """Answers with what it is called with."""

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return x


class _WayOut(_Same):
    """Keeps what the last layer gave, whatever the model makes of it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        self._kept[:] = [x]
        return x

    def take(self) -> Any:
        """What was kept last, once."""
        return self._kept.pop()


class _Again(nn.Module):
    """Stands for the head: answers with what was kept.

    So that the model returns the very tensor that goes to the next stage, and hooks on what a model returns
    (those of sharded parameters) are hooks on it.
    """

    def __init__(self, way_out: _WayOut) -> None:
        super().__init__()
        self._kept = way_out._kept

    def forward(self, _x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self._kept[0]


def _last_and_only(module: nn.Module, inputs: Any, _handed: Any) -> Any:
    return module(**as_keywords(module, inputs))


class _Earlier:
    """Calls a stage without a head; the labels are for the last."""

    def __init__(self, way_out: _WayOut) -> None:
        self._way_out = way_out

    def __call__(self, module: nn.Module, inputs: Any, _handed: Any) -> Any:
        keywords = _without_cache(as_keywords(module, inputs), module)
        keywords.pop("labels", None)
        module(**keywords)
        return self._way_out.take()


class _Later:
    """Calls a stage that starts from hidden states; makes sure once that they reach its first layer unchanged."""

    def __init__(self, first_layer: str, way_out: _WayOut | None = None) -> None:
        self._first_layer = first_layer
        self._way_out = way_out
        self._checked = False

    def __call__(self, module: nn.Module, inputs: Any, handed: Any) -> Any:
        keywords = _without_cache(as_keywords(module, inputs), module)
        for name in (*_OF_THE_FIRST, *(("labels",) if self._way_out is not None else ())):
            keywords.pop(name, None)
        if self._checked:
            output = module(inputs_embeds=handed, **keywords)
        else:
            with self._watched(module, handed):
                output = module(inputs_embeds=handed, **keywords)
        return output if self._way_out is None else self._way_out.take()

    @contextmanager
    def _watched(self, module: nn.Module, handed: Tensor) -> Iterator[None]:
        """Around the first call, in which the first layer is not run compiled: the compiler has no use for this."""
        layer = module.get_submodule(self._first_layer)

        def look(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arrived = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(arrived, Tensor) or not _equal(arrived.detach(), handed.detach()):
                raise ModelError(
                    f"{type(module).__name__} changes the embeddings that it is given before its first layer "
                    "(it scales them, perhaps), so its stages cannot hand hidden states to each other; "
                    "use tensor parallelism or sharding for it"
                )

        with compiled_call_set(layer, None):
            watch = layer.register_forward_pre_hook(look, prepend=True, with_kwargs=True)
            try:
                yield
            finally:
                watch.remove()
        self._checked = True


@on_fake_tensors(lambda arrived, handed: arrived.shape == handed.shape)
def _equal(arrived: Tensor, handed: Tensor) -> bool:
    return torch.equal(arrived, handed)


def _without_cache(keywords: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    config = cast(Any, module.config)
    return {"use_cache": False, **keywords} if hasattr(config, "use_cache") else keywords
