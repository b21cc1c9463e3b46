"""The flags of DeepSpeed-Chat's scripts: each becomes a key of the run description, or has a reason why it does not.

`translate` turns a command line of `main.py` into settings; every flag is in `FLAGS`, so none is ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from plait.config import choose
from plait.errors import ConfigError, Problem
from plait.posttrain import DEFAULTS, PhaseDescription, Wanted

# Reads command lines of the forms `--flag`, `--flag value`, `--flag=value`, `--flag a b`.


def read_flags(arguments: Sequence[str], known: Collection[str]) -> dict[str, list[str]]:
    """Return flag → values, with dashes in flags replaced by underscores; raise `ConfigError` for an unknown flag."""
    given: dict[str, list[str]] = {}
    current: list[str] | None = None
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            name = flag[2:].replace("-", "_")
            if name not in known:
                raise ConfigError(Problem(flag, "unknown flag", choose(name, known, "flag")))
            current = given.setdefault(name, [])
            current += [value] if equals else []
        elif current is None:
            raise ConfigError(Problem(argument, "belongs to no flag", "Write `--flag value`."))
        else:
            current.append(argument)
    return given


Settings = dict[str, Any]
"""Dotted keys and their values."""


class Flag(NamedTuple):
    """The translation of a flag: settings made from its values, or the reason why there are none."""

    answer: str
    """What users are shown: the key that the flag sets, or the reason why it sets none."""
    make: Callable[[list[str]], Settings] | None = None
    """Makes settings from the flag's values; None: the flag sets nothing."""


def _to(key: str, convert: Callable[[str], Any] = str) -> Flag:
    return Flag(f"`{key}`", lambda values: {key: convert(values[0])})


def _sources(values: list[str]) -> Settings:
    return {"posttrain.data": [{"type": "file", "path": path} for path in values]}


_SCHEDULES: Mapping[str, Settings] = MappingProxyType(
    {
        "linear": {"schedule.type": "LinearLR"},
        "cosine": {"schedule.type": "CosineAnnealingLR"},
        "polynomial": {"schedule.type": "PolynomialLR"},
        "constant": {"schedule.type": "ConstantLR"},
        "constant_with_warmup": {"schedule.type": "ConstantLR"},
    }
)


def _schedule(values: list[str]) -> Settings:
    if values[0] not in _SCHEDULES:
        remedy = "Write a `schedule` of type CosineAnnealingWarmRestarts with the length of its first period."
        if values[0] != "cosine_with_restarts":
            remedy = choose(values[0], _SCHEDULES, "schedule")
        raise ConfigError(Problem("--lr_scheduler_type", f"{values[0]!r} cannot be taken over", remedy))
    return dict(_SCHEDULES[values[0]])


def _lora(values: list[str], at: str = "lora") -> Settings:
    rank = int(values[0])
    # DeepSpeed-Chat scales adapters by 1 / rank, as `alpha: 1` does.
    return {f"{at}.rank": rank, f"{at}.alpha": 1.0} if rank else {}


def _model() -> Flag:
    return Flag("`model.path`", lambda values: {"model.type": "hf", "model.path": values[0]})


_NOTHING = "nothing to set: "
_MINI = "mini-batch"
"""A placeholder among the settings, not a key: the micro-batch size of PPO training.

If it is given, `per_device_train_batch_size` means the rows of a rollout instead; see `_together`.
"""
_LEAST = "least rate"
"""A placeholder among the settings, not a key: the least learning rate, which `_together` divides by `optim.lr`."""

