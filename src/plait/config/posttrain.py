"""`posttrain`, `sft`, `reward`, `dpo`, `lora`, `rollout`, `ppo`, `grpo`: the phases after pretraining."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, Tag, model_validator

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, RefusedError, Section
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, name_or_custom

PHASES = ("sft", "reward", "dpo", "ppo", "grpo")
"""The phases after pretraining, each with a command of its name."""
Phase = Literal["sft", "reward", "dpo", "ppo", "grpo"]


class TaskData(Section):
    """Generated questions with answers that can be checked. Needs no file."""

    type: Literal["task"] = "task"
    name: Literal["sorting", "arithmetic"] = "sorting"
    """`sorting`: `dbca=`, and the letters in order. `arithmetic`: `17+25=` and its result, which is harder."""
    samples: PositiveInt = 4096
    """Number of questions, before any split."""
    size: PositiveInt = 2
    """Digits of a number; half the number of letters."""
    wrongs: PositiveInt = 1
    """Wrong answers per question; each is a pair with the right one, for reward models and DPO."""


class FileData(Section):
    """JSON lines, Parquet, or a folder of `datasets`: one example per row.

    A row has a prompt with an answer, or with a chosen and a rejected answer, or a conversation.
    """

    type: Literal["file"] = "file"
    path: PathText
    """A `.jsonl`, `.json` or `.parquet` file, a folder of such files, or a folder of `datasets.save_to_disk`."""
    prompt_key: str | None = None
    """The key of the prompt, text or a list of messages. Absent: `prompt`, else `instruction` followed by `input`."""
    answer_key: str | None = None
    """The key of the answer, text or messages. Absent: the first that a row has of `response`, `answer`, `completion`,
    `output` and `chosen`."""
    chosen_key: str | None = None
    """The key of a pair's better answer. Absent: `answer_key`, or `chosen` before the others."""
    rejected_key: str = "rejected"
    """The key of a pair's worse answer."""
    messages_key: str | None = None
    """The key of a conversation, a list of `{role, content}` or `{from, value}`, in a row without a prompt. Absent:
    `messages` or `conversations`."""


class Gsm8kData(Section):
    """School maths: `question` and `answer`; or graded solutions of models, of which a right and a wrong one are a
    pair."""

    type: Literal["gsm8k"] = "gsm8k"
    path: PathText
    """`gsm8k_train.jsonl`, or `gsm8k_model_solutions.jsonl` for pairs."""


ExampleData = Annotated[TaskData | FileData | Gsm8kData, Field(discriminator="type")]


class TemplateConfig(Section):
    """The chat template, which makes one row of tokens of a conversation. Only the assistant's turns are trained on."""

    kind: Literal["auto", "plain", "marked", "tokenizer"] = "auto"
    """`plain`: prompt and answer, an end token after each answer. `marked`: every turn between `start` and `end`,
    its role first. `tokenizer`: the chat template of a Hugging Face tokenizer. `auto`: `tokenizer` where the
    tokenizer has a chat template, else `plain`."""
    start: str = "<|im_start|>"
    """For `marked`: the start of a turn; one token where the tokenizer has it, else text."""
    end: str = "<|im_end|>"
    """For `marked`: the end of a turn."""
    system: str = "system"
    """For `marked`: the name of this role."""
    user: str = "user"
    """For `marked`: the name of this role."""
    assistant: str = "assistant"
    """For `marked`: the name of this role."""
    end_token: bool = True
    """Append the tokenizer's end token to the last answer, and train on it."""


class PosttrainConfig(Section):
    """Options of all phases: examples, their split, tokens, and initial weights."""

    data: Many[ExampleData] = ()
    """Sources of examples, one after another. A phase needs at least one."""
    val_data: Many[ExampleData] = ()
    """Sources to validate on. Absent: `val_fraction` of `data`."""
    data_split: Many[NonNegativeInt] | str | None = None
    """Shares of the examples for SFT, reward model and reinforcement learning: `2,4,4`. DPO takes the second. Absent:
    every phase uses all."""
    val_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the phase's examples that is held out for validation."""
    tokenizer: PathText | None = None
    """A `tokenizer.json`, or a folder with one. Absent: that of `model.path`, or of the run in `start`; else the
    characters of a generated task, or one that is trained on the examples."""
    template: TemplateConfig = Field(default_factory=TemplateConfig)
    """The chat template."""
    max_len: PositiveInt | None = None
    """The most tokens that a prompt and its answer may have together. Absent: `model.seq_len`."""
    too_long: Literal["skip", "error"] = "skip"
    """What happens to an example longer than `max_len`: it is skipped and counted, or is an error."""
    empty: Literal["skip", "error"] = "skip"
    """The same for an example with an empty answer, or without a prompt."""
    incomplete: Literal["skip", "error"] = "error"
    """The same for a row without a required field, or with one of the wrong type."""
    start: PathText | None = None
    """Initial weights: a run, a checkpoint, or a Hugging Face folder of the same model. Absent: as `model` has them."""

    @model_validator(mode="after")
    def _readable_split(self) -> PosttrainConfig:
        split_shares(self.data_split)
        return self


