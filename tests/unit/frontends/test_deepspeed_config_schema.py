"""Every key that the installed DeepSpeed reads has an answer."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config import parse
from plait.errors import ConfigError
from plait.frontends.deepspeed.config import translate
from plait.frontends.deepspeed.config.translate import KEYS

deepspeed = pytest.importorskip("deepspeed")

MODELS = {
    "zero_optimization": "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "fp16": "deepspeed.runtime.precision_config.DeepSpeedFP16Config",
    "bf16": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "hybrid_engine": "deepspeed.runtime.config.HybridEngineConfig",
    "compile": "deepspeed.compile.config.CompileConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig",
    "timers.throughput": "deepspeed.utils.config.DeepSpeedThroughputTimerConfig",
    "comms_logger": "deepspeed.comm.config.CommsLoggerConfig",
    "tensorboard": "deepspeed.monitor.config.TensorBoardConfig",
    "wandb": "deepspeed.monitor.config.WandbConfig",
    "csv_monitor": "deepspeed.monitor.config.CSVConfig",
    "comet": "deepspeed.monitor.config.CometConfig",
    "weight_quantization": "deepspeed.inference.config.WeightQuantConfig",
}
SECTIONS = (
    "torch_autocast",
    "activation_checkpointing",
    "flops_profiler",
    "aio",
    "checkpoint",
    "checkpoint.writer",
    "checkpoint.parallel_write",
    "data_types",
    "expert_parallel",
    "autotuning",
    "timers",
    "data_efficiency",
)
"""Read key by key rather than by a model; what is read is seen by handing over mappings that remember."""


class Asked(dict[str, Any]):
    """A mapping that remembers what it was asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keys_asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __copy__(self) -> Asked:
        return self

    def keys(self) -> Any:
        outer = self

        class Keys:
            def __contains__(self, key: object) -> bool:
                return key in outer

            def __iter__(self) -> Iterator[str]:
                return iter(dict(outer))

        return Keys()


def load(path: str) -> Any:
    import importlib

    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def sample(annotation: Any, default: Any) -> Any:
    """Some value that DeepSpeed would take for a field."""
    from enum import Enum

    import torch

    origin = typing.get_origin(annotation)
    if default is not None and isinstance(default, bool | int | float | str) and not isinstance(default, Enum):
        return default
    if isinstance(default, torch.dtype):
        return "fp16"
    if origin is typing.Union:
        return sample(next(each for each in typing.get_args(annotation) if each is not type(None)), None)
    if origin is typing.Literal:
        return typing.get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation)).value
    if hasattr(annotation, "model_fields") or annotation in (dict, typing.Any) or origin is dict:
        return {}
    values = {bool: True, int: 1, float: 0.5, str: "word", Path: "folder", list: [], tuple: []}
    return values.get(origin or annotation, "word")


def fields(path: str, model: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a model and of those inside it, under each of its names."""
    for name, field in model.model_fields.items():
        inner = [
            each for each in (field.annotation, *typing.get_args(field.annotation)) if hasattr(each, "model_fields")
        ]
        for each in {name, field.alias or name}:
            if inner:
                yield from fields(f"{path}.{each}", inner[0])
            else:
                yield f"{path}.{each}", sample(field.annotation, field.get_default(call_default_factory=True))


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def unknown(section: str) -> set[str]:
    """What is said of a key of this section that nobody has."""
    try:
        translate(nested(f"{section}.nobody_has_this" if section else "nobody_has_this", 1))
    except ConfigError as error:
        return {problem.message for problem in error.problems}
    return set()


def answered(path: str, value: Any) -> bool:
    """Whether the key, or the section that it is in, stands in the account; or an error names it."""
    try:
        entries = {entry.key for entry in translate(nested(path, value)).report.entries}
    except ConfigError as error:
        if {problem.message for problem in error.problems} & unknown(path.rpartition(".")[0]):
            return False
        entries = {problem.path for problem in error.problems}
    return any(path == each or path.startswith(f"{each}.") for each in entries)


@pytest.mark.parametrize("section", MODELS)
def test_every_field_of_a_model_of_deepspeed_has_an_answer(section: str) -> None:
    missing = [path for path, value in fields(section, load(MODELS[section])) if not answered(path, value)]
    assert not missing


def asked_for() -> dict[str, set[str]]:
    """What DeepSpeed asks its configuration for, section by section."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = Asked(
        {"train_batch_size": 1, "optimizer": Asked({"type": "Adam"}), "scheduler": Asked({"type": "WarmupLR"})}
    )
    places = {"": config, "optimizer": config["optimizer"], "scheduler": config["scheduler"]}
    for path in SECTIONS:
        *sections, last = path.split(".")
        place = config
        for name in sections:
            place = dict.__getitem__(place, name)
        dict.__setitem__(place, last, Asked())
        places[path] = dict.__getitem__(place, last)
    config["expert_parallel"]["enabled"] = False
    DeepSpeedConfig(config)
    return {path: place.keys_asked for path, place in places.items()}