FLAGS: Mapping[str, Flag] = MappingProxyType(
    {
        "data_path": Flag("`posttrain.data`", _sources),
        "train_data_path": Flag("`posttrain.data`", _sources),
        "val_data_path": Flag(
            "`posttrain.val_data`",
            lambda values: {"posttrain.val_data": [{"type": "file", "path": path} for path in values]},
        ),
        "test_data_path": Flag(_NOTHING + "validate another run on it, with `posttrain.val_data`"),
        "data_split": _to("posttrain.data_split"),
        "data_output_path": Flag(_NOTHING + "tokens are made when a run starts, and are not kept in files"),
        "model_name_or_path": _model(),
        "model_name": _model(),
        "num_padding_at_beginning": Flag(_NOTHING + "rows are padded at their end, where nothing looks at it"),
        "per_device_train_batch_size": _to("batch.micro", int),
        "per_device_eval_batch_size": Flag(_NOTHING + "validation goes in batches of the size of training"),
        "max_seq_len": _to("posttrain.max_len", int),
        "learning_rate": _to("optim.lr", float),
        "minimum_learning_rate": Flag(
            "`schedule.min_factor`, a share of `optim.lr`", lambda values: {_LEAST: float(values[0])}
        ),
        "weight_decay": _to("optim.weight_decay", float),
        "num_train_epochs": _to("train.max_epochs", int),
        "gradient_accumulation_steps": _to("batch.accumulation", int),
        "lr_scheduler_type": Flag("`schedule.type`", _schedule),
        "num_warmup_steps": _to("schedule.warmup", int),
        "class_weight": Flag(_NOTHING + "it weighs the classes of a classifier; answers have none"),
        "device": _to("device"),
        "output_dir": _to("work_dir"),
        "seed": _to("seed", int),
        "gradient_checkpointing": Flag("`strategy.recompute`", lambda _: {"strategy.recompute": "full"}),
        "dropout": Flag("`model.dropout` of a gpt; a `transformers` model has it in its `config.json`"),
        "offload": Flag("`strategy.offload`", lambda _: {"strategy.offload": "cpu"}),
        "dtype": _to("precision"),
        "zero_stage": _to("strategy.zero", int),
        "lora_dim": Flag("`lora.rank`, with `lora.alpha: 1` as theirs", _lora),
        "lora_module_name": Flag("`lora.targets`", lambda values: {"lora.targets": [f"*{values[0]}*"]}),
        "only_optimize_lora": Flag("`lora.only`", lambda _: {"lora.only": True}),
        "lora_learning_rate": _to("lora.lr", float),
        "actor_model_name_or_path": _model(),
        "critic_model_name_or_path": _to("ppo.reward_model"),
        "actor_learning_rate": _to("optim.lr", float),
        "critic_learning_rate": _to("ppo.critic_lr", float),
        "actor_weight_decay": _to("optim.weight_decay", float),
        "critic_weight_decay": _to("ppo.critic_weight_decay", float),
        "actor_lora_dim": Flag("`lora.rank`, with `lora.alpha: 1` as theirs", _lora),
        "actor_lora_module_name": Flag("`lora.targets`", lambda values: {"lora.targets": [f"*{values[0]}*"]}),
        "actor_lora_learning_rate": _to("lora.lr", float),
        "critic_lora_dim": Flag(
            "`ppo.critic_lora.rank`, with `alpha: 1` as theirs", partial(_lora, at="ppo.critic_lora")
        ),
        "critic_lora_module_name": Flag(
            "`ppo.critic_lora.targets`", lambda values: {"ppo.critic_lora.targets": [f"*{values[0]}*"]}
        ),
        "critic_lora_learning_rate": _to("ppo.critic_lora.lr", float),
        "actor_zero_stage": _to("strategy.zero", int),
        "critic_zero_stage": Flag(_NOTHING + "all models of a run are spread alike, as `strategy` says"),
        "actor_gradient_checkpointing": Flag("`strategy.recompute`", lambda _: {"strategy.recompute": "full"}),
        "critic_gradient_checkpointing": Flag(_NOTHING + "`strategy.recompute` holds for both"),
        "actor_dropout": Flag("`model.dropout` of a gpt; a `transformers` model has it in its `config.json`"),
        "critic_dropout": Flag(_NOTHING + "the critic is described where the reward model is"),
        "max_prompt_seq_len": Flag(_NOTHING + "`posttrain.max_len` is for prompt and answer together"),
        "max_answer_seq_len": _to("rollout.max_new_tokens", int),
        "per_device_generation_batch_size": _to("rollout.max_rows", int),
        "per_device_training_batch_size": _to("batch.micro", int),
        "per_device_mini_train_batch_size": Flag(
            "`batch.micro`; `--per_device_train_batch_size` beside it is then `rollout.max_rows`",
            lambda values: {_MINI: int(values[0])},
        ),
        "generation_batches": Flag(_NOTHING + "`rollout.prompts` says how many prompts a rollout has, over all ranks"),
        "ppo_epochs": _to("ppo.epochs", int),
        "enable_ema": Flag("`hooks`", lambda _: {"hooks": [{"type": "ema", "decay": 0.992}]}),
        "unsupervised_dataset_name": Flag(
            "`ppo.ptx_data`", lambda values: {"ppo.ptx_data": [{"type": "file", "path": path} for path in values]}
        ),
        "unsupervised_dataset_config_name": Flag(_NOTHING + "a file has no configurations"),
        "unsup_coef": _to("ppo.ptx_weight", float),
        "enable_hybrid_engine": Flag(_NOTHING + "it always is one; `rollout.mode` says how it writes"),
        "unpin_actor_parameters": Flag(_NOTHING + "whole weights are let go of after each rollout"),
        "release_inference_cache": Flag(_NOTHING + "the cache is let go of after each rollout"),
        "inference_tp_size": Flag(_NOTHING + "every rank writes alone, with whole weights"),
        "tp_gather_partition_size": Flag(_NOTHING + "every rank writes alone, with whole weights"),
        "offload_reference_model": Flag(
            _NOTHING + "the reference is sharded as the policy is; with `lora` there is none"
        ),
        "print_answers": Flag(_NOTHING + "some answers of every rollout are in `samples.jsonl`"),
        "print_answers_interval": Flag(_NOTHING + "`rollout.samples` of every rollout are in `samples.jsonl`"),
        "enable_test_mode": Flag(_NOTHING + "a short run is `train.stop_after=10`"),
        "test_stop_step": _to("train.stop_after", int),
        "align_overflow": Flag(_NOTHING + "actor and critic skip their own steps; `train.guard` counts them"),
        "eval_interval": _to("train.val_every", int),
        "eval_iters": _to("train.val_batches", int),
        "print_steps": _to("log.every", int),
        "save_steps": _to("checkpoint.every", int),
        "compute_fp32_loss": Flag(_NOTHING + "losses are always computed in fp32"),
        "print_loss": Flag(_NOTHING + "the loss is always shown"),
        "enable_tensorboard": Flag("`log.sinks`", lambda _: {"log.sinks": ["jsonl", "tensorboard"]}),
        "tensorboard_path": Flag(_NOTHING + "it goes to `work_dir`"),
        "add_eot_token": Flag("`posttrain.template.end_token`", lambda _: {"posttrain.template.end_token": True}),
        "im_start": _to("posttrain.template.start"),
        "im_end": _to("posttrain.template.end"),
        "system": _to("posttrain.template.system"),
        "user": _to("posttrain.template.user"),
        "assistant": _to("posttrain.template.assistant"),
        "template": _to("posttrain.template.kind"),
        "inference": Flag(_NOTHING + "that is another command, `plait generate`"),
        "restore": Flag("`checkpoint.resume`", lambda _: {"checkpoint.resume": "auto"}),
        "checkpoint": _to("checkpoint.resume"),
        "debug": Flag(_NOTHING + "a short run is `train.stop_after=10`"),
        "label1_dim": Flag(_NOTHING + "classes of a classifier; answers have none"),
        "label2_dim": Flag(_NOTHING + "classes of a classifier; answers have none"),
        "label3_dim": Flag(_NOTHING + "classes of a classifier; answers have none"),
        "chinese_percent": Flag(_NOTHING + "give the sources in `posttrain.data` in the mixture that is wanted"),
        "only_query": Flag(_NOTHING + "only answers are learned; a prompt never is"),
        "cut_flag_token": Flag(_NOTHING + "an example that is too long is left out and counted, not cut"),
        "cut_flag_token_id": Flag(_NOTHING + "an example that is too long is left out and counted, not cut"),
        "deepspeed_mpi": Flag(_NOTHING + "`plait launch` knows MPI"),
        "deepscale": Flag(_NOTHING + "an old name of `--deepspeed`"),
        "deepscale_config": Flag("an old name of `--deepspeed_config`"),
        "local_rank": Flag(_NOTHING + "the launcher tells each rank"),
        "deepspeed": Flag(_NOTHING + "`strategy` says how training is spread"),
        "deepspeed_config": Flag("`strategy.engine: deepspeed` with `strategy.config`, or `plait convert --to yaml`"),
    }
)
"""Every flag of `main.py`, without its dashes."""


