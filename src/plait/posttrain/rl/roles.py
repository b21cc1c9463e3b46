"""The models besides the policy (reference, reward model, critic), each in an engine with the run's layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from plait.checkpoint import open_source
from plait.config import (
    CompileConfig,
    HFConfig,
    ModelConfig,
    OffloadConfig,
    PosttrainConfig,
    PpoConfig,
    RecomputeConfig,
    RunConfig,
    SGDConfig,
    parse_stored,
)
from plait.engine import NativeEngine, Preparation, prepare_native
from plait.errors import CheckpointError, ConfigError, DataError, Problem
from plait.posttrain.data.prepare import PhaseData, check_same_tokens, longest, tokenizer_beside
from plait.posttrain.data.records import ChatMessage
from plait.posttrain.data.template import chat_template_in, read_tokenizer, template_of_run
from plait.posttrain.models import make_model, make_value_model
from plait.posttrain.rl.actor import ScoringModel, critic_class
from plait.posttrain.rl.settings import Online

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelRoles:
    """The engines of the other models; None if the algorithm does not use one."""

    reference: NativeEngine | None
    reward_model: NativeEngine | None
    critic: NativeEngine | None


def make_model_roles(policy: Preparation, data: PhaseData) -> ModelRoles:
    """Build and return the engines of the other models, with their initial weights. A collective."""
    config = policy.config
    online = Online.of(config)
    reward_model = critic = reference = None
    if online.reference == "start":
        reference = _frozen(policy, lambda: make_model(config))
    if isinstance(online.method, PpoConfig):
        ppo = online.method
        if ppo.reward_model is not None:
            described = described_in(ppo.reward_model, config)
            check_reward_model(config, described, ppo.reward_model, data, policy.log)
            make = partial(
                make_value_model, described, ppo.reward_model, lambda _: ScoringModel, trust_code=config.trust_code
            )
            reward_model = _frozen(policy, make)
        if ppo.critic_start is not None and (kept := tokenizer_beside(ppo.critic_start)) is not None:
            check_same_tokens("ppo.critic_start", kept, data.tokenizer)
        critic = prepare_native(
            replace(policy, config=critic_config(config, ppo), model=partial(make_critic, config, ppo))
        )
    return ModelRoles(reference, reward_model, critic)


def make_critic(config: RunConfig, ppo: PpoConfig) -> nn.Module:
    """Return the critic: a model with a value head.

    Its weights are those of `ppo.critic_start`, else of the reward model, else the policy's initial ones.
    """
    assert config.model is not None
    policy_start = (config.posttrain or PosttrainConfig()).start
    start = ppo.critic_start or ppo.reward_model or policy_start
    described = config.model if start == policy_start else described_in(start or "", config)
    return make_value_model(
        described, start, partial(critic_class, ppo=ppo), ppo.critic_lora, trust_code=config.trust_code
    )


def critic_config(config: RunConfig, ppo: PpoConfig) -> RunConfig:
    """Return the run description for the critic's engine, with its own learning rate and offload folder."""
    rates = {"lr": ppo.critic_lr, "weight_decay": ppo.critic_weight_decay}
    optim = config.optim.model_copy(update={key: value for key, value in rates.items() if value is not None})
    offload = config.strategy.offload
    if offload.uses_files:
        folder = offload.path or str(Path(config.work_dir) / "offload")
        offload = offload.model_copy(update={"path": str(Path(folder) / "critic")})
    strategy = config.strategy.model_copy(update={"offload": offload})
    return config.model_copy(update={"optim": optim, "strategy": strategy})


def _frozen(policy: Preparation, make: Callable[[], nn.Module]) -> NativeEngine:
    """Return an engine for inference: sharded as the run is, without optimizer state, in the compute dtype."""
    plain = {"offload": OffloadConfig(), "compile": CompileConfig(), "recompute": RecomputeConfig()}
    config = policy.config
    strategy = config.strategy.model_copy(update=plain)
    precision = config.precision.model_copy(update={"master": config.precision.compute in ("fp32", "tf32")})
    changes = {"strategy": strategy, "precision": precision, "optim": SGDConfig(no_decay=()), "schedule": None}
    return prepare_native(
        Preparation(config.model_copy(update=changes), policy.world, model=lambda: _held_still(make()), log=policy.log)
    )


def _held_still(model: nn.Module) -> nn.Module:
    """Freeze all but the smallest parameter, and return the model.

    An engine needs a trainable parameter, even if it never makes an optimizer step.
    """
    smallest = min(model.parameters(), key=lambda param: param.numel())
    for param in model.parameters():
        param.requires_grad_(param is smallest)
    return model


def described_in(path: str, config: RunConfig) -> ModelConfig:
    """Return the description of the model in a folder: of the run that wrote it, or of `transformers`."""
    with open_source(Path(path)) as source:
        stored = (source.state.get("config") or {}).get("model")
        source_type, file = source.kind, source.description
    if stored is not None:
        model = parse_stored({"model": stored}, file, trust_code=config.trust_code).model
        assert model is not None
        return model
    if source_type == "hf":
        return HFConfig(path=path)
    assert config.model is not None
    return config.model


def check_reward_model(config: RunConfig, described: ModelConfig, path: str, data: PhaseData, log: Log) -> None:
    """Raise an error if a folder has no reward model, or one with another tokenizer, template or a shorter context."""
    with open_source(Path(path)) as source:
        stored, file = (source.state.get("config") or {}).get("posttrain"), source.description
        heads = [
            entry.shape for name, entry in source.entries.items() if name.endswith(("head.weight", "score.weight"))
        ]
    if not any(len(shape) == 2 and shape[0] == 1 for shape in heads):
        raise CheckpointError(
            f"ppo.reward_model: {path} holds no layer that gives one number; train one with `plait reward`"
        )
    kept = tokenizer_beside(path)
    if kept is None:
        log(f"ppo.reward_model: {path} has no tokenizer, so nothing shows whether it reads the tokens of this run")
    elif (tokenizer := read_tokenizer(kept)).digest != data.tokenizer.digest:
        raise DataError(
            f"the reward model in {path} was trained with another tokenizer than this run has; name the same "
            "one as posttrain.tokenizer"
        )
    elif stored is not None or chat_template_in(kept.parent) is not None:
        section = parse_stored({"posttrain": stored or {}}, file, trust_code=config.trust_code).posttrain
        section = section or PosttrainConfig()
        named = [Path(path) for path in (section.tokenizer, getattr(described, "path", None)) if path is not None]
        theirs = template_of_run(section.template, tokenizer, [kept.parent, *named], trust_code=config.trust_code)
        text = data.examples[0][0].prompt[-1].content  # text of the data, which every tokenizer of this run can encode
        said = (ChatMessage("user", text), ChatMessage("assistant", text))
        if theirs.conversation(said) != data.template.conversation(said):
            raise ConfigError(
                Problem(
                    "ppo.reward_model",
                    f"{path} was trained on conversations that its template ({theirs.kind}) writes differently than "
                    f"this run's ({data.template.kind})",
                    "Write the same posttrain.template for both, or train the reward model with this one.",
                )
            )
    known, wanted = getattr(described, "seq_len", None), longest(config)
    if isinstance(known, int) and known < wanted:
        message = f"sees {known} tokens, and answers here come with up to {wanted}"
        remedy = f"Write `posttrain.max_len: {known}`, or train one with longer rows."
        raise ConfigError(Problem("ppo.reward_model", message, remedy))
