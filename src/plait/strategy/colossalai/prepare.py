"""From a run description to an engine that ColossalAI trains."""

from __future__ import annotations

import importlib
from typing import Any

from plait.config import AdamConfig, AdamWConfig, RunConfig
from plait.strategy.colossalai.engine import ColossalEngine
from plait.strategy.colossalai.library import load_colossalai
from plait.strategy.colossalai.plugins import make_plugin
from plait.strategy.colossalai.states import states_of
from plait.strategy.foreign.build import Built, build_whole
from plait.strategy.preparation import Preparation
from plait.world import World, seed_everything


def prepare_colossalai(given: Preparation) -> ColossalEngine:
    """Make a model ready to train with ColossalAI, as its configuration says."""
    config, world = given.config, given.world
    colossalai = load_colossalai(world)
    built = build_whole(given)
    booster = colossalai.booster.Booster(plugin=make_plugin(config))
    boosted, wrapper = _boost(booster, built, config, world)
    seed_everything(config.seed, world.rank)
    engine = ColossalEngine(
        booster,
        boosted,
        wrapper,
        states_of(boosted, wrapper),
        built,
        given,
    )
    engine.restore_originals()
    return engine


def _boost(booster: Any, built: Built, config: RunConfig, world: World) -> tuple[Any, Any]:
    built.module.to(world.device)
    if config.strategy.plugin != "torch_fsdp":
        optimizer = _own_adam(built, config) if config.strategy.plugin == "gemini" else built.optimizer(config)
        boosted, wrapper, *_ = booster.boost(built.module, optimizer)
        return boosted, wrapper
    # The plugin would make the optimizer anew without its groups; made after the model is cut, it need not be.
    boosted, *_ = booster.boost(built.module)
    plugins = importlib.import_module("colossalai.booster.plugin.torch_fsdp_plugin")
    return boosted, plugins.FSDPOptimizerWrapper(built.optimizer(config), boosted)


def _own_adam(built: Built, config: RunConfig) -> Any:
    """ColossalAI's Adam, which is all that Gemini takes; with the groups that the run's own would have."""
    assert isinstance(config.optim, AdamWConfig | AdamConfig)
    kind = importlib.import_module("colossalai.nn.optimizer").HybridAdam
    groups = [
        {key: value for key, value in group.items() if key in ("params", "lr", "weight_decay")}
        for group in built.optimizer(config).param_groups
    ]
    optim = config.optim
    decoupled = isinstance(optim, AdamWConfig)
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, adamw_mode=decoupled)
