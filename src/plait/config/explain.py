"""Messages for settings that the schema refused: the path as the user wrote it, the value, what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from plait.config import schema
from plait.config.base import RefusedError, Section, Shorthand
from plait.config.part import BUILTIN_TAG, CUSTOM_TAG, CustomPart, choose_type
from plait.config.run import RunConfig
from plait.config.schema import dotted, origin_of
from plait.config.text import choose, listed, nearest, show
from plait.errors import Problem

# Keys of other frameworks → the Plait key with the same meaning.


_FOREIGN_KEYS = {
    # DeepSpeed
    "train_batch_size": "batch.total",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "train.clip_norm",
    "zero_optimization": "strategy.zero",
    "stage": "strategy.zero",
    "reduce_bucket_size": "strategy.bucket_mb",
    "fp16": "precision (`precision: fp16`; its loss scale is `precision.scaler`)",
    "bf16": "precision (`precision: bf16`)",
    "amp": "precision (`precision: bf16` or `fp16`)",
    "torch_autocast": "precision",
    "communication_data_type": "precision.reduce",
    "initial_scale_power": "precision.scaler.initial_power",
    "loss_scale": "precision.scaler.static",
    "loss_scale_window": "precision.scaler.window",
    "min_loss_scale": "precision.scaler.minimum",
    "optimizer": "optim",
    "params": "the section itself (`optim: {type: AdamW, lr: 1e-3}`)",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "activation_checkpointing": "strategy.recompute",
    "steps_per_print": "log.every",
    "tensorboard": "log.sinks (`log: {sinks: [tensorboard]}`)",
    "csv_monitor": "log.sinks (`log: {sinks: [csv]}`)",
    "wandb": "log.sinks (`log: {sinks: [wandb]}`)",
    # PyTorch FSDP and Accelerate
    "fsdp": "strategy (`strategy: fsdp`)",
    "fsdp_config": "strategy (`strategy: {sharding: FULL_SHARD}`)",
    "sharding_strategy": "strategy.sharding",
    "fsdp_sharding_strategy": "strategy.sharding",
    "auto_wrap_policy": "strategy.wrap",
    "fsdp_transformer_layer_cls_to_wrap": "strategy.wrap.classes",
    "mixed_precision": "precision",
    "mp_policy": "precision",
    "distributed_type": "strategy",
    "deepspeed_config": "strategy (`strategy: zero3`)",
    "dynamo_config": "strategy.compile",
    # Transformers
    "output_dir": "work_dir",
    "learning_rate": "optim.lr",
    "per_device_train_batch_size": "batch.micro",
    "num_train_epochs": "train.max_epochs",
    "max_grad_norm": "train.clip_norm",
    "lr_scheduler_type": "schedule.type",
    "warmup_steps": "schedule.warmup",
    "gradient_checkpointing": "strategy.recompute",
    "torch_compile": "strategy.compile",
    "logging_steps": "log.every",
    "eval_steps": "train.val_every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "report_to": "log.sinks",
    # MMEngine
    "work_dirs": "work_dir",
    "train_cfg": "train",
    "val_cfg": "train.val_every",
    "val_interval": "train.val_every",
    "max_iters": "train.max_steps",
    "train_dataloader": "data (with `batch.micro` for its batch size)",
    "val_dataloader": "val_data",
    "test_dataloader": "test_data",
    "optim_wrapper": "optim (with `train.clip_norm`, `batch.accumulation` and `precision` for the rest of it)",
    "clip_grad": "train.clip_norm",
    "accumulative_counts": "batch.accumulation",
    "param_scheduler": "schedule",
    "model_wrapper_cfg": "strategy",
    "default_hooks": "log and checkpoint",
    "custom_hooks": "hooks",
    "visualizer": "log.sinks",
    "randomness": "seed and deterministic",
    "env_cfg": "backend",
    "load_from": "checkpoint.resume",
    "max_keep_ckpts": "checkpoint.keep",
    # Lightning
    "accelerator": "device",
    "accumulate_grad_batches": "batch.accumulation",
    "gradient_clip_val": "train.clip_norm",
    "callbacks": "hooks",
    "default_root_dir": "work_dir",
    "log_every_n_steps": "log.every",
    # torchtitan
    "parallelism": "strategy.layout",
    "activation_checkpoint": "strategy.recompute",
    "training": "train and batch",
    "metrics": "log",
    "data_parallel_shard_degree": "strategy.layout.dp_shard",
    "data_parallel_replicate_degree": "strategy.layout.dp_replicate",
    "tensor_parallel_degree": "strategy.layout.tp",
    "pipeline_parallel_degree": "strategy.layout.pp",
    "context_parallel_degree": "strategy.layout.cp",
    "expert_parallel_degree": "strategy.layout.ep",
    "pipeline_parallel_schedule": "strategy.pipeline.schedule",
    # Megatron
    "tensor_model_parallel_size": "strategy.layout.tp",
    "pipeline_model_parallel_size": "strategy.layout.pp",
    "context_parallel_size": "strategy.layout.cp",
    "expert_model_parallel_size": "strategy.layout.ep",
    "sequence_parallel": "strategy.tensor.sequence_parallel",
}


def plait_key(foreign: str) -> str | None:
    """Return a sentence with Plait's key for another framework's key; None for an unknown one."""
    key = _FOREIGN_KEYS.get(foreign)
    if key is None:
        return None
    name, bracket, rest = key.partition(" (")
    names = " and ".join(f"`{plait_name}`" for plait_name in name.split(" and "))
    return f"In Plait this is {names}{bracket}{rest}."


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True)
class _Error:
    """One validation error, at the path as the user knows it."""

    code: str
    keys: tuple[Any, ...]
    annotation: Any
    """The annotation of what is allowed at `keys`; None for an unknown key."""
    section: type[Section]
    """The section that the last key is in."""
    value: Any
    context: Mapping[str, Any]
    message: str
    """pydantic's own message, for types of errors that have no other."""
    root: type[Section]
    """The section of the whole file."""


