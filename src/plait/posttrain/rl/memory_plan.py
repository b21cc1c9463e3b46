"""The memory plan of an online run: that of training the policy, plus the other models and generation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.config import Layout, PpoConfig, RunConfig, resolve_layout
from plait.distributed import Ranks
from plait.engine import planned_as
from plait.errors import ConfigError, PlaitError, Problem
from plait.generate import cache_bytes
from plait.monitor import EventKind, format_bytes
from plait.optim import state_bytes
from plait.plan import RunPlan, plan_run, shards_of
from plait.posttrain.data.prepare import longest
from plait.posttrain.losses import as_bits
from plait.posttrain.models import make_model, make_value_model
from plait.posttrain.rl.actor import ScoringModel
from plait.posttrain.rl.experience import Experience
from plait.posttrain.rl.roles import critic_config, described_in, make_critic
from plait.posttrain.rl.settings import Online
from plait.precision import make_policy
from plait.trainer import MemoryPlan

_GIB = 2**30


class OtherModels(NamedTuple):
    """Lower bounds of the bytes that a rank needs besides training the policy."""

    reference: float
    reward_model: float
    critic: float
    """Its weights, fp32 master weights and optimizer state."""
    writing: float
    """The KV cache of the answers that are generated at once; and the weights, if generation gathers them."""
    policy: float
    """The policy's weights and optimizer state during generation."""

    @property
    def models(self) -> float:
        """The bytes of the other models, which are in memory all the time."""
        return self.reference + self.reward_model + self.critic

    def __str__(self) -> str:
        names = {"reference": self.reference, "reward model": self.reward_model, "critic": self.critic}
        sizes = [f"{name} {format_bytes(bytes_)}" for name, bytes_ in names.items() if bytes_]
        return f"{', '.join(sizes) or 'no other model'}; writing takes {format_bytes(self.writing)} for a while"


class OnlineMemoryPlan(MemoryPlan):
    """A memory plan that also counts the other models and the memory for generation."""

    _other_models: OtherModels | None = None

    def simulate(self, ranks: Ranks) -> RunPlan | str | None:
        """Return the plan of training the policy on answers of the greatest length, with the other models added.

        A string is the reason for having no plan; None if the run is invalid, which is reported later.
        """
        config, given = self.runner.config, self.runner.given
        micro = self.micro_batch(ranks)
        if micro is None:
            return None
        try:
            planned = planned_as(config)
        except ConfigError:  # setup() raises it again
            return None
        if isinstance(planned, str):
            return planned
        example = learned_from(config, micro)
        sizes = {"ranks": ranks.size, "local_ranks": ranks.local_size}
        plan = plan_run(planned, **sizes, model=given.model, loss_function=given.loss_fn, example=example)
        if isinstance(plan, RunPlan):
            layout = resolve_layout(config.strategy, size=ranks.size, local_size=ranks.local_size)
            try:
                self._other_models = count_other_models(config, layout)
            except PlaitError:  # building that model raises it again
                return None
            plan = _together(plan, self._other_models)
        return plan

    def log(self) -> None:
        """Log the plan, and the memory of the other models."""
        super().log()
        if self._other_models is not None:
            self.runner.emit(EventKind.MESSAGE, level="info", text=f"beside the policy: {self._other_models}")


def learned_from(config: RunConfig, rows: int) -> dict[str, Tensor]:
    """Return an example of the policy's training inputs: a micro-batch of answers of the greatest length."""
    online = Online.of(config)
    longest_ones = Experience(rows, longest(config), pad=0)
    longest_ones.lengths.fill_(longest_ones.width)
    names = ("old", "advantages", *(() if online.reference == "none" else ("reference",)))
    inputs = longest_ones.inputs(range(rows), *names)
    if isinstance(online.method, PpoConfig) and online.method.ptx_data:  # one example per answer
        inputs |= {name: inputs[name].repeat(2, 1) for name in ("input_ids", "labels")}
        inputs["ptx_scale"] = as_bits(torch.ones(1))
    return inputs


def count_other_models(config: RunConfig, layout: Layout) -> OtherModels:
    """Return the memory of the other models and of generation, computed from shapes."""
    online, compute = Online.of(config), make_policy(config.precision).compute
    method, rollout = online.method, online.rollout
    reward_model = critic = 0.0
    with torch.device("meta"):
        policy = make_model(config)
        if isinstance(method, PpoConfig):
            critic = _at_rest(critic_config(config, method), layout, make_critic(config, method))
            if (path := method.reward_model) is not None:
                described = described_in(path, config)
                model = make_value_model(described, path, lambda _: ScoringModel, trust_code=config.trust_code)
                reward_model = _weights(config, layout, model)
    rows = min(rollout.max_rows, -(-online.answers // layout.size))
    cache = 0 if rollout.mode == "trainer" else cache_bytes(policy, rows=rows, tokens=longest(config), dtype=compute)
    whole = _numbers(policy) * compute.itemsize if rollout.mode in ("gathered", "vllm") else 0
    reference = _weights(config, layout, policy) if online.reference == "start" else 0.0
    return OtherModels(reference, reward_model, critic, float(cache + whole), _at_rest(config, layout, policy))


def _numbers(model: nn.Module, *, trained: bool = False) -> int:
    return sum(param.numel() for param in model.parameters() if param.requires_grad or not trained)


def _weights(config: RunConfig, layout: Layout, model: nn.Module) -> float:
    """Return the bytes of one rank's weights in the compute dtype."""
    cut = layout.tp * (shards_of(config, layout) if config.strategy.stage == 3 else 1)
    return _numbers(model) * make_policy(config.precision).compute.itemsize / cut


def _at_rest(config: RunConfig, layout: Layout, model: nn.Module) -> float:
    """Return the bytes of one rank's weights, optimizer state, and fp32 master weights if there are any."""
    weights = _weights(config, layout, model)
    if config.strategy.offload.on:
        return weights
    masters = 4 if make_policy(config.precision).compute.itemsize < 4 and config.precision.master else 0
    bytes_per_param = (state_bytes(config) + masters) / (layout.tp * shards_of(config, layout))
    return weights + _numbers(model, trained=True) * bytes_per_param


def _together(plan: RunPlan, others: OtherModels) -> RunPlan:
    """Return the policy's plan with the other models added, without a step time: the length of answers is not known."""
    more = others.models / _GIB
    writing = (others.policy + others.writing) / _GIB
    peak, needed = max(plan.peak_gib, writing) + more, max(plan.needed_gib, writing) + more
    refusal = plan.refusal
    if refusal is None and needed > plan.memory_gib:
        message = f"each device would need {needed:.1f} GiB, and has {plan.memory_gib:.1f}; of it {others}"
        remedy = (
            "Shard the models (`strategy.zero=3`), use `lora` (the reference then needs no copy), or write fewer or "
            "shorter answers at once (`rollout.max_rows`, `posttrain.max_len`). `plan=warn` starts it anyway."
        )
        refusal = ConfigError(Problem("strategy", message, remedy))
    return replace(plan, peak_gib=peak, needed_gib=needed, seconds=None, refusal=refusal)