def test_every_key_that_deepspeed_asks_for_has_an_answer() -> None:
    asked = asked_for()
    assert len(asked[""]) > 50
    assert not asked[""] - KEYS
    assert {"type", "params", "legacy_fusion"} >= asked["optimizer"] >= {"type"}
    words: dict[str, Any] = {"dtype": "bf16", "opt_level": "O1", "writer": {}, "parallel_write": {}, "throughput": {}}
    missing = []
    for path in SECTIONS:
        assert asked[path], f"DeepSpeed did not look into {path}"
        for key in asked[path] - {"writer", "parallel_write", "throughput"}:
            candidates = (words.get(key), 1, True, 0.5, "word", {})
            if not any(answered(f"{path}.{key}", each) for each in candidates if each is not None):
                missing.append(f"{path}.{key}")
    assert not missing


def test_every_removed_key_has_an_answer() -> None:
    from deepspeed.runtime import config

    assert not set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) - KEYS
    for key in config._REMOVED_ZERO_CONFIG_KEYS:
        assert any(answered(f"zero_optimization.{key}", value) for value in (1, True, {}))


def defaults(function: Any) -> dict[str, Any]:
    import inspect

    return {each.name: each.default for each in inspect.signature(function).parameters.values()}


def test_what_an_optimizer_leaves_out_is_deepspeeds_default() -> None:
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import FusedLion

    ours = {"max_coeff": "max_trust", "min_coeff": "min_trust"}
    for kind, built in (
        ("Adam", FusedAdam),
        ("Lamb", FusedLamb),
        ("Lion", FusedLion),
        ("Adagrad", torch.optim.Adagrad),
        ("SGD", torch.optim.SGD),
    ):
        optim = parse(translate({"optimizer": {"type": kind}}).sections).config.optim
        theirs = {ours.get(name, name): default for name, default in defaults(built).items()}
        for name in type(optim).model_fields.keys() & theirs.keys() - {"implementation"}:
            assert getattr(optim, name) == theirs[name], (kind, name)


def test_what_a_schedule_leaves_out_is_deepspeeds_default() -> None:
    from deepspeed.runtime import lr_schedules

    for name in lr_schedules.VALID_LR_SCHEDULES:
        needed = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} if name == "OneCycle" else {}
        sections = translate({"scheduler": {"type": name, "params": needed}}).sections
        schedule = parse(sections).config.schedule
        for key, default in defaults(getattr(lr_schedules, name)).items():
            if key not in ("optimizer", "last_batch_iteration", "total_num_steps", *needed):
                assert getattr(schedule, key) == default, (name, key)


def test_every_optimizer_and_schedule_of_deepspeed_has_an_answer() -> None:
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    for name in DEEPSPEED_OPTIMIZERS:
        assert answered("optimizer.type", name)
    for name in lr_schedules.VALID_LR_SCHEDULES:
        parameters = list(defaults(getattr(lr_schedules, name)))[1:]
        values = dict.fromkeys(parameters, "auto")
        if name == "OneCycle":
            values |= {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
        account = translate({"scheduler": {"type": name, "params": values}}).report
        assert {f"scheduler.params.{key}" for key in parameters} <= {entry.key for entry in account.entries}
