"""All techniques on one page, in the order in which they must be applied.

build on meta → units → recompute → compile → shard or replicate → give values → optimizer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.run import RunConfig
from plait.errors import ModelError
from plait.models import build_model
from plait.optim import ViewGroup, build_optimizer, build_schedule, is_elementwise, split_groups
from plait.parallel import compiling, materialize, recompute
from plait.parallel.initializer import Initializer, Writes, find_initializer
from plait.parallel.replicate import GradientBuckets
from plait.parallel.units import Unit, find_units
from plait.precision import FP32_MODULES, LossScaler, Policy, make_policy
from plait.strategy.native.engine import Gradients, NativeEngine
from plait.strategy.native.forward import Say
from plait.strategy.native.loss import LossFunction
from plait.strategy.native.update import Updater
from plait.strategy.native.views import BucketViews, DirectViews, ShardViews, Views
from plait.world import World, make_deterministic, seed_everything

ModelSource = nn.Module | Callable[[], nn.Module] | None


@dataclass(frozen=True, slots=True)
class Length:
    """How long the run is, as far as it is known."""

    total_steps: int | None = None
    steps_per_epoch: int | None = None


def prepare_native(
    config: RunConfig,
    world: World,
    *,
    model: ModelSource = None,
    loss_function: LossFunction | None = None,
    length: Length | None = None,
    accumulation: int = 1,
    example: Any = None,
    say: Say = print,
) -> NativeEngine:
    """Make a model ready to train as `config` says.

    `model` is a module, a function that makes one, or absent where `config.model` describes it. `example` is
    one micro-batch's inputs; only `recompute: auto` looks at it.
    """
    strategy, policy, device = config.strategy, make_policy(config.precision), world.device
    sharded = strategy.stage > 0 and world.layout.dp_shard > 1
    length = length or Length()
    if config.deterministic:
        make_deterministic()
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")

    module, initializer = _build(config, model)
    units = find_units(module, strategy.wrap)
    auto_count = 0
    if strategy.recompute.mode == "auto":
        from plait.parallel import activations

        auto_count = activations.units_to_recompute(module, units, example, config=config, world=world)
    recompute.apply_recompute(units, strategy.recompute, auto_count=auto_count)
    compiled = _compile(module, units, config, device, sharded=sharded, say=say)

    if initializer is None and world.data_group is not None:
        materialize.copy_from_main(module, world.data_group, device)
    if not policy.master:
        _cast(module, policy.compute)
    if sharded:
        from plait.parallel import zero  # [Note: DTensor is loaded late]

        assert world.mesh is not None
        options = zero.ShardingOptions(
            strategy.stage, strategy.reshard_after_forward, strategy.forward_prefetch, strategy.backward_prefetch
        )
        gradients: Gradients | None = zero.shard(module, units, mesh=world.mesh, policy=policy, options=options)
    if initializer is None:
        module.to(device)
    else:
        materialize.give_storage(module, device)
        materialize.initialize(module, initializer, seed=config.seed, device=device)
    if model is None:
        _load_pretrained(module, config)
    if sharded:
        views = _shard_views(module, config, world)
    else:
        gradients, views = _replicate(module, policy, config, world)

    by_name = dict(zip(views.names, views.tensors, strict=True))
    groups = [
        ViewGroup(spec.names, [by_name[name] for name in spec.names], spec.options)
        for spec in split_groups(module, config.optim)
    ]
    seed_everything(config.seed, world.rank)
    updater = Updater(
        views,
        build_optimizer(config.optim, groups),
        build_schedule(
            config.schedule,
            base_lr=config.optim.lr,
            total_steps=length.total_steps,
            steps_per_epoch=length.steps_per_epoch,
        ),
        scaler=LossScaler(config.precision.scaler) if policy.compute == torch.float16 else None,
        config=config.train,
        device=device,
    )
    return NativeEngine(
        module,
        world,
        policy=policy,
        gradients=gradients,
        views=views,
        updater=updater,
        loss_function=loss_function,
        accumulation=accumulation,
        compiled=compiled,
        say=say,
    )


def _build(config: RunConfig, model: ModelSource) -> tuple[nn.Module, Initializer | None]:
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


def _load_pretrained(module: nn.Module, config: RunConfig) -> None:
    if config.model is None or config.model.type != "hf" or config.model.path is None or not config.model.pretrained:
        return
    from plait.models.hf import load_pretrained

    tensors: dict[str, Tensor] = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    load_pretrained(module, config.model.path, lambda name, whole: materialize.assign_whole(tensors[name], whole))


def _compile(
    module: nn.Module, units: list[Unit], config: RunConfig, device: torch.device, *, sharded: bool, say: Say
) -> list[nn.Module]:
    if not config.strategy.compile.enabled:
        return []
    reason = compiling.why_not(config.strategy.compile, device)
    if reason is not None:
        say(f"strategy.compile is on, but {reason}: training goes on without it")
        return []
    return compiling.compile_units(module, units, config.strategy.compile, sharded=sharded)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place, except those of modules that need fp32."""
    for part in module.modules():
        if not isinstance(part, FP32_MODULES):
            for param in part.parameters(recurse=False):
                param.data = param.data.to(dtype)


def _trainable(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    pairs = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if not pairs:
        raise ModelError("no parameter of the model has requires_grad: there is nothing to train")
    return [name for name, _ in pairs], [param for _, param in pairs]


def _shard_views(module: nn.Module, config: RunConfig, world: World) -> Views:
    assert world.mesh is not None
    names, params = _trainable(module)
    group = world.mesh.get_group("dp_shard")
    return ShardViews(names, params, group=group, elementwise=is_elementwise(config.optim))


def _replicate(module: nn.Module, policy: Policy, config: RunConfig, world: World) -> tuple[Gradients | None, Views]:
    names, params = _trainable(module)
    if world.data_group is None and not (policy.mixed and policy.master):
        return None, DirectViews(names, params)
    rounded: dict[nn.Parameter, Tensor] = {}
    if policy.mixed and policy.master:
        whole = {param: param.data for param in module.parameters()}
        _cast(module, policy.compute)
        rounded = {param: data for param, data in whole.items() if param.dtype != data.dtype}
    buckets = GradientBuckets(
        params,
        dtype_of=lambda param: policy.reduce if param.dtype == policy.compute else param.dtype,
        group=world.data_group,
        bucket_bytes=int(config.strategy.bucket_mb * 2**20),
    )
    masters = [rounded.get(param) for param in params]
    # A checkpoint holds them as they were, on every layout alike.
    frozen = {param: data for param, data in rounded.items() if not param.requires_grad}
    return buckets, BucketViews(names, params, buckets, masters, frozen)
