"""The module to train: built without memory where that can be, and what will give it values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.config import OWN_MODEL, HFConfig, RunConfig, read_json_object
from plait.errors import ConfigError, ModelError
from plait.models import build_model
from plait.parallel import Initializer, Record, find_initializer, materialize, why_not_on_meta
from plait.spec import Note
from plait.strategy.native.forward import Say
from plait.strategy.preparation import ModelSource, Preparation
from plait.world import is_sharded, seed_everything


def build_module(
    config: RunConfig, model: ModelSource, *, say: Say = lambda _text: None
) -> tuple[nn.Module, Initializer | None]:
    """The module, and what will give it values; no such thing where it has them already."""
    module, initializer = _build(config, model, say)
    _check_parameters(module, say)
    return module, initializer


def _build(config: RunConfig, model: ModelSource, say: Say) -> tuple[nn.Module, Initializer | None]:
    if isinstance(model, nn.Module):
        return model, _initializer_of(model, say)
    described = config.model if model is None else None
    if model is None:
        if described is None:
            raise ModelError("there is no model: give one as an object, or describe it in the section `model`")
        model = partial(build_model, described, trust_code=config.trust_code)
    if config.strategy.meta_init:
        seed_everything(config.seed, 0)  # a constructor may choose constants by Python's generator
        on_meta, reason = _build_on_meta(model)
        if on_meta is not None:
            return on_meta
        say(Note(f"the model is built on a real device, whole on every rank, and not on the meta device: {reason}"))
    seed_everything(config.seed, 0)  # whatever the constructor draws, the seed decides
    module = model()
    # Plait's own models start from the same values wherever they are built.
    own = described is not None and not isinstance(described, OWN_MODEL)
    return module, getattr(module, "init_weights") if own else None  # noqa: B009


def _build_on_meta(model: Callable[[], nn.Module]) -> tuple[tuple[nn.Module, Initializer] | None, str]:
    """A model without memory and what will give it values, or the reason why there is no such thing."""
    try:
        with torch.device("meta"), Record() as built:
            module = model()
    except (RuntimeError, NotImplementedError, ConfigError) as raised:
        error = raised.__cause__ if isinstance(raised, ConfigError) else raised
        if not isinstance(error, (RuntimeError, NotImplementedError)):
            raise
        # A constructor that looks at values; if not, it fails again.
        return None, f"its constructor raised {type(error).__name__} there: {str(error).partition(chr(10))[0]}"
    initializer = find_initializer(module, built)
    if initializer is None:
        return None, why_not_on_meta(module) or "what its constructor did cannot be repeated module by module"
    return (module, initializer), ""


def _initializer_of(module: nn.Module, say: Say) -> Initializer | None:
    """What gives values to a model that was given as an object: nothing, unless it lies on the meta device."""
    lie_on_meta = [name for name, tensor in _named_tensors(module) if not is_lazy(tensor) and tensor.is_meta]
    if not lie_on_meta:
        return None
    kind = type(module).__name__
    initializer = find_initializer(module)
    if initializer is None:
        all_there = all(tensor.is_meta for _, tensor in _named_tensors(module))
        reason = why_not_on_meta(module) or (
            "some of its modules have no reset_parameters" if all_there else "others of its tensors have values already"
        )
        raise ModelError(
            f"the {kind} lies on the meta device (as {lie_on_meta[0]!r} does), and nothing can give it values: "
            f"{reason}. Add init_weights(module) to the model, give a function that makes it, or build it on a real "
            "device"
        )
    say(Note(f"the {kind} lies on the meta device: all of its weights are initialized anew"))
    return initializer


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_parameters(module: nn.Module, say: Say) -> None:
    """Refuse parameters that nothing can train, and say where training starts from numbers that are not finite."""
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
    _say_not_finite([name for name, param in there if not _is_finite(param.detach())], say)


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _say_not_finite(names: Sequence[str], say: Say) -> None:
    if names:
        say(
            f"{len(names)} parameters have initial values that are not finite (NaN or infinite), the first is "
            f"{names[0]!r}: look at how the model is initialized, or at the weights that were loaded"
        )


def _is_checked(param: nn.Parameter) -> bool:
    numbers = param.is_floating_point() or param.is_complex()
    return numbers and not param.is_meta and not is_sharded(param)


SMALLER_RANGE = (
    "the weights were trained in bf16, and precision is fp16, which ends at 65504: what such a model computes may lie "
    "beyond, and the loss scale then falls to its minimum; write precision: bf16 where the device has it"
)


def warn_of_smaller_range(given: Preparation, module: nn.Module) -> None:
    """Say that weights which were trained in bf16 are about to be computed with in fp16."""
    config = given.config
    if config.precision.compute == "fp16" and "bfloat16" in (_stored_dtype(config), _own_dtype(module)):
        given.say(SMALLER_RANGE)


def _pretrained(config: RunConfig) -> str | None:
    """The folder of `transformers` that the weights come from; None where they come from nowhere."""
    described = config.model
    if not isinstance(described, HFConfig) or not described.pretrained:
        return None
    return described.path


def _stored_dtype(config: RunConfig) -> str | None:
    """The format of the weights, as their folder says."""
    folder = _pretrained(config)
    if folder is None:
        return None
    try:
        stored = read_json_object(Path(folder) / "config.json", ModelError)
    except ModelError:
        return None  # whoever reads the weights says what is wrong
    found = stored.get("dtype", stored.get("torch_dtype"))
    return found if isinstance(found, str) else None


def _own_dtype(module: nn.Module) -> str | None:
    first = next(module.parameters(), None)
    return None if first is None else str(first.dtype).removeprefix("torch.")


def load_pretrained_into(
    given: Preparation, skeleton: nn.Module, module: nn.Module, *, keep: materialize.Keep | None = None
) -> None:
    """Fill a model, or the stages of one that this rank holds, from a folder of `transformers`.

    `skeleton` is the whole model, whose names and shapes say what the folder must have. `keep` is given the values of
    each parameter before they are rounded.
    """
    folder = _pretrained(given.config)
    if folder is None:
        return
    from plait.models import load_pretrained

    tensors: dict[str, Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}

    wrong: list[str] = []

    def put(name: str, whole: Tensor) -> None:
        if name in tensors:
            tensor = tensors[name]
            if whole.is_floating_point() and not _is_finite(whole):
                wrong.append(name)
            if keep is None or not isinstance(tensor, nn.Parameter) or not keep(tensor, whole):
                materialize.assign_whole(tensor, whole)

    load_pretrained(skeleton, folder, put)
    _say_not_finite(wrong, given.say)
