"""`deepspeed.pipe`: a model as a sequence of layers, split into stages by `strategy.layout.pp`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ConfigError, ModelError, Problem

__all__ = ["LayerSpec", "PipeDataParallelTopology", "PipelineModule", "TiedLayerSpec"]


class LayerSpec:
    """The class and arguments of a layer that is built later."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ModelError(f"LayerSpec takes a class of modules, not {typename!r}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Return the layer, built from its class and arguments."""
        if log:
            print(f"building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.typename.__name__})"


class TiedLayerSpec(LayerSpec):
    """A layer that uses the same module as the first layer with its `key`; it is called as `forward_fn(module, x)`."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = tied_weight_attr


@dataclass(frozen=True, slots=True)
class PipeDataParallelTopology:
    """The number of pipeline stages, and the number of pipelines, which train on different samples."""

    num_pp: int
    num_dp: int

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis."""
        return {"pipe": self.num_pp, "data": self.num_dp}.get(axis, 1)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.num_pp * self.num_dp


class _FunctionLayer(nn.Module):
    """A layer that calls a function, without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        """Return the function's result."""
        return self._function(x)


class PipelineModule(nn.Module):
    """Layers one after another: a list of modules, `LayerSpec`s and functions, or an `nn.Sequential`.

    Every rank builds all layers in order, so that initial weights equal those of one process; `initialize` then keeps
    the layers of this rank's stage. One tied layer is supported, such as an embedding that is also the head: it is the
    first layer and the last. See `distributed/pipeline_split.py` [Note: a seam in forward].
    """

    def __init__(
        self,
        layers: nn.Sequential | Iterable[Any],
        num_stages: int | None = None,
        topology: PipeDataParallelTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise ConfigError(Problem("num_stages", "is absent, and so is `topology`", "Write num_stages=2."))
        if activation_checkpoint_func is not None:
            message = "is not offered: layers are recomputed by `strategy.recompute`"
            raise ConfigError(Problem("activation_checkpoint_func", message, "Leave it out."))
        if topology is not None and topology.get_dim("model") > 1:
            raise ConfigError(Problem("topology", "has an axis `model`", "Use `tensor_parallel` of the configuration."))
        self.num_stages = int(num_stages if num_stages is not None else topology.get_dim("pipe"))  # type: ignore[union-attr]
        if isinstance(loss_fn, nn.Module) and any(param.requires_grad for param in loss_fn.parameters()):
            message = f"{type(loss_fn).__name__} has parameters, which no stage would train"
            raise ConfigError(Problem("loss_fn", message, "Make the trained part a layer."))
        # In a list, so that a module (`nn.CrossEntropyLoss()`) is not registered as a layer: every stage keeps it.
        self._loss_fn = [loss_fn]
        self._interval = activation_checkpoint_interval
        self._recomputed = tuple(checkpointable_layers or ())
        specs = list(layers)
        end = _tied_end(specs)
        built = [
            _build(spec, base_seed + index if seed_layers else None, seed_fn)
            for index, spec in enumerate(specs)
            if index != end
        ]
        self.config = SimpleNamespace(tie_embeddings=False)
        """Plait's pipeline reads it: whether the module after the layers shares weights with the one before them."""
        self._first_use = self._last_use = None
        if end is not None:
            self.first = built.pop(0)
            self._first_use, self._last_use = specs[0].forward_fn, specs[end].forward_fn
            self.config.tie_embeddings = True
        middle = len(built) if end is None else end - 1
        self.layers = nn.ModuleList(built[:middle])
        if end is not None:
            self.last = nn.Sequential(*built[middle:])
        self._split = _split(partition_method, self.layers, self.num_stages)

    def forward(self, inputs: Any, labels: Any = None, hidden: Any = None) -> Any:
        """Return the output of this stage's layers; `hidden` is the output of the stage before, None on the first."""
        tied, x = self.config.tie_embeddings, hidden
        if hidden is None:
            x = _use(self._first_use, self.first, inputs) if tied else inputs
        for layer in self.layers:
            x = layer(x)
        if tied and self.last is not None:
            x = self.last(_use(self._last_use, self.first, x))
        return x

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any] | None:
        """The function of the last layer's output and the labels that returns the loss."""
        return self._loss_fn[0]

    def loss_of(self, outputs: Any, batch: Any) -> Any:
        """Return the loss of a micro-batch of (inputs, labels); without a `loss_fn`, the output of the last layer."""
        if self.loss_fn is None:
            return outputs
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ModelError("a pipeline with a loss_fn takes micro-batches of (inputs, labels)")
        if isinstance(self.loss_fn, nn.Module) and isinstance(outputs, Tensor):
            self.loss_fn.to(outputs.device)  # buffers of the loss, such as class weights
        return self.loss_fn(outputs, batch[1])

    def strategy(self, given: Any) -> dict[str, Any]:
        """Return the section `strategy`: `given`, with the settings of this pipeline added."""
        section: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        if self.num_stages > 1:
            section["layout"] = {**section.get("layout", {}), "pp": self.num_stages}
            section["pipeline"] = {**section.get("pipeline", {}), "split": self._split}
        if self._interval > 0:
            section["recompute"] = "full"
            chosen = {"classes": self._recomputed} if self._recomputed else {"names": ["layers.*"]}
            section["wrap"] = {**section.get("wrap", {}), **chosen}
        return section