class LoraConfig(Section):
    """LoRA adapters beside frozen matrices: `W + alpha / rank · B · A`."""

    rank: PositiveInt = 8
    """Rows of `A`, columns of `B`."""
    alpha: PositiveFloat = 16.0
    """Weight of the product, divided by `rank`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the input of `A`, while training."""
    targets: Many[str] = ("linear",)
    """Linear layers with an adapter: `linear` for all in the blocks, a last name (`q_proj`), or a pattern of full names
    (`blocks.*.attention.*`)."""
    only: bool = True
    """Train the adapters only. False: the whole model is trained too."""
    also: Many[str] = ()
    """With `only`: patterns of other parameters that are trained too (`*norm*`)."""
    lr: PositiveFloat | None = None
    """Learning rate of the adapters. Absent: `optim.lr`."""
    scaled_by_root: bool = False
    """`alpha / √rank` in place of `alpha / rank` (rsLoRA)."""
    adapter: PathText | None = None
    """A folder with an adapter of `peft` or of a run, to start from."""
    base: Literal["full", "int8", "nf4"] = "full"
    """How the frozen matrices beside an adapter are stored: in full precision, or quantized to 8 or 4 bits."""

    @model_validator(mode="after")
    def _frozen_to_be_small(self) -> LoraConfig:
        if self.base != "full" and not self.only:
            raise RefusedError(f"base {self.base!r} cannot be trained, but `only` is false", "Leave one of them out.")
        if self.also and not self.only:
            raise RefusedError("`also` has no effect: with `only: false` everything is trained", "Leave it out.")
        return self


class SftConfig(Section):
    """Supervised fine-tuning on answers."""

    packing: bool = True
    """Pack several examples into a row of `max_len` tokens; they do not attend to each other."""


class RewardConfig(Section):
    """A reward model, trained on pairs of answers."""

    tokens: Literal["last", "all"] = "last"
    """Which values are compared. `last`: those at the end of both answers, which are the rewards. `all`: the mean over
    all tokens from where the two answers differ, as DeepSpeed-Chat does; a shorter answer keeps its last value."""
    margin: NonNegativeFloat = 0.0
    """By how much the chosen answer must be ahead in the loss."""
    center: NonNegativeFloat = 0.0
    """Weight of the squared sum of both values, which keeps them around zero."""


class DpoConfig(Section):
    """Preference optimization on pairs, without a reward model."""

    loss: Literal["dpo", "ipo", "hinge", "kto", "apo_zero"] = "dpo"
    """`dpo`: logistic. `ipo`: squared, on the mean over tokens. `hinge`: as in SLiC. `kto`: each answer by itself,
    against the mean of the step before. `apo_zero`: each by itself, against zero."""
    beta: PositiveFloat = 0.1
    """Strength of the KL constraint to the reference."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """For `dpo`: the share of pairs whose labels may be swapped."""
    reference: Literal["start", "base", "none"] = "start"
    """The reference model. `start`: the model before the first step; its log-probabilities are computed once.
    `base`: the model without its adapter, at every step. `none`: none."""
    desirable: NonNegativeFloat = 1.0
    """For `kto`: weight of chosen answers."""
    undesirable: NonNegativeFloat = 1.0
    """For `kto`: weight of rejected answers."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the chosen answers' SFT loss, a mean over tokens, beside the other."""


def split_shares(value: tuple[int, ...] | str | None) -> tuple[int, int, int]:
    """Return the three shares of `data_split`."""
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
"""The phases of reinforcement learning, in which the model generates its own examples."""


class VllmConfig(Section):
    """vLLM for rollouts: every rank has an engine in its own process."""

    memory: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the device's memory for vLLM, its copy of the weights included. Absent: so much that its KV cache holds
    `rollout.max_rows` answers of the full length."""
    eager: bool | None = None
    """Run eagerly, without compilation and CUDA graphs: starts sooner, generates slower. Absent: true on a CPU."""


class RolloutConfig(Section):
    """How answers are generated: this number of prompts at a time, with the current policy."""

    prompts: PositiveInt = 64
    """Prompts per rollout, over all ranks. Its answers must fill whole batches: prompts × answers per prompt is a
    multiple of `batch.total`."""
    max_new_tokens: PositiveInt = 128
    """The most tokens of an answer."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the policy that is trained has this temperature too."""
    top_k: PositiveInt | None = None
    """Sample from the `top_k` most likely tokens."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample from the most likely tokens that together have this probability."""
    stop: Many[str] = ()
    """Texts that end an answer, besides the end of the chat template."""
    mode: Literal["auto", "gathered", "sharded", "trainer", "vllm"] = "auto"
    """What generates: full weights gathered on every rank, the sharded model, the trainer's forward pass without a
    cache, or vLLM with full weights on every rank. `auto`: gathered where that fits, else sharded."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Options of `mode: vllm`."""
    max_rows: PositiveInt = 128
    """Prompts that a rank answers at once."""
    verify_every: PositiveInt = 16
    """Compare the log-probabilities of generation with the trainer's after this number of rollouts, and after the first
    one."""
    on_mismatch: Literal["stop", "fallback"] = "stop"
    """What happens where they differ: an error, or a warning and generation by the trainer."""
    tolerance: PositiveFloat | None = None
    """Mean difference of log-probabilities that is accepted. Absent: what rounding explains in the run's precision."""
    empty_reward: float | None = None
    """Reward of an answer without text. Absent: as for all answers."""
    unfinished_reward: float | None = None
    """Reward of an answer that reached `max_new_tokens`. Absent: as for all answers."""
    bad_reward: Literal["skip", "error"] = "skip"
    """Where a reward function raises, or returns a number that is not finite: the answer is skipped and counted, or the
    run stops."""
    samples: NonNegativeInt = 4
    """Answers of each rollout that are saved in `samples.jsonl`."""


