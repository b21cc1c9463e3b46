"""`posttrain`, `sft`, `reward`, `dpo`, `lora`, `rollout`, `ppo`, `grpo`: the phases after pretraining."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Tag, model_validator

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, RefusedError, Section
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, name_or_custom

PHASES = ("sft", "reward", "dpo", "ppo", "grpo")
"""The phases that have a command each."""
Phase = Literal["sft", "reward", "dpo", "ppo", "grpo"]


class TaskData(Section):
    """Questions that are made up, with answers that can be checked. Needs no file."""

    type: Literal["task"] = "task"
    name: Literal["sorting", "arithmetic"] = "sorting"
    """`sorting`: `dbca=`, and the same letters in order. `arithmetic`: `17+25=` and its result, which is harder."""
    samples: PositiveInt = 4096
    """How many questions there are before any split."""
    size: PositiveInt = 2
    """Digits of a number; of letters, there are twice as many."""
    wrongs: PositiveInt = 1
    """Wrong answers to each question; each makes a pair with the right one, for reward models and DPO."""


class FileData(Section):
    """JSON lines, Parquet, or a folder that `datasets` saved: one example a row.

    A row has a prompt with an answer, or with a chosen and a rejected one, or a conversation.
    """

    type: Literal["file"] = "file"
    path: PathText
    """A `.jsonl`, `.json` or `.parquet` file, a folder of such files, or a folder of `datasets.save_to_disk`."""
    prompt_key: str | None = None
    """Text, or a list of messages. Absent: `prompt`, or else `instruction` with `input` behind it."""
    answer_key: str | None = None
    """Text, or the messages that follow. Absent: `response`, `answer`, `completion`, `output` or `chosen`, the first
    that a row has."""
    chosen_key: str | None = None
    """The better answer of a pair. Absent: `answer_key`, or `chosen` before the others."""
    rejected_key: str = "rejected"
    """The worse answer."""
    messages_key: str | None = None
    """A conversation: a list of `{role, content}` or `{from, value}`. A row that has it needs no prompt. Absent:
    `messages` or `conversations`."""


class Gsm8kData(Section):
    """School maths: `question` and `answer`; or graded solutions of models, of which each right and wrong one pair."""

    type: Literal["gsm8k"] = "gsm8k"
    path: PathText
    """`gsm8k_train.jsonl`, or `gsm8k_model_solutions.jsonl` for pairs."""


ExampleData = Annotated[TaskData | FileData | Gsm8kData, Field(discriminator="type")]


class TemplateConfig(Section):
    """How a conversation becomes one row of tokens. Only what the assistant says is learned."""

    kind: Literal["auto", "plain", "marked", "tokenizer"] = "auto"
    """`plain`: prompt and answer one after the other, an end token after each answer. `marked`: every turn between
    `start` and `end`, its role first. `tokenizer`: the chat template of a Hugging Face tokenizer. `auto`: `tokenizer`
    where the tokenizer has a chat template, else `plain`."""
    start: str = "<|im_start|>"
    """Of `marked`: what begins a turn; one token where the tokenizer has it, else text."""
    end: str = "<|im_end|>"
    """Of `marked`: what ends a turn."""
    system: str = "system"
    """Of `marked`: the word for this role."""
    user: str = "user"
    """Of `marked`: the word for this role."""
    assistant: str = "assistant"
    """Of `marked`: the word for this role."""
    end_token: bool = True
    """Put the tokenizer's end token behind the last answer, and learn it."""


class PosttrainConfig(Section):
    """What the phases have in common: examples, their split, tokens, and the weights to begin with."""

    data: Many[ExampleData] = ()
    """Sources, one after another. A phase needs at least one."""
    val_data: Many[ExampleData] = ()
    """Sources to validate on. Absent: `val_fraction` of `data`."""
    data_split: Many[NonNegativeInt] | str | None = None
    """Shares of the examples for SFT, reward model and reinforcement learning: `2,4,4`. DPO takes the second. Absent:
    every phase has all."""
    val_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Of the phase's examples, kept for validation."""
    tokenizer: PathText | None = None
    """A `tokenizer.json`, or a folder with one. Absent: that of `model.path`, or of the run in `start`; else the
    characters of a made-up task, or one that is trained on the examples."""
    template: TemplateConfig = Field(default_factory=TemplateConfig)
    """How a conversation becomes tokens."""
    max_len: PositiveInt | None = None
    """Tokens of a prompt with its answer at most. Absent: `model.seq_len`."""
    too_long: Literal["skip", "error"] = "skip"
    """An example longer than `max_len` is left out and counted, or is an error."""
    empty: Literal["skip", "error"] = "skip"
    """The same for an example with an empty answer, or without a prompt."""
    incomplete: Literal["skip", "error"] = "error"
    """The same for a row that lacks a field, or has one of the wrong type."""
    start: PathText | None = None
    """Weights to begin with: a run, a checkpoint, or a Hugging Face folder of the same model. Absent: as `model`
    says."""

    @model_validator(mode="after")
    def _readable_split(self) -> PosttrainConfig:
        split_shares(self.data_split)
        return self


