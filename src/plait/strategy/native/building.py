"""The module to train: built without memory where that can be, and what will give it values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from plait.config.run import RunConfig
from plait.errors import ModelError
from plait.models import build_model
from plait.parallel import materialize
from plait.parallel.initializer import Initializer, Writes, find_initializer
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
        model = partial(build_model, described)
    if config.strategy.meta_init:
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
        with torch.device("meta"), Writes() as built:
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


def load_pretrained_into(
    skeleton: nn.Module, module: nn.Module, config: RunConfig, *, keep: materialize.Keep | None = None
) -> None:
    """Fill a model from a folder of `transformers`; of a stage, what it has. The skeleton has all names and shapes.

    `keep` is given what the parameters may round.
    """
    if config.model is None or config.model.type != "hf" or config.model.path is None or not config.model.pretrained:
        return
    from plait.models.hf import load_pretrained

    tensors: dict[str, Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}

    def put(name: str, whole: Tensor) -> None:
        if name in tensors:
            tensor = tensors[name]
            if keep is None or not isinstance(tensor, nn.Parameter) or not keep(tensor, whole):
                materialize.assign_whole(tensor, whole)

    load_pretrained(skeleton, config.model.path, put)
