"""Parameters that several ranks hold alike: what the optimizer sees of them, and how their gradients are summed."""

from __future__ import annotations

from torch import nn

from plait.optim import is_one_pass
from plait.parallel import GradientBuckets, Gradients, OwnGradients
from plait.strategy.native.casting import round_parameters
from plait.strategy.native.rounded import RoundedViews
from plait.strategy.native.views import BucketViews, DirectViews, ShardViews, Views, trainable
from plait.strategy.preparation import Preparation
from plait.world import is_sharded


def replicate(
    given: Preparation, module: nn.Module, *, elementwise: bool, leaves: bool
) -> tuple[Gradients | None, Views]:
    """What collects the gradients of a model at ZeRO stage 0, if anything has to, and the views of its parameters.

    `leaves`: gradients may stay what the backward pass makes them, where that is exact.
    """
    layout, policy = given.world.layout, given.policy
    rounds = policy.mixed and policy.master
    rounded = round_parameters(module, policy.compute) if rounds else {}
    names, params = trainable(module)
    if layout.replicas == 1 and not rounds:
        if any(is_sharded(param) for param in params):
            return None, ShardViews(names, params, elementwise=elementwise)
        return None, DirectViews(names, params)
    masters = [rounded.get(param) for param in params]
    # A checkpoint holds them as they were, on every layout alike.
    frozen = {param: data for param, data in rounded.items() if not param.requires_grad}
    alone = leaves and layout.size == 1 and given.config.train.clip_value is None
    if alone and is_one_pass(given.config.optim, [rounded.get(param, param) for param in params]):
        own = OwnGradients(params, policy.reduce)
        return own, RoundedViews(names, params, own, masters, frozen)
    buckets = make_buckets(given, params)
    return buckets, BucketViews(names, params, buckets, masters, frozen, elementwise=elementwise)


def make_buckets(given: Preparation, params: list[nn.Parameter]) -> GradientBuckets:
    """Buckets that sum each gradient over the ranks that see other data. Every rank must make them."""
    world, policy = given.world, given.policy
    # Both groups are made here, on every rank: a stage of a pipeline may have no experts, where another has some.
    dense = world.group("dp_replicate", "dp_shard", "ep", "cp")
    of_experts = world.group("dp_replicate", "dp_shard", "cp")
    return GradientBuckets(
        params,
        dtype_of=lambda param: policy.reduce if param.dtype == policy.compute else param.dtype,
        group_of=lambda param: of_experts if _is_expert(param) else dense,
        bucket_bytes=int(given.config.strategy.bucket_mb * 2**20),
    )


def _is_expert(param: nn.Parameter) -> bool:
    """Whether a parameter is one of the experts that ranks share out among them."""
    return is_sharded(param) and any(name in ("ep", "ep_tp") for name in param.device_mesh.mesh_dim_names or ())
