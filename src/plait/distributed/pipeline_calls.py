"""A model as a sequence of module calls, seen in one forward pass, and stages that run a submodule of this sequence.

[Note: stages by call order]
A model's forward pass is *calls* of modules with parameters (embeddings, layers, norms, heads) and *glue*: the Python
code between them, in modules that contain the lists of layers (masks, positions, scaling, residual sums, …).

Every stage runs the model's own forward pass, so all glue is the model's own code, which is called with the inputs of
the micro-batch and is cheap. Of the calls, a stage runs only its own. A call of an earlier stage returns what that
stage has sent, or, where nobody will read its output, NaN in the same shapes. After its last call a stage stops. So
nothing has to be known about the model but which outputs of calls before a cut are read after it. That is seen in one
forward pass at the time of planning, in which glue runs on a few small tensors of the CPU and calls run on the meta
device: every tensor of the glue is tracked to the outputs of calls that it was computed from.

Random numbers that glue draws and that several stages read are refused: each stage would draw others.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.distributed.fake import grouped_product
from plait.errors import ModelError
from plait.torch_internals import (
    TreeSpec,
    disable_current_modes,
    intercept_operations,
    schema_of,
    storage_key,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    version_of,
)
from plait.transformers_internals import pipeline_lists

ROWS, TOKENS = 2, 16
"""The size of the micro-batch with which the calls of a language model are seen."""

Value = tuple[int, int]
"""A tensor that a call returns: (index of the call, index among the leaves of its output)."""

_LOCAL_ONLY = -1
"""The leaf of a `Value` that is not an output of its call, but something that glue has only in the stage of that call:
random numbers, which every stage would draw anew, and buffers of modules that are calls."""


@dataclass(frozen=True, slots=True)
class _LikeArgument:
    """A tensor with the shape and dtype of an argument of the same call, given by its position or its name."""

    argument: int | str


@dataclass(frozen=True, slots=True)
class _AnyShape:
    """A tensor whose shape a later stage can only know from the stage that computes it."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module."""

    module: str
    """The module's name."""
    turn: int
    """How often the module was called before."""
    reads: frozenset[Value]
    """The outputs of earlier calls from which its arguments were computed."""
    structure: TreeSpec
    leaves: tuple[Any, ...]
    """The leaves of its output: `_LikeArgument` or `_AnyShape` for a tensor, else the value."""

    @property
    def key(self) -> tuple[str, int]:
        """Return the module's name and the number of its earlier calls."""
        return self.module, self.turn


@dataclass(frozen=True, slots=True)
class CallOrder:
    """The calls of a forward pass in order, and what is read across them."""

    calls: Sequence[ModuleCall]
    layers: Sequence[int]
    """The indices of the calls after which the sequence may be cut: those of layers."""
    result: frozenset[Value]
    """The outputs of calls from which the model's output was computed."""
    direct: frozenset[str]
    """Names of the parameters that glue reads itself; every stage has them."""
    modules: frozenset[str]
    """Names of the modules that count as calls, whether this forward pass called them or not."""
    changes_inputs: bool
    """Whether glue writes into the inputs, so that each stage needs a copy of them."""

    def crossing(self, last: int) -> tuple[Value, ...]:
        """Return the outputs of the calls up to `last` that are read after it; `ModelError` if they cannot be sent."""
        later = [call.reads for call in self.calls[last + 1 :]]
        values = sorted(value for value in frozenset().union(self.result, *later) if value[0] <= last)
        for call, leaf in values:
            if leaf == _LOCAL_ONLY:
                raise ModelError(
                    f"random numbers, or a buffer of a layer, that are read outside of layers before "
                    f"{self.calls[call].module} are needed by several pipeline stages; "
                    "set the model's dropout to 0, or use tensor parallelism or sharding for it"
                )
        return tuple(values)


# ---- the modules of a model that count as calls