def explain(error: ValidationError, written: Mapping[str, str], origins: Mapping[str, str]) -> list[Problem]:
    """Return one problem for each path of a run description that the schema refused."""
    problems = []
    for path, message, remedy in _explained(error, RunConfig):
        path = written.get(path, path)
        problems.append(Problem(path, message, remedy, origin_of(path, origins)))
    return problems


def explain_section(error: ValidationError, root: type[Section], whole: str, origin: str = "") -> list[Problem]:
    """Return the same for a file of another section; `whole` is the path of problems of no single key."""
    return [Problem(path or whole, message, remedy, origin) for path, message, remedy in _explained(error, root)]


def _explained(error: ValidationError, root: type[Section]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, message, remedy) for each path with an error."""
    errors_at: dict[str, list[_Error]] = {}
    for raw in error.errors(include_url=False):
        located = _located(raw, root)
        errors_at.setdefault(dotted(located.keys), []).append(located)
    for path, errors in errors_at.items():
        yield _problem(path, errors)


def _located(raw: Any, root: type[Section]) -> _Error:
    """Return an error with the path of keys in the file: without the tags and union members in pydantic's path."""
    keys: tuple[Any, ...] = ()
    annotation: Any = root
    owner = root
    for step in raw["loc"]:
        choices = schema.sections(annotation)
        entered = annotation if annotation in choices.values() else choices.get("")
        if entered is not None:
            owner, info = entered, entered.model_fields.get(step)
            keys, annotation = (*keys, step), info.annotation if info else None
        elif step in choices:
            annotation = choices[step]
        elif step == BUILTIN_TAG and len(choices) == 1:  # a union of one section has no tag for it
            annotation = next(iter(choices.values()))
        elif step == CUSTOM_TAG and (opened := schema.custom_section(annotation)) is not None:
            annotation = owner = opened
        elif step != BUILTIN_TAG and not choices and (opened := schema.custom_section(annotation)) is not None:
            owner, info = opened, opened.model_fields.get(step)
            keys, annotation = (*keys, step), info.annotation if info else None
        elif isinstance(step, int) and schema.items(annotation):
            keys, annotation = (*keys, step), schema.item(annotation, step)
    context = raw.get("ctx", {})
    return _Error(raw["type"], keys, annotation, owner, raw["input"], context, raw["msg"], root)


def _problem(path: str, errors: list[_Error]) -> tuple[str, str, str]:
    """Return path, message and remedy for the errors at one path; of a union, for the member with the right type."""
    first = next((error for error in errors if error.code not in _EXPECTED), errors[0])
    if first.code in _EXPECTED:
        message, remedy = _wrong_type(first, [_EXPECTED[error.code] for error in errors])
    elif first.code in ("extra_forbidden", "invalid_key"):
        message, remedy = _unknown_key(first)
    elif first.code in ("union_tag_invalid", "union_tag_not_found"):
        message, remedy = _wrong_tag(first)
        path = f"{path}.type"
    else:
        message, remedy = _wrong_value(first)
        if first.code == "literal_error" and (others := [_EXPECTED[e.code] for e in errors if e.code in _EXPECTED]):
            remedy = f"It takes {listed([*schema.literals(first.annotation), *dict.fromkeys(others)], 'or')}."
    return path, message, remedy