class LoraConfig(Section):
    """Small matrices beside frozen ones: `W + alpha / rank · B · A`."""

    rank: PositiveInt = 8
    """Rows of `A`, columns of `B`."""
    alpha: PositiveFloat = 16.0
    """Weight of the product, divided by `rank`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Of the input of `A`, while training."""
    targets: Many[str] = ("linear",)
    """Linear layers that get one: `linear` for all inside the blocks, a last name (`q_proj`), or a pattern of full
    names (`blocks.*.attention.*`)."""
    only: bool = True
    """Train nothing else. False: the whole model learns too."""
    also: Many[str] = ()
    """With `only`: patterns of other parameters that learn too (`*norm*`)."""
    lr: PositiveFloat | None = None
    """Rate of the adapters. Absent: `optim.lr`, as for all else that learns."""
    scaled_by_root: bool = False
    """`alpha / √rank` in place of `alpha / rank` (rsLoRA)."""
    adapter: PathText | None = None
    """A folder with an adapter of `peft` or of a run, to begin with."""
    base: Literal["full", "int8", "nf4"] = "full"
    """How the frozen matrices beside an adapter are held: as they are, or in 8 or 4 bits a number."""

    @model_validator(mode="after")
    def _frozen_to_be_small(self) -> LoraConfig:
        if self.base != "full" and not self.only:
            raise RefusedError(f"base {self.base!r} cannot be trained, and `only` is false", "Leave one of them out.")
        if self.also and not self.only:
            raise RefusedError("`also` has no effect: with `only: false` everything is trained", "Leave it out.")
        return self


class SftConfig(Section):
    """Learning from answers."""

    packing: bool = True
    """Several examples in a row of `max_len` tokens; they do not see each other."""


class RewardConfig(Section):
    """A model that tells the better of two answers, by a number for each."""

    tokens: Literal["last", "all"] = "last"
    """Whose numbers are compared. `last`: those at the end of both answers, which are the rewards. `all`: at every
    token from where the two part, a mean over them, as DeepSpeed-Chat does; where one has ended, its last number
    holds on."""
    margin: NonNegativeFloat = 0.0
    """By how much the chosen one must be ahead before a pair counts as learned."""
    center: NonNegativeFloat = 0.0
    """Weight of the squared sum of both numbers, which keeps them around zero."""


class DpoConfig(Section):
    """Learning from pairs, without a reward model."""

    loss: Literal["dpo", "ipo", "hinge", "kto", "apo_zero"] = "dpo"
    """`dpo`: logistic. `ipo`: squared, of a token's mean. `hinge`: as SLiC. `kto`: each answer for itself, against the
    mean of the step before. `apo_zero`: each for itself, against zero."""
    beta: PositiveFloat = 0.1
    """How strongly the reference holds."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Of `dpo`: the share of pairs that may be the wrong way round."""
    reference: Literal["start", "base", "none"] = "start"
    """`start`: the model as it is before the first step; its numbers are computed once. `base`: the model without its
    adapter, at every step. `none`: none."""
    desirable: NonNegativeFloat = 1.0
    """Of `kto`: weight of chosen answers."""
    undesirable: NonNegativeFloat = 1.0
    """Of `kto`: weight of rejected answers."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the chosen answers' own loss, a mean over tokens, beside the other."""


def split_shares(value: tuple[int, ...] | str | None) -> tuple[int, int, int]:
    """The three shares that `data_split` says."""
    if value is None:
        return (0, 0, 0)
    try:
        shares = tuple(int(share) for share in value.split(",")) if isinstance(value, str) else tuple(value)
    except ValueError:
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or sum(shares) == 0:
        raise RefusedError(f"data_split {value!r} is not three shares", "Write three numbers, such as `2,4,4`.")
    return shares[0], shares[1], shares[2]


# Reinforcement learning: the model learns from answers that it writes itself.


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


class CustomReward(CustomPart):
    """A function of one's own of (prompt, answer, right answer), called with the further keys too."""

    plugin_kind = "reward"
    builtin = ("task", "gsm8k")


Reward = Annotated[
    Annotated[Literal["task", "gsm8k"], Tag(BUILTIN_TAG)] | Annotated[CustomReward, Tag(CUSTOM_TAG)],
    Discriminator(name_or_custom(CustomReward)),
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