class CustomReward(CustomPart):
    """A custom reward function of (prompt, answer, right answer), which also gets the further keys."""

    plugin_kind = "reward"
    builtin = ("task", "gsm8k")


Reward = Annotated[
    Annotated[Literal["task", "gsm8k"], Tag(BUILTIN_TAG)] | Annotated[CustomReward, Tag(CUSTOM_TAG)],
    Discriminator(name_or_custom(CustomReward)),
]


class _Online(Section):
    reward: Reward | None = None
    """The reward function: `package.module:name` of (prompt, answer, right answer), or `task` or `gsm8k`."""
    epochs: PositiveInt = 1
    """Passes over the answers of one rollout."""
    clip: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The clip range of the probability ratio."""
    clip_high: PositiveFloat | None = None
    """Another upper bound of the clip range."""
    reference: Literal["auto", "start", "base", "none"] = "auto"
    """The reference model. `start`: a frozen copy of the initial weights. `base`: the model without its adapter.
    `auto`: `base` where adapters are new, else `start`. `none`: none."""


class PpoConfig(_Online):
    """PPO: actor, critic, reference and reward model."""

    reward_model: PathText | None = None
    """A run of `plait reward`, one of its checkpoints, or a Hugging Face folder. Absent: `reward` names a function."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: for negative advantages, the loss is at most this multiple of the advantage."""
    value_clip: PositiveFloat | None = 0.2
    """The clip range of the value loss. null: no clipping."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount factor per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Lambda of generalized advantage estimation (GAE)."""
    whiten: bool = True
    """Normalize advantages to mean zero and variance one over the whole rollout."""
    clip_score: PositiveFloat | None = None
    """Clip rewards to this absolute value."""
    kl: Literal["fixed", "adaptive"] = "fixed"
    """Whether `beta` is constant, or adapted so that the KL divergence approaches `kl_target`."""
    beta: NonNegativeFloat = 0.05
    """The KL penalty per token."""
    kl_target: PositiveFloat = 6.0
    """For `adaptive`: KL divergence of an answer, summed over its tokens."""
    kl_horizon: PositiveFloat = 10_000.0
    """For `adaptive`: the number of answers in which a KL that is off by a fifth changes `beta` by a fifth."""
    critic_start: PathText | None = None
    """Initial weights of the critic. Absent: those of the reward model; without one, the actor's."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic. Absent: `optim.lr`."""
    critic_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the critic. Absent: `optim.weight_decay`."""
    critic_lora: LoraConfig | None = None
    """LoRA adapters of the critic. Absent: all of it is trained."""
    ptx_data: Many[ExampleData] = ()
    """Examples for a language-model loss beside PPO's (PPO-ptx): one per answer."""
    ptx_weight: NonNegativeFloat = 0.0
    """Weight of that loss, a mean over tokens."""

    @model_validator(mode="after")
    def _both_of_ptx(self) -> PpoConfig:
        if bool(self.ptx_data) != bool(self.ptx_weight):
            raise RefusedError("`ptx_data` and `ptx_weight` need each other", "Write both, or neither.")
        return self


class GrpoConfig(_Online):
    """GRPO: advantages from a group of answers to one prompt, without a critic."""

    group: Annotated[PositiveInt, Field(ge=2)] = 8
    """Answers to each prompt."""
    beta: NonNegativeFloat = 0.04
    """Weight of the KL divergence from the reference, in the loss."""
    baseline: Literal["mean", "others"] = "mean"
    """The baseline of an answer's reward: the mean of its group, or of the other answers (leave-one-out)."""
    spread: Literal["group", "none"] = "group"
    """Whether advantages are divided by the group's standard deviation."""
    weighting: Literal["answer", "token", "length"] = "answer"
    """Whether every answer has the same weight, or every token; `length`: every token, and sums are divided by the
    number of answers times `rollout.max_new_tokens`."""