def _call_modules(model: nn.Module, opened: Sequence[str]) -> dict[str, nn.Module]:
    """Return the topmost modules with parameters (or dropout) that do not contain one of the `opened` lists."""
    containers = {""}
    for name in opened:
        containers.update(name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1))
    containers |= set(opened)
    matched: dict[str, nn.Module] = {}
    seen: set[int] = set()  # a module that has several names counts under the first

    def collect(module: nn.Module, prefix: str) -> None:
        for key, child in module._modules.items():
            name = f"{prefix}{key}"
            if child is None or id(child) in seen:
                continue
            if name in containers or isinstance(child, nn.ModuleList | nn.ModuleDict):
                collect(child, f"{name}.")
            elif any(True for _ in child.parameters()) or _drops(child):
                matched[name] = child
                seen.add(id(child))

    collect(model, "")
    return matched


def _drops(module: nn.Module) -> bool:
    """Whether a module returns random numbers, which a later stage cannot compute again."""
    return any(getattr(submodule, "p", 0) for submodule in module.modules() if "Dropout" in type(submodule).__name__)


def _outermost_lists(model: nn.Module) -> list[str]:
    """Return the names of the module lists that are not inside of an entry of another one, and have parameters."""
    matched: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in matched)
        if isinstance(module, nn.ModuleList) and not inside and any(True for _ in module.parameters()):
            matched.append(name)
    return matched


def _layer_calls(calls: Sequence[ModuleCall], lists: Sequence[str], *, declared: bool) -> list[int]:
    """Return the indices of the calls of layers.

    Those are the calls of the entries of a list that are called one after the other, each with the output of the one
    before. Lists of which transformers declares that (`declared`) are not checked.
    """
    layers: list[int] = []
    for name in lists:
        indices = [index for index, call in enumerate(calls) if call.module.rpartition(".")[0] == name]
        chained = all(any(value[0] == before for value in calls[after].reads) for before, after in pairwise(indices))
        if declared or chained:
            layers += indices
    return sorted(layers)


# ---- seeing the calls


def see_calls(model: nn.Module, example: Mapping[str, Any] | None = None) -> CallOrder:
    """Return the calls of a model's forward pass; `ModelError` for a model that does not allow to see or cut them.

    The model may be on the meta device; it is not changed. `example` are keyword arguments of its forward pass; by
    default a few tokens (or a picture, or sound), as the model's config describes them.
    """
    lists = pipeline_lists(model)
    opened = lists or _outermost_lists(model)
    if not opened:
        raise ModelError(
            f"{type(model).__name__} has no nn.ModuleList of layers, so it cannot be split into pipeline stages"
        )
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        failure: Exception | None = None
        for inputs in [example] if example is not None else _made_inputs(model):
            watch = _Watch(model, opened)
            try:
                return watch.run(inputs, lists or opened, declared=bool(lists))
            except ModelError:
                raise
            except Exception as error:
                failure = failure or error
        raise ModelError(
            f"{type(model).__name__} cannot be split into pipeline stages: the order of its layers is seen in a "
            f"forward pass without values, which raised {type(failure).__name__}: {str(failure)[:300]}"
        ) from failure