def _build(spec: Any, seed: int | None, seed_fn: Callable[[int], Any] | None) -> nn.Module:
    if seed is not None:
        (seed_fn or torch.manual_seed)(seed)
    if isinstance(spec, LayerSpec):
        return spec.build()
    if isinstance(spec, nn.Module):
        return spec
    if callable(spec):
        return _FunctionLayer(spec)
    raise ModelError(f"a pipeline is made of modules, LayerSpecs and functions; found a {type(spec).__name__}")


def _tied_end(specs: Sequence[Any]) -> int | None:
    """Return the index of the second use of a tied layer; None if no layer is tied."""
    uses = [index for index, spec in enumerate(specs) if isinstance(spec, TiedLayerSpec)]
    if not uses:
        return None
    keys = {specs[index].key for index in uses}
    if len(keys) > 1 or len(uses) != 2 or uses[0] != 0:
        raise ModelError(
            f"the layers {', '.join(map(str, uses))} are tied, with the keys {', '.join(sorted(keys))}: one key can be "
            "tied, used by the first layer and once more after the others"
        )
    return uses[1]


def _use(function: Callable[[nn.Module, Any], Any] | None, module: nn.Module, x: Any) -> Any:
    return module(x) if function is None else function(module, x)


def _split(method: str, layers: nn.ModuleList, stages: int) -> str | list[str]:
    """Return `strategy.pipeline.split`: `parameters`, or the names of the first layers of all stages but stage 0."""
    method_name = method.lower()
    if method_name == "parameters" or stages == 1:
        return "parameters"
    if method_name == "uniform":
        weights = [1] * len(layers)
    elif method_name.startswith("type:"):
        pattern = re.compile(method[5:], re.IGNORECASE)
        weights = [int(bool(pattern.search(type(layer).__name__))) for layer in layers]
    else:
        remedy = "Write 'parameters', 'uniform' or 'type:<pattern of class names>'."
        raise ConfigError(Problem("partition_method", f"{method!r} is not known", remedy))
    if sum(weights) < stages:
        message = f"{method!r} matches {sum(weights)} layers, for {stages} stages"
        raise ConfigError(Problem("partition_method", message, "Use fewer stages, or 'parameters'."))
    return [f"layers.{index}" for index in _cuts(weights, stages)]


def _cuts(weights: Sequence[int], stages: int) -> list[int]:
    """Return the indices of the layers that begin a stage, so that all stages have about the same weight."""
    cuts: list[int] = []
    total, seen = sum(weights), 0
    for index, weight in enumerate(weights):
        if weight and len(cuts) < stages - 1 and seen >= (len(cuts) + 1) * total / stages and index > 0:
            cuts.append(index)
        seen += weight
    return cuts
