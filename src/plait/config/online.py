"""`rollout`, `ppo`, `grpo`: learning from answers that the model itself gives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Tag, model_validator

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, RefusedError, Section
from plait.config.part import OWN_TAG, PART_TAG, Part, word_or_part
from plait.config.posttrain import ExampleData, LoraConfig

ONLINE = ("ppo", "grpo")
"""The phases in which the model writes its own examples."""


class VllmConfig(Section):
    """vLLM as the one who writes: every rank has an engine of its own, in its own process."""

    memory: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the device's memory that it may take, its copy of the weights included. Absent: its cache has room for
    `rollout.max_rows` answers as long as they may be."""
    eager: bool | None = None
    """Compute step by step, without compiling and recording: starts sooner, writes slower. Absent: so on a CPU."""


class RolloutConfig(Section):
    """How answers are made: so many prompts at a time, from the model as it is at that moment."""

    prompts: PositiveInt = 64
    """Prompts of one rollout, over all ranks. Its answers must fill whole batches: prompts × answers each is a
    multiple of `batch.total`."""
    max_new_tokens: PositiveInt = 128
    """Tokens of an answer at most."""
    temperature: PositiveFloat = 1.0
    """Of sampling; the policy that learns is the one with this temperature."""
    top_k: PositiveInt | None = None
    """Choose among so many likeliest tokens."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Choose among the likeliest tokens that together have this probability."""
    stop: Many[str] = ()
    """Texts that end an answer, besides the template's own end."""
    mode: Literal["auto", "gathered", "sharded", "trainer", "vllm"] = "auto"
    """Who writes: whole weights gathered on every rank, the model as it is sharded, the trainer's forward pass without
    a cache, or vLLM with whole weights on every rank. `auto`: gathered where that fits, else sharded."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """What is particular to `mode: vllm`."""
    max_rows: PositiveInt = 128
    """Prompts that a rank answers at once."""
    verify_every: PositiveInt = 16
    """Rollouts between two comparisons of what writes with what is trained; the first one is always compared."""
    on_mismatch: Literal["stop", "fallback"] = "stop"
    """What follows where the two differ: an error, or a warning and the trainer writes itself."""
    tolerance: PositiveFloat | None = None
    """Mean difference of log-probabilities that is accepted. Absent: what rounding explains in the run's precision."""
    empty_reward: float | None = None
    """Reward of an answer without any text. Absent: it is judged as all are."""
    unfinished_reward: float | None = None
    """Reward of an answer that did not end by itself. Absent: it is judged as all are."""
    bad_reward: Literal["skip", "error"] = "skip"
    """A reward function that raises, or a reward that is no finite number: the answer teaches nothing and is counted,
    or the run stops."""
    samples: NonNegativeInt = 4
    """Answers of each rollout that are kept in `samples.jsonl`."""


class RewardPart(Part):
    """A function of one's own of (prompt, answer, right answer), called with the further keys too."""

    kind = "reward"
    own = ("task", "gsm8k")


Reward = Annotated[
    Annotated[Literal["task", "gsm8k"], Tag(OWN_TAG)] | Annotated[RewardPart, Tag(PART_TAG)],
    Discriminator(word_or_part(RewardPart)),
]


class _Online(Section):
    reward: Reward | None = None
    """A function `package.module:name` of (prompt, answer, right answer), or `task` or `gsm8k`."""
    epochs: PositiveInt = 1
    """Passes over the answers of one rollout."""
    clip: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """How far the policy may move from the one that answered before a token stops pulling."""
    clip_high: PositiveFloat | None = None
    """Another bound above than below."""
    reference: Literal["auto", "start", "base", "none"] = "auto"
    """What the policy is held to. `start`: a frozen copy of the first weights. `base`: the model without its adapter.
    `auto`: `base` where adapters begin from nothing, else `start`. `none`: nothing."""


class PpoConfig(_Online):
    """Learning from rewards with a critic: actor, critic, reference and reward model."""

    reward_model: PathText | None = None
    """A run of `plait reward`, one of its checkpoints, or a Hugging Face folder. Absent: `reward` names a function."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """For negative advantages, the loss is at most so many times the advantage."""
    value_clip: PositiveFloat | None = 0.2
    """A value gains nothing by moving further than this from what it was. null: no bound."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount of later rewards, a token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """How far advantages look ahead (GAE)."""
    whiten: bool = True
    """Advantages have mean zero and variance one over the whole rollout."""
    clip_score: PositiveFloat | None = None
    """Rewards of answers are cut to this size, in either direction."""
    kl: Literal["fixed", "adaptive"] = "fixed"
    """Whether `beta` stays, or is moved so that the divergence comes to `kl_target`."""
    beta: NonNegativeFloat = 0.05
    """What a token pays for its divergence from the reference."""
    kl_target: PositiveFloat = 6.0
    """Of `adaptive`: divergence of an answer, summed over its tokens."""
    kl_horizon: PositiveFloat = 10_000.0
    """Of `adaptive`: answers in which a divergence that is off by a fifth moves `beta` by a fifth."""
    critic_start: PathText | None = None
    """Weights of the critic. Absent: those of the reward model; without one, the actor's first ones."""
    critic_lr: PositiveFloat | None = None
    """Rate of the critic. Absent: `optim.lr`."""
    critic_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the critic. Absent: `optim.weight_decay`."""
    critic_lora: LoraConfig | None = None
    """Adapters of the critic. Absent: all of it learns."""
    ptx_data: Many[ExampleData] = ()
    """Examples whose answers are to stay likely: one beside each answer."""
    ptx_weight: NonNegativeFloat = 0.0
    """Weight of their loss, a mean over tokens, beside the policy's."""

    @model_validator(mode="after")
    def _both_of_ptx(self) -> PpoConfig:
        if bool(self.ptx_data) != bool(self.ptx_weight):
            raise RefusedError("one of `ptx_data` and `ptx_weight` is without the other", "Write both, or neither.")
        return self


class GrpoConfig(_Online):
    """Learning from rewards without a critic: several answers to one prompt judge each other."""

    group: Annotated[PositiveInt, Field(ge=2)] = 8
    """Answers to each prompt."""
    beta: NonNegativeFloat = 0.04
    """Weight of the divergence from the reference, in the loss."""
    baseline: Literal["mean", "others"] = "mean"
    """What an answer is compared with: the mean of its group, or of the other answers."""
    spread: Literal["group", "none"] = "group"
    """Divide by the group's standard deviation, or do not."""
    weighting: Literal["answer", "token", "length"] = "answer"
    """Every answer counts the same, or every token; `length`: every token, and sums are divided by answers times
    `rollout.max_new_tokens`."""
