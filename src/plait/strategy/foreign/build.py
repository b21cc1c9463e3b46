"""A whole model with values, as another library wants to be given it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.config import RunConfig
from plait.optim import GroupSpec, ViewGroup, build_optimizer, split_groups
from plait.parallel import apply_recompute, attributes_of, find_units, give_attributes, materialize, persistent_buffers
from plait.strategy.native.building import build_module, load_pretrained_into
from plait.strategy.native.spread import refuse_hooks
from plait.strategy.preparation import Preparation
from plait.world import make_deterministic


@dataclass(frozen=True, slots=True)
class Built:
    """A model, and what a library that takes it over will no longer tell."""

    module: nn.Module
    groups: list[GroupSpec]
    blanks: dict[str, Tensor]
    """Every parameter's whole shape, under its name, without memory."""
    trained: list[str]
    buffers: list[str]
    """Those that a checkpoint holds."""
    originals: dict[str, Tensor]
    """What is rounded or not trained: the values from before, on the host."""

    def optimizer(self, config: RunConfig) -> torch.optim.Optimizer:
        """The optimizer of the run over the module's parameters, without any state yet."""
        params = named_parameters(self.module)
        views = [ViewGroup(spec.names, [params[name] for name in spec.names], spec.options) for spec in self.groups]
        optimizer = build_optimizer(config.optim, views)
        optimizer.state.clear()  # the library exchanges the parameters, and what is kept for these would stay for ever
        return optimizer


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters under their own names, whatever a library wrapped around its parts."""
    return {name.replace("_fsdp_wrapped_module.", ""): param for name, param in module.named_parameters()}


def build_whole(given: Preparation) -> Built:
    """Make the model on the host, with the values that it has under every other engine."""
    config, world, policy, host = given.config, given.world, given.policy, torch.device("cpu")
    if config.deterministic:
        make_deterministic()
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    module, initializer = build_module(config, given.model, say=given.say)
    refuse_hooks(given, module)
    if initializer is None:
        module.to(host)
        if world.everyone is not None:
            materialize.copy_from_main(module, world.everyone, world.device)
    else:
        attributes = attributes_of(module)
        materialize.give_storage(module, host)
        give_attributes(module, attributes)
        materialize.initialize(module, initializer, seed=config.seed, device=world.device)
    if given.model is None:
        load_pretrained_into(given, module, module)
    groups = split_groups(module, config.optim)
    apply_recompute(find_units(module, config.strategy.wrap), config.strategy.recompute)
    params = dict(module.named_parameters())
    return Built(
        module,
        groups,
        blanks={name: torch.empty(param.shape, device="meta") for name, param in params.items()},
        trained=[name for name, param in params.items() if param.requires_grad],
        buffers=[name for name, _ in persistent_buffers(module)],
        originals={
            name: param.detach().clone() for name, param in params.items() if policy.mixed or not param.requires_grad
        },
    )
