"""Build the module to train, on the meta device if possible, and find its initializer; cast and replace layers.

An initializer is the function that sets the initial values of a model after its parameters were allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.config import CUSTOM_MODELS, HFConfig, RunConfig, read_json_object
from plait.distributed import (
    Channel,
    ConstructionRecord,
    Initializer,
    WrapUnit,
    compile,
    find_initializer,
    is_sharded,
    local_region,
    local_shard_of,
    materialize,
    peak_host_memory,
    seed_everything,
    why_not_on_meta,
)
from plait.engine.forward import LogFunction
from plait.engine.preparation import ModelSource, Preparation
from plait.errors import ConfigError, ModelError, Problem
from plait.kernels import has_kernels
from plait.models import Reading, build_model
from plait.monitor import MessageEvent, format_bytes
from plait.plugins import build, call, load
from plait.precision import FP32_MODULES, Fp8Linear


def build_module(
    config: RunConfig, model: ModelSource, *, log: LogFunction = lambda _text: None
) -> tuple[nn.Module, Initializer | None]:
    """Return the module and its initializer; the initializer is None if the module has values already.

    Raises `ModelError` for parameters that cannot be trained.
    """
    module, initializer = _build(config, model, log)
    _check_parameters(module, log)
    return module, initializer


def _build(config: RunConfig, model: ModelSource, log: LogFunction) -> tuple[nn.Module, Initializer | None]:
    if isinstance(model, nn.Module):
        return model, _initializer_of(model, log)
    described = config.model if model is None else None
    if model is None:
        if described is None:
            raise ModelError("no model is given: pass one as an object, or describe it in the section `model`")
        model = partial(build_model, described, trust_code=config.trust_code)
    if config.strategy.meta_init:
        seed_everything(config.seed, 0)  # a constructor may draw constants from Python's generator
        on_meta, reason = _build_on_meta(model)
        if on_meta is not None:
            return on_meta
        log(
            MessageEvent(
                f"the full model is built on a real device on every rank, and not on the meta device: {reason}"
            )
        )
    seed_everything(config.seed, 0)  # random values of the constructor depend on the seed alone
    module = model()
    # Plait's own models are initialized by `init_weights`, so that they start from the same values on any device.
    from_plait = described is not None and not isinstance(described, CUSTOM_MODELS)
    return module, getattr(module, "init_weights") if from_plait else None  # noqa: B009


def _build_on_meta(model: Callable[[], nn.Module]) -> tuple[tuple[nn.Module, Initializer] | None, str]:
    """Return the model on the meta device with its initializer, and ""; or None, and why that is impossible."""
    try:
        with torch.device("meta"), ConstructionRecord() as built:
            module = model()
    except (RuntimeError, NotImplementedError, ConfigError) as raised:
        error = raised.__cause__ if isinstance(raised, ConfigError) else raised
        if not isinstance(error, (RuntimeError, NotImplementedError)):
            raise
        # Most likely the constructor reads values. If not, the build on a real device will raise the error again.
        return None, f"its constructor raised {type(error).__name__} there: {str(error).partition(chr(10))[0]}"
    initializer = find_initializer(module, built)
    if initializer is None:
        return None, why_not_on_meta(module) or "what its constructor did cannot be repeated module by module"
    return (module, initializer), ""


def _initializer_of(module: nn.Module, log: LogFunction) -> Initializer | None:
    """Return the initializer of a model that was given as an object; None if it is not on the meta device.

    Raises `ModelError` if it is on the meta device and nothing can initialize it.
    """
    on_meta = [name for name, tensor in _named_tensors(module) if not is_lazy(tensor) and tensor.is_meta]
    if not on_meta:
        return None
    class_name = type(module).__name__
    initializer = find_initializer(module)
    if initializer is None:
        all_on_meta = all(tensor.is_meta for _, tensor in _named_tensors(module))
        reason = why_not_on_meta(module) or (
            "some of its modules have no reset_parameters"
            if all_on_meta
            else "others of its tensors have values already"
        )
        raise ModelError(
            f"the {class_name} lies on the meta device (parameter {on_meta[0]!r}), and nothing can initialize it: "
            f"{reason}. Add init_weights(module) to the model, give a function that builds it, or build it on a real "
            "device"
        )
    log(MessageEvent(f"the {class_name} lies on the meta device: all of its weights are initialized"))
    return initializer


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_parameters(module: nn.Module, log: LogFunction) -> None:
    """Raise `ModelError` for parameters without a shape or memory; log a warning about non-finite initial values."""
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ModelError(
                f"the parameter {name!r} has no shape yet (it belongs to a lazy module): call the model once on a "
                "batch before it is prepared"
            )
        if param.shape == (0,):
            raise ModelError(
                f"the parameter {name!r} has shape (0,), as after deepspeed.zero.Init or another library that keeps "
                "weights elsewhere: build the model without that, or load its weights before it is prepared"
            )
    there = [(name, param) for name, param in module.named_parameters() if _is_checked(param)]
    _log_not_finite([name for name, param in there if not _is_finite(param.detach())], log)


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _log_not_finite(names: Sequence[str], log: LogFunction) -> None:
    if names:
        log(
            f"{len(names)} parameters have initial values that are not finite (NaN or infinite), the first is "
            f"{names[0]!r}: look at how the model is initialized, or at the weights that were loaded"
        )


def _is_checked(param: nn.Parameter) -> bool:
    numbers = param.is_floating_point() or param.is_complex()
    return numbers and not param.is_meta and not is_sharded(param)


_SHOWN = 6
"""How many names a message lists."""
SMALLER_RANGE = (
    "the weights were trained in bf16, and precision is fp16, whose largest number is 65504: activations of this model "
    "may overflow, and the loss scale then falls to its minimum; write precision: bf16 if the device has it"
)


def warn_of_smaller_range(given: Preparation, module: nn.Module) -> None:
    """Log a warning if weights that were trained in bf16 are about to be used in fp16."""
    config = given.config
    if config.precision.compute == "fp16" and "bfloat16" in (_stored_dtype(config), _own_dtype(module)):
        given.log(SMALLER_RANGE)


def _pretrained(config: RunConfig) -> str | None:
    """Return the `transformers` folder of the pretrained weights; None without pretrained weights."""
    described = config.model
    if not isinstance(described, HFConfig) or not described.pretrained:
        return None
    return described.path


def _stored_dtype(config: RunConfig) -> str | None:
    """Return the dtype of the pretrained weights, as their `config.json` says."""
    folder = _pretrained(config)
    if folder is None:
        return None
    try:
        stored = read_json_object(Path(folder) / "config.json", ModelError)
    except ModelError:
        return None  # loading the weights reports the error
    dtype = stored.get("dtype", stored.get("torch_dtype"))
    return dtype if isinstance(dtype, str) else None


def _own_dtype(module: nn.Module) -> str | None:
    first = next(module.parameters(), None)
    return None if first is None else str(first.dtype).removeprefix("torch.")


def load_pretrained_into(
    given: Preparation, skeleton: nn.Module, module: nn.Module, *, keep: materialize.Keep | None = None
) -> None:
    """Load pretrained `transformers` weights into a model, or into this rank's pipeline stages.

    `skeleton` is the full model, whose names and shapes the folder must match. `keep` receives the values of each
    parameter before they are rounded.
    """
    folder = _pretrained(given.config)
    if folder is None:
        return
    from plait.models import load_pretrained

    tensors: dict[str, Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    wrong: list[str] = []
    loaded: set[str] = set()

    regions = {name: local_region(tensor) for name, tensor in tensors.items()}

    def put(name: str, values: Tensor) -> None:
        loaded.add(name)
        tensor = tensors[name]
        shard = values if regions[name] else local_shard_of(tensor, values)
        if shard.is_floating_point() and not _is_finite(shard):
            wrong.append(name)
        if keep is None or not isinstance(tensor, nn.Parameter) or not keep(tensor, shard):
            materialize.assign_local(tensor, shard)

    reading = load_pretrained(skeleton, folder, put, wanted=regions.get)
    ranks = Channel(given.world).gather((reading.bytes, reading.held, peak_host_memory(), wrong))
    if ranks is not None:
        read, held, peak, not_finite = zip(*ranks, strict=True)
        _log_reading(given, reading, read, max(held), max(peak))
        _log_not_finite(list(dict.fromkeys(name for names in not_finite for name in names)), given.log)
    if absent := reading.missing:
        names = f"{', '.join(absent[:_SHOWN])}{', …' if len(absent) > _SHOWN else ''}"
        given.log(MessageEvent(f"{len(absent)} tensors are not in {folder}, and keep their initial values: {names}"))
    held_names = [name for name, _ in module.named_parameters() if regions[name] is not None]
    if lost := [name for name in held_names if name not in loaded and name not in absent]:
        raise ModelError(
            f"{folder} has weights for all parameters, but those of {lost[0]!r} ({len(lost)} such parameters) were not "
            "loaded into the model that is trained"
        )


def _log_reading(given: Preparation, reading: Reading, read: Sequence[int], held: int, peak: int) -> None:
    suffix = "" if len(read) == 1 else f" per rank at most ({format_bytes(sum(read))} by all {len(read)} ranks)"
    given.log(
        MessageEvent(
            f"pretrained weights: {format_bytes(max(read))} of {format_bytes(reading.of)} read{suffix}, "
            f"{format_bytes(held)} of them in memory at a time; peak of host memory so far: {format_bytes(peak)}"
        )
    )


def cast_parameters(
    module: nn.Module, dtype: torch.dtype, *, only: Callable[[nn.Parameter], bool] = lambda _param: True
) -> None:
    """Cast parameters for which `only` is true in place, except those of modules that need fp32.

    A plain parameter stays the same object. A DTensor is replaced by another one, in all modules that share it:
    assigning its `data` would change the dtype of the DTensor only, and not that of its local tensor.
    """
    # The old parameters are kept here too: an `id` is unique only among objects that are alive.
    replaced: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for submodule in module.modules():
        for key, param in submodule._parameters.items():
            if param is None or isinstance(submodule, FP32_MODULES) or not only(param):
                continue
            if not is_sharded(param):
                param.data = param.data.to(dtype)
                continue
            if id(param) not in replaced:
                cast = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
                replaced[id(param)] = param, cast
            submodule._parameters[key] = replaced[id(param)][1]


def round_parameters(
    module: nn.Module, dtype: torch.dtype, *, only: Callable[[nn.Parameter], bool] = lambda _param: True
) -> dict[nn.Parameter, Tensor]:
    """Cast parameters for which `only` is true; return the values before the cast of each whose dtype changed."""
    before = {name: param.data for name, param in module.named_parameters()}
    cast_parameters(module, dtype, only=only)
    now = {param: before[name] for name, param in module.named_parameters()}
    return {param: whole for param, whole in now.items() if whole.dtype != param.dtype}


# Replacing layers by faster ones.


def use_fp8(given: Preparation, module: nn.Module, units: Sequence[WrapUnit]) -> dict[str, Fp8Linear]:
    """Replace linear layers by fp8 ones as `precision.fp8` says; return the new layers by name."""
    config, device, log = given.config, given.device, given.log
    wanted = config.precision.fp8
    layers: dict[str, Fp8Linear] = build(wanted, "precision.fp8", _blocks(module, units), device=device)
    if not layers:
        return {}
    head = ", and so does the head in its backward pass" if wanted.head else ""
    log(MessageEvent(f"fp8 ({wanted.recipe}): {len(layers)} linear layers multiply in 8 bits{head}, the rest is bf16"))
    if config.strategy.compile.enabled or wanted.emulate:
        return layers
    slow = "finding scales and rounding take more time than the products save"
    if wanted.recipe == "rowwise":
        log(f"fp8 (rowwise) without strategy.compile: {slow}")
    elif not has_kernels(torch.empty(0, device=device)):
        log(f"fp8 without the package triton and without strategy.compile: {slow}")
    return layers


class PrecisionRecipe(Protocol):
    """The interface of a function or object that `precision.recipe` may name: it replaces layers."""

    tensor_parallel: bool
    """Whether it can replace layers that tensor parallelism shards (`strategy.layout.tp`). Absent: no."""

    def __call__(self, blocks: Sequence[tuple[str, nn.Module]], *, device: torch.device) -> Iterable[str]:
        """Replace layers inside these blocks, in place, before they have values; return the names of the layers.

        Parameters keep their names, shapes and dtypes: layers may change their class or their `forward`.
        """


def use_recipe(given: Preparation, module: nn.Module, units: Sequence[WrapUnit]) -> None:
    """Call the user's recipe, which replaces layers, if `precision.recipe` names one.

    Raises `ConfigError` if it changes parameters or their names, or returns no names of layers.
    """
    config, section, key = given.config, given.config.precision.recipe, "precision.recipe"
    if section is None:
        return
    recipe = load(section, key)
    if config.strategy.layout.tp > 1 and not getattr(recipe, "tensor_parallel", False):
        message = (
            f"{str(section)!r} does not declare that it can replace tensor-parallel layers (`tensor_parallel = True`)"
        )
        raise ConfigError(Problem(key, message, "Write `strategy.layout.tp: 1`, or declare it."))
    before = dict(module.named_parameters())
    blocks = _blocks(module, units)
    names = call(recipe, key, blocks, name=str(section), arguments=section.arguments, device=given.device)
    after = dict(module.named_parameters())
    if changed := [name for name in before if after.get(name) is not before[name]] or list(after.keys() - before):
        message = f"{str(section)!r} changed the parameter {changed[0]!r}"
        raise ConfigError(Problem(key, message, "Keep the parameters and their names, by which checkpoints know them."))
    if isinstance(names, str) or not isinstance(names, Iterable) or not (count := len(list(names))):
        message = f"{str(section)!r} returned no names of layers that it replaced"
        raise ConfigError(Problem(key, message, "Return their names, or leave the recipe out."))
    given.log(MessageEvent(f"precision.recipe: {section} replaced {count} layers"))


def _blocks(module: nn.Module, units: Sequence[WrapUnit]) -> list[tuple[str, nn.Module]]:
    return [(unit.name, unit.module) for unit in units] or [("", module)]


def use_fp8_at_the_head(module: nn.Module, config: RunConfig) -> None:
    """If `precision.fp8.head` is set, let the output layer compute its gradients in fp8; before stages are split."""
    wanted, compiler = config.precision.fp8, config.strategy.compile
    if not wanted.head:
        return
    from plait.models import use_fp8_head  # which loads `models.hf`

    use_fp8_head(module, emulated=wanted.emulate, traced=compiler.enabled and compiler.scope == "model")


def use_kernels(given: Preparation, module: nn.Module) -> None:
    """Replace layers by fused kernels as `strategy.kernels` says; see `models.fused`."""
    strategy, device, log = given.config.strategy, given.device, given.log
    compiled = strategy.compile.enabled and compile.reason_not_to_compile(strategy.compile, device) is None
    if strategy.kernels == "plain" or device.type != "cuda" or compiled or strategy.layout.tp > 1:
        return
    if not has_kernels(torch.empty(0, device=device)):
        log("strategy.kernels: the package triton is not installed, so norms, gates and rotations stay plain")
        return
    from plait.models import fuse  # which loads all models

    counts = fuse(module)
    if counts:
        summary = ", ".join(f"{count} {layer_type}" for layer_type, count in counts.items())
        log(MessageEvent(f"strategy.kernels: fused kernels for {summary}"))