def translate(arguments: Sequence[str]) -> tuple[Settings, list[str]]:
    """Return the settings for a command line of `main.py`, and a line for each flag that sets nothing.

    An unknown flag raises `ConfigError`; see `read_flags` for the forms of flags.
    """
    settings: Settings = {}
    said: list[str] = []
    given = read_flags(arguments, FLAGS)
    for name, values in given.items():
        flag = FLAGS[name]
        if name == "deepspeed" and values:  # `--deepspeed FILE`, as in scripts of `transformers`
            flag = FLAGS["deepspeed_config"]
        if flag.make is None:
            said.append(f"--{name}: {flag.answer}")
            continue
        try:
            settings.update(flag.make(values))
        except (ValueError, IndexError):
            raise ConfigError(Problem(f"--{name}", f"{' '.join(values) or 'nothing'!r} is not a value of it")) from None
    return _together(settings, given), said


def _together(settings: Settings, given: Mapping[str, Sequence[str]]) -> Settings:
    """Return the settings after the rules that involve more than one flag."""
    for section in ("lora", "ppo.critic_lora"):
        if f"{section}.rank" in settings:
            settings.setdefault(f"{section}.only", "only_optimize_lora" in given)  # the default is false
        else:  # --lora_dim 0
            settings = {key: value for key, value in settings.items() if not key.startswith(f"{section}.")}
    if (mini := settings.pop(_MINI, None)) is not None:
        if "per_device_train_batch_size" in given:
            settings["rollout.max_rows"] = settings["batch.micro"]
        settings["batch.micro"] = mini
    if "schedule.warmup" in settings and "schedule.type" not in settings:
        settings["schedule.type"] = "CosineAnnealingLR"  # DeepSpeed-Chat's default
    if (least := settings.pop(_LEAST, None)) is not None:
        if settings.get("schedule.type") not in ("CosineAnnealingLR", "PolynomialLR") or "optim.lr" not in settings:
            message = "needs --learning_rate and a schedule that ends lower: --lr_scheduler_type cosine or polynomial"
            raise ConfigError(Problem("--minimum_learning_rate", message))
        settings["schedule.min_factor"] = least / settings["optim.lr"]
    marks = ("start", "end", "system", "user", "assistant")
    if any(f"posttrain.template.{mark}" in settings for mark in marks):
        settings.setdefault("posttrain.template.kind", "marked")
    return settings


