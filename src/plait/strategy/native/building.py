"""The module to train: built without memory where that can be, and what will give it values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from plait.config.files import read_json_object
from plait.config.run import RunConfig
from plait.errors import ModelError
from plait.models import build_model
from plait.parallel import materialize
from plait.parallel.initializer import Initializer, find_initializer
from plait.parallel.recording import Record
from plait.world import seed_everything

ModelSource = nn.Module | Callable[[], nn.Module] | None


def build_module(config: RunConfig, model: ModelSource) -> tuple[nn.Module, Initializer | None]:
    """The module, and what will give it values; no such thing where it has them already."""
    if isinstance(model, nn.Module):
        return model, _initializer_of(model)
    described = config.model if model is None else None
    if model is None:
        if described is None:
            raise ModelError("there is no model: give one as an object, or describe it in the section `model`")
        model = partial(build_model, described, trust_code=config.trust_code)
    if config.strategy.meta_init:
        seed_everything(config.seed, 0)  # a constructor may choose constants by Python's generator
        module, initializer = _build_on_meta(model)
        if module is not None and initializer is not None:
            return module, initializer
    seed_everything(config.seed, 0)  # whatever the constructor draws, the seed decides
    module = model()
    # Plait's own models start from the same values wherever they are built.
    own = described is not None and described.type != "import"
    return module, getattr(module, "init_weights") if own else None  # noqa: B009


def _build_on_meta(model: Callable[[], nn.Module]) -> tuple[nn.Module | None, Initializer | None]:
    try:
        with torch.device("meta"), Record() as built:
            module = model()
    except (RuntimeError, NotImplementedError):  # a constructor that looks at values; if not, it fails again soon
        return None, None
    return module, find_initializer(module, built)


def _initializer_of(module: nn.Module) -> Initializer | None:
    """What gives values to a model that was given as an object: nothing, unless it lies on the meta device."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return None
    initializer = find_initializer(module)
    if initializer is None:
        raise ModelError(
            f"the {type(module).__name__} lies on the meta device, and nothing can give it values: some of its "
            "modules have no reset_parameters. Add init_weights(module) to the model, or build it on a real device"
        )
    return initializer


SMALLER_RANGE = (
    "the weights were trained in bf16, and precision is fp16, which ends at 65504: what such a model computes may lie "
    "beyond, and the loss scale then falls to its minimum; write precision: bf16 where the device has it"
)


def warn_of_smaller_range(config: RunConfig, module: nn.Module, say: Callable[[str], None]) -> None:
    """Say that weights which were trained in bf16 are about to be computed with in fp16."""
    if config.precision.compute == "fp16" and "bfloat16" in (_stored_dtype(config), _own_dtype(module)):
        say(SMALLER_RANGE)


def _pretrained(config: RunConfig) -> str | None:
    """The folder of `transformers` that the weights come from; None where they come from nowhere."""
    described = config.model
    if described is None or described.type != "hf" or not described.pretrained:
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
    skeleton: nn.Module, module: nn.Module, config: RunConfig, *, keep: materialize.Keep | None = None
) -> None:
    """Fill a model, or the stages of one that this rank holds, from a folder of `transformers`.

    `skeleton` is the whole model, whose names and shapes say what the folder must have. `keep` is given the values of
    each parameter before they are rounded.
    """
    folder = _pretrained(config)
    if folder is None:
        return
    from plait.models.hf import load_pretrained

    tensors: dict[str, Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}

    def put(name: str, whole: Tensor) -> None:
        if name in tensors:
            tensor = tensors[name]
            if keep is None or not isinstance(tensor, nn.Parameter) or not keep(tensor, whole):
                materialize.assign_whole(tensor, whole)

    load_pretrained(skeleton, folder, put)