class _Watch:
    """One forward pass of a copy of a model, in which glue has small tensors and calls have tensors without values."""

    def __init__(self, model: nn.Module, opened: Sequence[str]) -> None:
        self._name = type(model).__name__
        self._opened = opened
        self._given_model = model
        self._model = self._copy()
        self._modules = _call_modules(self._model, opened)
        self._calls: list[ModuleCall] = []
        self._turns: Counter[str] = Counter()
        self._in_call = False
        self._sources: dict[int, frozenset[Value]] = {}
        self._kept: list[Any] = []
        self._shapes: list[KnownShape] = []
        self._direct: set[str] = set()
        self._stand_ins: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            _set_call(module, self._caller(name))

    def _copy(self) -> nn.Module:
        """Return a copy of the model without values, but in buffers of modules that are not calls.

        These are allocated, as are plain attributes that are tensors.
        """
        model = self._given_model
        tensors = {id(tensor): _on_meta(tensor) for tensor in (*model.parameters(), *model.buffers())}
        buffers = {id(tensors[id(buffer)]): buffer for buffer in model.buffers()}
        copied = copy.deepcopy(model, tensors)
        inside = {
            id(submodule) for module in _call_modules(copied, self._opened).values() for submodule in module.modules()
        }
        for module in copied.modules():
            if id(module) in inside:
                continue
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = self._with_values(buffers.get(id(buffer), buffer))
            for key, value in vars(module).items():
                if isinstance(value, Tensor):
                    vars(module)[key] = self._with_values(value)
        self._param_names = {storage_key(param): name for name, param in copied.named_parameters()}
        self._buffers = {storage_key(buffer) for buffer in copied.buffers()}
        return copied

    @staticmethod
    def _with_values(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and not tensor.is_meta:
            return tensor.detach().cpu()
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def run(self, inputs: Mapping[str, Any], lists: Sequence[str], *, declared: bool) -> CallOrder:
        given = tree_map(lambda leaf: leaf.detach().clone().cpu() if isinstance(leaf, Tensor) else leaf, dict(inputs))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        before = [version_of(tensor) for tensor in tensors]
        with intercept_operations(self._operate):
            output = self._model(**without_cache(self._model, given))
        result = self._sources_of(output)
        layers = _layer_calls(self._calls, lists, declared=declared)
        if not layers:
            raise ModelError(
                f"{self._name} has no list of layers that are called one after the other, each with the output of the "
                f"one before ({', '.join(lists)}), so it cannot be split into pipeline stages"
            )
        order = CallOrder(
            tuple(self._calls),
            tuple(layers),
            result,
            frozenset(self._direct),
            frozenset(self._modules),
            changes_inputs=before != [version_of(tensor) for tensor in tensors],
        )
        self._rehearse(order, given)
        return order

    def _rehearse(self, order: CallOrder, given: Mapping[str, Any]) -> None:
        """Run the glue with all calls left to other stages; `ModelError` if it needs more of a module than its output.

        On a new copy, for the first forward pass may change a model.
        """
        model = self._copy()
        stage = StageCalls(model, order, len(order.calls), None, keeps=set())
        try:
            with intercept_operations(self._operate):
                stage(model, given, {"values": (), "shapes": KnownShapes(tuple(self._shapes))})
        except Exception as error:
            raise ModelError(
                f"{self._name} cannot be split into pipeline stages: outside of its layers it needs more of them than "
                f"their outputs: {type(error).__name__}: {str(error)[:300]}"
            ) from error

    # ---- glue

    def _operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_call:
            return _without_values(func, args, kwargs)
        sources = self._sources_of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            sources |= {(len(self._calls), _LOCAL_ONLY)}
        if any(leaf.is_meta for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            if any(
                storage_key(leaf) in self._buffers for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            ):
                sources |= {(len(self._calls), _LOCAL_ONLY)}
            args, kwargs = tree_map(self._stand_in, (args, kwargs))
        output = func(*args, **kwargs)
        if sources:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self._note(leaf, sources)
        return output

    def _stand_in(self, leaf: Any) -> Any:
        """Return values for a parameter that glue reads, and note it."""
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        key = storage_key(leaf)
        if key in self._buffers:
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        name = self._param_names.get(key)
        if name is None:
            last = self._calls[-1].module if self._calls else "its first layer"
            raise ModelError(
                f"{self._name} reads a tensor from inside of its layers that they do not return (after {last}), as "
                "some do for the loss of their routers; a pipeline stage would have that of its own layers only: use "
                "tensor parallelism or sharding for it"
            )
        self._direct.add(name)
        if name not in self._stand_ins:
            self._stand_ins[name] = torch.zeros(leaf.shape, dtype=leaf.dtype)
        return self._stand_ins[name]

    def _note(self, tensor: Tensor, sources: frozenset[Value]) -> None:
        key = storage_key(tensor)
        self._sources[key] = self._sources.get(key, frozenset()) | sources
        self._kept.append(tensor)  # a storage that is freed could give its key to another one

    def _sources_of(self, tree: Any) -> frozenset[Value]:
        matched = [
            self._sources.get(storage_key(leaf), frozenset()) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)
        ]
        return frozenset().union(*matched)

    # ---- calls

    def _caller(self, name: str) -> Callable[..., Any]:
        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._in_call:
                return real(*args, **kwargs)
            if (function := _enclosing_function()) is not None:
                raise ModelError(
                    f"{name} is called in the autograd function {function}, whose backward pass needs all layers, so "
                    f"{self._name} cannot be split into pipeline stages; use tensor parallelism or sharding for it"
                )
            turn, self._turns[name] = self._turns[name], self._turns[name] + 1
            reads = self._sources_of((args, kwargs, [dict(shared) for shared in _containers(args, kwargs).values()]))
            self._in_call = True
            try:
                output = self._shapes_of(name, real, args, kwargs)
            finally:
                self._in_call = False
            leaves, structure = tree_flatten(output)
            described = tuple(_describe(leaf, args, kwargs) for leaf in leaves)
            index = len(self._calls)
            self._calls.append(ModuleCall(name, turn, reads, structure, described))
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    self._shapes.append((name, turn, position, tuple(leaf.shape), leaf.dtype))
                    leaves[position] = torch.zeros(leaf.shape, dtype=leaf.dtype)
                    self._note(leaves[position], frozenset({(index, position)}))
            output, written = tree_unflatten(leaves, structure)
            _write(args, kwargs, written)
            return output

        return call

    def _shapes_of(self, name: str, real: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a call, and what it writes into its arguments, on the meta device if it allows that.

        A call that needs values (`tolist`, some choices of experts) gets an allocated copy of the module, with zeros.
        """
        try:
            return _output_and_written(real, *_copied(args, kwargs, _on_meta))
        except Exception:
            module = copy.deepcopy(self._modules[name]).to_empty(device="cpu")
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()
            return _output_and_written(module, *_copied(args, kwargs, lambda leaf: leaf))


def _enclosing_function() -> str | None:
    """Return the name of the `torch.autograd.Function` in whose forward pass the caller runs; None if in none."""
    frame = inspect.currentframe()
    while frame is not None:
        for value in list(frame.f_locals.values())[:2]:
            if isinstance(value, torch.autograd.function.FunctionCtx):
                return type(value).__name__.removesuffix("Backward")
        frame = frame.f_back
    return None


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the meta device; also those that need values, such as the choice of experts."""
    name = schema_of(func).name
    if name == "aten::_grouped_mm":
        return grouped_product(*args, **kwargs)
    if name == "aten::_local_scalar_dense" and args[0].is_meta:
        return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
    if name == "aten::nonzero" and args[0].is_meta:
        return args[0].new_empty(0, args[0].ndim, dtype=torch.int64)
    return func(*args, **kwargs)


def _on_meta(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


# Some layers share tensors through a mapping that each of them is given (keys and values of attention, in Gemma 3n).
# What a call writes into such an argument counts as output.


def _containers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, MutableMapping[Any, Any]]:
    """Return the mappings among the arguments of a call."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {argument: value for argument, value in named if isinstance(value, MutableMapping)}


def _copied(
    args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with changed leaves, mappings among them as copies."""

    def copied(value: Any) -> Any:
        if not isinstance(value, MutableMapping):
            return tree_map(change, value)
        result = copy.copy(value)
        result.update(tree_map(change, dict(value)))
        return result

    return [copied(value) for value in args], {key: copied(value) for key, value in kwargs.items()}


def _output_and_written(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the output of a call, and what it writes into its arguments."""
    before = _contents(args, kwargs)
    output = call(*args, **kwargs)
    return output, _written(args, kwargs, before)


def _contents(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, dict[Any, int]]:
    containers = _containers(args, kwargs)
    return {argument: {key: id(entry) for key, entry in value.items()} for argument, value in containers.items()}


def _written(
    args: Sequence[Any], kwargs: Mapping[str, Any], before: Mapping[int | str, Mapping[Any, int]]
) -> dict[int | str, dict[Any, Any]]:
    """Return the entries of mappings among the arguments that are not those of `before`."""
    changed = {
        argument: {key: entry for key, entry in value.items() if before[argument].get(key) != id(entry)}
        for argument, value in _containers(args, kwargs).items()
    }
    return {argument: entries for argument, entries in changed.items() if entries}


def _write(args: Sequence[Any], kwargs: Mapping[str, Any], written: Mapping[int | str, Mapping[Any, Any]]) -> None:
    containers = _containers(args, kwargs)
    for argument, entries in written.items():
        containers[argument].update(entries)


def _describe(leaf: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for argument, given in named:
        if isinstance(given, Tensor) and given.shape == leaf.shape and given.dtype == leaf.dtype:
            return _LikeArgument(argument)
    return _AnyShape()


def without_cache(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of a model's forward pass, with `use_cache=False` for a model that has a cache."""
    accepts = getattr(model, "accepts", None) or inspect.signature(type(model).forward).parameters
    return {"use_cache": False, **keywords} if "use_cache" in accepts else dict(keywords)


def _made_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield micro-batches that the model's config describes; which of them the model takes is seen by trying."""
    hf = cast(Any, model)
    config = hf.config
    tokens = torch.arange(1, TOKENS + 1).expand(ROWS, TOKENS).contiguous()
    text = {"input_ids": tokens % max(2, getattr(config.get_text_config(), "vocab_size", None) or 2)}
    labels = {"labels": text["input_ids"]} if "labels" in inspect.signature(type(model).forward).parameters else {}
    decoder = getattr(config, "is_encoder_decoder", False)
    decoded = {"decoder_input_ids": text["input_ids"]} if decoder else {}
    main = getattr(hf, "main_input_name", "input_ids")
    pixels = _pixels(config)
    if main == "input_features":
        frames = 2 * config.max_source_positions if hasattr(config, "max_source_positions") else 200
        features = torch.zeros(ROWS, getattr(config, "num_mel_bins", 80), frames)
        yield {"input_features": features, **(labels or decoded)}
        yield {"input_features": features, **decoded}
    elif main == "input_values":
        yield {"input_values": torch.zeros(ROWS, 16000)}
    elif main == "pixel_values" and pixels is not None:
        yield {"pixel_values": pixels}
    else:
        yield {**text, **(labels or decoded)}
        yield {**text, **decoded}
        if pixels is not None:
            yield {**text, "pixel_values": pixels}


def _pixels(config: Any) -> Tensor | None:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    return torch.zeros(ROWS, getattr(vision, "num_channels", 3), height, width)


# ---- a module whose calls are taken over: its class is replaced by a subclass, so that names and hooks stay


def _set_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call(real, *args, **kwargs)` take over the calls of a module, `real` being the module's own call."""
    original = type(module)

    def take_over(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(lambda *a, **k: original.__call__(self, *a, **k), *args, **kwargs)

    members = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__call__": take_over}
    module.__class__ = type(original.__name__, (original,), members)


class _OfOtherStage(nn.Module):
    """Replaces a module that another stage runs; it has no parameters.

    Glue may read the plain attributes of the module that it replaces, and shapes, dtypes and devices of its weights,
    whose values are NaN.
    """

    def __init__(self, replaced: nn.Module, stage: StageCalls) -> None:
        super().__init__()
        skipped = (*vars(self), "forward")
        attributes = {key: value for key, value in vars(replaced).items() if key not in skipped}
        vars(self).update(attributes)
        self.training = replaced.training
        self._replaced = type(replaced)
        self._stage = stage
        self._weights = {
            key: (tensor.shape, tensor.dtype)
            for key, tensor in (*replaced._parameters.items(), *replaced._buffers.items())
            if tensor is not None
        }
        self._inside = {
            key: child if child is None else _OfOtherStage(child, stage) for key, child in replaced._modules.items()
        }

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self)
        if name in attributes.get("_inside", ()):
            return attributes["_inside"][name]
        if name in attributes.get("_weights", ()):
            shape, dtype = attributes["_weights"][name]
            stage: StageCalls = attributes["_stage"]
            value, dtype = (torch.nan, stage.dtype) if dtype.is_floating_point else (0, dtype)
            return torch.full((), value, dtype=dtype, device=stage.device).expand(shape)
        constant = inspect.getattr_static(attributes.get("_replaced", object), name, None)
        if isinstance(constant, property) and name in ("dtype", "device"):
            return getattr(attributes["_stage"], name)
        if isinstance(constant, str | int | float | tuple):
            return constant
        return super().__getattr__(name)


def _without_params(module: nn.Module, stage: StageCalls) -> None:
    """Give a model inside of the model, all of whose layers other stages have, the dtype and device of the stage."""
    original = type(module)
    members: dict[str, Any] = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    members["dtype"] = property(lambda _: stage.dtype)
    members["device"] = property(lambda _: stage.device)
    module.__class__ = type(original.__name__, (original,), members)


# ---- a stage


class _Done(BaseException):
    """Raised after the last call of a stage, and caught by its root module: it ends the forward pass, and no error.

    So the root module returns what is sent to the next stage, and FSDP registers its hooks on these tensors.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


KnownShape = tuple[str, int, int, tuple[int, ...], torch.dtype]
"""(module, turn, leaf, shape, dtype) of a tensor that a call returns."""


@dataclass(frozen=True, slots=True)
class KnownShapes:
    """The shapes and dtypes of outputs of calls that a later stage cannot know otherwise."""

    of: tuple[KnownShape, ...] = ()


@dataclass(slots=True)
class _StageForward:
    """The state of one forward pass of a stage."""

    arrived: Mapping[Value, Tensor | None]
    shapes: dict[tuple[str, int, int], tuple[tuple[int, ...], torch.dtype]]
    device: torch.device
    dtype: torch.dtype
    turns: Counter[str] = field(default_factory=Counter)
    seen: dict[Value, Tensor] = field(default_factory=dict)
    done: bool = False
    unread: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)

    def no_value(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor for an output that nobody reads: NaN, so that whoever reads it makes no secret of it."""
        if (shape, dtype) not in self.unread:
            value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
            self.unread[shape, dtype] = torch.full(shape, value, dtype=dtype, device=self.device)
        return self.unread[shape, dtype]


class StageCalls:
    """Runs the calls `first` to `last` of a model; `last` is None for the last stage. See [Note: stages by call order].

    `module` is changed in place: it keeps its own modules, and the parameters that it shares with those of others.
    """

    def __init__(self, module: nn.Module, order: CallOrder, first: int, last: int | None, *, keeps: set[str]) -> None:
        self._order = order
        self._index = {call.key: index for index, call in enumerate(order.calls)}
        self._first, self._last = first, last
        self._arrives = order.crossing(first - 1) if 0 < first < len(order.calls) else ()
        self._leaves = () if last is None else order.crossing(last)
        self._running: _StageForward | None = None
        self._model_name = type(module).__name__
        self._strip(module, keeps)
        if last is not None:
            _stop_at_done(module)

    def _strip(self, module: nn.Module, keeps: set[str]) -> None:
        """Remove the modules that the stage does not run, except parameters that modules which it keeps share."""
        earlier = {call.module for call in self._order.calls[: self._first]}
        shared = {id(param) for name in keeps for param in module.get_submodule(name).parameters()}
        shared |= {id(module.get_parameter(name)) for name in self._order.direct}
        first_names = dict(module.named_parameters())
        parents = list(module.modules())
        for name, submodule in [(name, module.get_submodule(name)) for name in self._order.modules]:
            used = submodule
            if name not in keeps:
                # A parameter that several modules share keeps the first of its names.
                held = {id(param) for key, param in first_names.items() if key.startswith(f"{name}.")} & shared
                if held:
                    _keep_only_params(submodule, held)
                else:
                    used = _OfOtherStage(submodule, self)
                    for parent in parents:  # it may have several
                        parent._modules.update(
                            {key: used for key, child in parent._modules.items() if child is submodule}
                        )
            if name not in keeps or name in earlier or self._last is not None:
                _set_call(used, self._caller(name))

        for submodule in parents:
            answers = isinstance(getattr(type(submodule), "dtype", None), property) and not isinstance(
                submodule, _OfOtherStage
            )
            if answers and not any(param.is_floating_point() for param in submodule.parameters()):
                _without_params(submodule, self)

    @property
    def device(self) -> torch.device:
        """The device of the micro-batch that is run."""
        return torch.device("cpu") if self._running is None else self._running.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stage's parameters."""
        return torch.get_default_dtype() if self._running is None else self._running.dtype

    def _caller(self, name: str) -> Callable[..., Any]:
        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is None:
                return real(*args, **kwargs)
            turn, running.turns[name] = running.turns[name], running.turns[name] + 1
            index = self._index.get((name, turn))
            if index is None:
                raise ModelError(
                    f"{name} was called for this micro-batch, but not in the forward pass from which the pipeline "
                    f"stages of {self._model_name} were planned; pass an example with the same fields"
                )
            if index < self._first:
                return self._answer(running, index, args, kwargs)
            output, written = _output_and_written(real, args, kwargs)
            if self._last is not None:
                self._note(running, index, (output, written))
                if index == self._last:
                    running.done = True
                    raise _Done(self._leaving(running))
            return output

        return call

    def _answer(self, running: _StageForward, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of an earlier stage's call: what has arrived, and NaN for what nobody will read."""
        call = self._order.calls[index]
        leaves = list(call.leaves)
        for position, leaf in enumerate(leaves):
            arrived = running.arrived.get((index, position))
            if arrived is not None:
                leaves[position] = arrived
            elif isinstance(leaf, _LikeArgument):
                like = args[leaf.argument] if isinstance(leaf.argument, int) else kwargs[leaf.argument]
                leaves[position] = running.no_value(tuple(like.shape), like.dtype)
            elif isinstance(leaf, _AnyShape):
                known = running.shapes.get((*call.key, position))
                if known is None:
                    raise ModelError(
                        f"{call.module} was not called in an earlier pipeline stage of {self._model_name}, and was "
                        "called in a later one"
                    )
                leaves[position] = running.no_value(*known)
        output, written = tree_unflatten(leaves, call.structure)
        _write(args, kwargs, written)
        return output

    def _note(self, running: _StageForward, index: int, output: Any) -> None:
        call = self._order.calls[index]
        leaves, structure = tree_flatten(output)
        kinds = [isinstance(leaf, (_LikeArgument, _AnyShape)) for leaf in call.leaves]
        if structure != call.structure or kinds != [isinstance(leaf, Tensor) for leaf in leaves]:
            raise ModelError(
                f"{call.module} returned another structure than in the forward pass from which the pipeline stages of "
                f"{self._model_name} were planned"
            )
        for position, (leaf, described) in enumerate(zip(leaves, call.leaves, strict=True)):
            if isinstance(leaf, Tensor):
                running.seen[index, position] = leaf
                if isinstance(described, _AnyShape):
                    running.shapes[(*call.key, position)] = (tuple(leaf.shape), leaf.dtype)

    def _leaving(self, running: _StageForward) -> dict[str, Any]:
        values = []
        for value in self._leaves:
            passed_on = running.arrived.get(value)
            values.append(running.seen.get(value) if passed_on is None else passed_on.view_as(passed_on))
        known = ((*key, *described) for key, described in running.shapes.items())
        return {"values": tuple(values), "shapes": KnownShapes(tuple(known))}

    def __call__(self, module: nn.Module, inputs: Mapping[str, Any], received: Any) -> Any:
        """Run the stage on a micro-batch and what the stage before has sent; return what the next stage needs."""
        values, known = ((), KnownShapes()) if received is None else (received["values"], received["shapes"])
        arrived = dict(zip(self._arrives, values, strict=True))
        device = next(value.device for value in (*values, *tree_leaves(inputs)) if isinstance(value, Tensor))
        dtypes = (param.dtype for param in module.parameters() if param.is_floating_point())
        dtype = next(dtypes, torch.get_default_dtype())
        shapes = {(name, turn, leaf): (shape, dtype) for name, turn, leaf, shape, dtype in known.of}
        self._running = running = _StageForward(arrived, shapes, device, dtype)
        if self._order.changes_inputs:
            inputs = tree_map_only(Tensor, torch.clone, dict(inputs))
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # a model may have changed it when the stage stops
                output = module(**without_cache(module, inputs))
        finally:
            self._running = None
        if self._last is None:
            return output
        if not running.done:
            raise ModelError(
                f"{self._order.calls[self._last].module} was not called for this micro-batch, but was in the forward "
                f"pass from which the pipeline stages of {self._model_name} were planned"
            )
        return output


def _keep_only_params(module: nn.Module, ids: set[int]) -> None:
    """Remove the parameters of a module whose ids are not among `ids`, and the modules without any left.

    The others keep their buffers: the initialization of a module may write to them.
    """
    for submodule in list(module.modules()):
        for key, child in list(submodule._modules.items()):
            if child is not None and not any(id(param) in ids for param in child.parameters()):
                del submodule._modules[key]
        submodule._parameters.update(
            {k: None for k, p in submodule._parameters.items() if p is not None and id(p) not in ids}
        )


def _stop_at_done(module: nn.Module) -> None:
    original = type(module)
    forward = original.forward

    @wraps(forward)
    def stop(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(self, *args, **kwargs)
        except _Done as done:
            return done.output

    members = {"__module__": original.__module__, "__qualname__": original.__qualname__, "forward": stop}
    module.__class__ = type(original.__name__, (original,), members)