# The flags of DeepSpeed-Chat's `train.py`: `--step 1 2 3 --deployment-type single_node`.


PHASES: Mapping[str, str] = MappingProxyType({"1": "sft", "2": "reward", "3": "ppo"})
"""The phase of each step number."""

DEPLOYMENTS: Mapping[str, str] = MappingProxyType(
    {
        "single_gpu": "one process: `--nproc 1`",
        "single_node": "one process for each GPU of this machine: `--nproc gpu`",
        "multi_node": "as a hostfile says: `plait launch --hostfile FILE`",
    }
)
"""Values of `--deployment-type`, each with what to write for Plait."""

TRAIN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "step": "which steps, in order; `1 2 3` when absent",
        "deployment_type": "where they run",
        "actor_model": "folder of the model that is tuned, `model.path` of steps 1 and 3",
        "reward_model": "folder of the model that judges, `model.path` of step 2; absent: as the tuned one",
        "actor_zero_stage": "`strategy.zero` of steps 1 and 3",
        "reward_zero_stage": "`strategy.zero` of step 2",
        "output_dir": "folder above the `work_dir` of every step",
    }
)
"""Every flag of `train.py`, without its dashes."""

_SIZES = ("350m", "1.3b", "6.7b", "13b", "66b")


@dataclass(frozen=True, slots=True)
class DeepSpeedChatSteps:
    """The arguments of a `train.py` command line."""

    phases: tuple[str, ...] = tuple(PHASES.values())
    deployment: str = "single_gpu"
    actor_model: str | None = None
    reward_model: str | None = None
    actor_zero: int | None = None
    reward_zero: int | None = None
    output_dir: str = "output"

    @property
    def nproc(self) -> str | None:
        """The number of processes on this machine (`--nproc`); None if a hostfile decides it."""
        return {"single_gpu": "1", "single_node": "gpu"}.get(self.deployment)

    def settings(self, phase: str) -> list[str]:
        """Return the overrides for one phase. Phases after the first start from the model that step 1 has tuned."""
        reward = phase == "reward"
        model = (self.reward_model if reward else None) or self.actor_model
        zero = self.reward_zero if reward else self.actor_zero
        overrides = [f"work_dir={self.output_dir}/{phase}"]
        if model is not None:
            overrides += ["model.type=hf", f"model.path={model}"]
        if zero is not None:
            overrides.append(f"strategy.zero={zero}")
        # A reward model of another kind starts from its own weights.
        if phase != "sft" and not (reward and self.reward_model is not None):
            overrides.append(f"posttrain.start={self.output_dir}/sft")
        return overrides