def _unknown_key(error: _Error) -> tuple[str, str]:
    key = str(error.keys[-1])
    keys = [name for name in error.section.model_fields if name != "type"]
    foreign = plait_key(key) if error.root is RunConfig else None
    hints = [foreign] if foreign else []
    if not hints and (meant := nearest(key, keys)):
        hints.append(f"Did you mean `{meant}`?")
    # If there is a hint for another framework's key, do not also suggest Plait's key with the same name.
    paths = {} if foreign else dict.fromkeys(schema.paths_with_key(key, error.root))
    section_path = dotted(error.keys[:-1])
    tag = _tag(error.section)
    if section_path in paths:
        hints.append(f"`{key}` is a key of other types of `{section_path}`, not of {tag}.")
    elif paths:
        shown = [f"`{path}`" if path else "the top level" for path in paths]
        hints.append(f"`{key}` belongs in {listed(shown[:4], 'or')}.")
    whose = f" of {tag}" if tag else f" of `{section_path}`" if section_path else ""
    if not hints:
        hints.append(f"The keys{whose} are {listed(keys)}.")
    value = f", with the value {show(error.value)}" if error.code == "extra_forbidden" else ""
    return f"unknown key{whose}{value}", " ".join(hints)


def _wrong_tag(error: _Error) -> tuple[str, str]:
    tags, custom = list(schema.sections(error.annotation)), schema.custom_section(error.annotation)
    if error.code == "union_tag_not_found":
        or_custom = ", or package.module:name for a custom one" if custom else ""
        return "it is missing", f"Write one of {listed(tags, 'or')}{or_custom}."
    tag = error.value.get("type") if isinstance(error.value, Mapping) else error.value
    remedy = choose_type(custom.plugin_kind, tag, tags) if custom else choose(tag, tags, "type")
    return f"unknown type {show(tag)}", remedy


def _wrong_type(error: _Error, expected: list[str]) -> tuple[str, str]:
    value = error.value
    message = f"expected {listed(dict.fromkeys(expected), 'or')}, found {show(value)}"
    choices = schema.sections(error.annotation)
    if value is None:
        return message, "Leave the key out to use its default."
    if isinstance(value, str) and "" not in choices and choices:
        meant = nearest(value, choices)
        return message, f"Write `{{type: {meant}}}`." if meant else choose(value, choices, "type")
    if choices:
        section = next(iter(choices.values()))
        also = " (or write a single word)" if issubclass(section, Shorthand) else ""
        return message, f"Its keys are {listed(section.model_fields)}{also}."
    if isinstance(value, str) and error.code in ("int_type", "float_type", "bool_type"):
        from plait.config.yaml_io import scalar

        if not isinstance(scalar(value), str):
            return message, f"Write it without quotes: {value}."
    if error.code == "string_type" and not isinstance(value, (dict, list, tuple)):
        return message, f'Write it in quotes: "{show(value)}".'
    if error.code == "tuple_type" and isinstance(value, (str, int, float)):
        count = _entries_of(error.annotation)
        return message, f"Write {count} entries in brackets: [{value}, …]." if count else f"Write [{value}]."
    return message, ""


def _entries_of(annotation: Any) -> int | None:
    """Return how many entries a list must have, if that is fixed."""
    annotations = [annotation, *get_args(annotation)]
    fixed = [
        get_args(candidate)
        for candidate in annotations
        if get_origin(candidate) is tuple and Ellipsis not in get_args(candidate)
    ]
    return len(fixed[0]) if fixed else None


def _wrong_value(error: _Error) -> tuple[str, str]:
    error_type, context, value = error.code, error.context, error.value
    if error_type == "literal_error":
        return f"{show(value)} is not one of its values", choose(value, schema.literals(error.annotation), "value")
    if error_type in _BOUNDS:
        name, comparison = _BOUNDS[error_type]
        bound = context[name]
        return f"expected {comparison} {bound if isinstance(bound, int) else f'{bound:g}'}, found {show(value)}", ""
    if error_type == "finite_number":
        return f"expected a finite number, found {show(value)}", ""
    if error_type == "missing" and isinstance(error.keys[-1], int):
        return f"entry {error.keys[-1]} is missing: found only {show(value)}", ""
    if error_type == "missing" and issubclass(error.section, CustomPart):
        return "it is missing", choose_type(error.section.plugin_kind, None, error.section.builtin)
    if error_type == "missing":
        return "it is missing", f"{_tag(error.section) or 'This section'} needs it."
    if error_type == "too_short":
        return f"expected at least {context['min_length']} entries, found {show(value)}", ""
    if error_type == "too_long":
        return f"expected {context['max_length']} entries, found {show(value)}", ""
    if isinstance(refused := context.get("error"), RefusedError):
        return refused.message, refused.remedy
    if error_type == "value_error":
        return str(context["error"]), ""
    return f"{error.message[0].lower()}{error.message[1:]}, found {show(value)}", ""


def _tag(section: type[Section]) -> str:
    tag = section.model_fields.get("type")
    return str(tag.default) if tag else ""