def read_steps(arguments: Sequence[str]) -> DeepSpeedChatSteps:
    """Return the arguments of a `train.py` command line; raise `ConfigError` for an unknown flag or value."""
    given = read_flags(arguments, TRAIN_FLAGS)
    steps = given.get("step", list(PHASES))
    for step in steps or [""]:
        if step not in PHASES:
            raise ConfigError(Problem("--step", f"{step!r} is none of {', '.join(PHASES)}"))
    deployment = _one(given, "deployment_type") or "single_gpu"
    if deployment not in DEPLOYMENTS:
        raise ConfigError(Problem("--deployment-type", f"{deployment!r}", choose(deployment, DEPLOYMENTS, "word")))
    return DeepSpeedChatSteps(
        phases=tuple(PHASES[step] for step in sorted(set(steps))),
        deployment=deployment,
        actor_model=_model_of(given, "actor_model"),
        reward_model=_model_of(given, "reward_model"),
        actor_zero=_stage(given, "actor_zero_stage"),
        reward_zero=_stage(given, "reward_zero_stage"),
        output_dir=_one(given, "output_dir") or "output",
    )


def _one(given: Mapping[str, Sequence[str]], name: str) -> str | None:
    values = given.get(name)
    if values is None:
        return None
    if len(values) != 1:
        raise ConfigError(Problem(f"--{name.replace('_', '-')}", f"{len(values)} values where one is expected"))
    return values[0]


def _model_of(given: Mapping[str, Sequence[str]], name: str) -> str | None:
    value = _one(given, name)
    if value is not None and value.rpartition("-")[2].lower() in _SIZES and "/" not in value.rstrip("/"):
        message = f"{value!r} is a size, and nothing is downloaded here"
        raise ConfigError(Problem(f"--{name.replace('_', '-')}", message, "Give the folder of a model."))
    return value


def _stage(given: Mapping[str, Sequence[str]], name: str) -> int | None:
    value = _one(given, name)
    if value is None:
        return None
    if value not in ("0", "1", "2", "3"):
        raise ConfigError(
            Problem(f"--{name.replace('_', '-')}", f"{value!r} is not a ZeRO stage", "Write 0, 1, 2 or 3.")
        )
    return int(value)


def steps_of_flags(steps: DeepSpeedChatSteps) -> Wanted:
    """Return the three steps of `train.py`, with default run descriptions."""
    if steps.actor_model is None:
        message = "neither run descriptions nor a model are given"
        raise ConfigError(Problem("--actor-model", message, "Give files, or the folder of a model."))
    return Wanted(tuple(PhaseDescription(phase, DEFAULTS) for phase in PHASES.values()), steps.output_dir)


def with_train_flags(wanted: Wanted, steps: DeepSpeedChatSteps, given: Sequence[str]) -> Wanted:
    """Return the steps with the flags of `train.py` applied; `given` are those on the command line."""
    numbers = {number for number, phase in PHASES.items() if phase in steps.phases}
    described = []
    for number, step in enumerate(wanted.steps, start=1):
        # The folders of steps, and what each starts from, are set later, when all steps are known.
        settings = [key for key in steps.settings(step.phase) if not key.startswith(("work_dir=", "posttrain."))]
        chosen = str(number) in numbers if "step" in given else True
        described.append(replace(step, settings=(*step.settings, *settings), chosen=chosen))
    moved = "output_dir" in given
    return Wanted(tuple(described), steps.output_dir if moved else wanted.output_dir, moved)
