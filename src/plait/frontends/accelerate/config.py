"""An `accelerate` YAML as a run description of Plait, with an account of every key. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.config import read, whole_number
from plait.errors import ConfigError, Problem
from plait.frontends import Translation
from plait.frontends.accelerate.fsdp import read_fsdp
from plait.frontends.accelerate.parts import (
    read_deepspeed,
    read_dynamo,
    read_megatron,
    read_mpirun,
    read_parallelism,
    set_precision,
)
from plait.frontends.accelerate.words import Reader, Words, answered, switched_off
from plait.launch import Machines

_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
_DEVICES = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
_KINDS = (*_PLAIN, "FSDP", "DEEPSPEED", "MEGATRON_LM", *_DEVICES)
_SECTION_OF = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}


def translate(source: str | Path | Mapping[str, Any]) -> Translation:
    """The run description that an Accelerate configuration stands for, and what became of each of its keys.

    Raises `ConfigError` for keys and values that Accelerate itself does not know. What Plait cannot do is in the
    account; `account.raise_refusals()` makes an error of it.
    """
    config = read(source)
    words = Words()
    kind = _kind(words, config)
    if kind in _PLAIN:
        words.set("strategy.zero", 0)
    elif kind == "FSDP":
        words.set("strategy.sharding", "FULL_SHARD")
    # Sections of other kinds are asked for by nobody: Accelerate leaves them unread, and so does this.
    silent = {name for owner, name in _SECTION_OF.items() if owner != kind}
    for name in silent & config.keys():
        words.unneeded(name, config[name], f"not read, there as here: distributed_type is {kind}")
    words.read({name: value for name, value in config.items() if name not in silent}, READERS)
    if kind == "DEEPSPEED":
        _compare_precision(words, config)
    return words.translation()


def _compare_precision(words: Words, config: Mapping[str, Any]) -> None:
    """With Accelerate, DeepSpeed's section stays as it is beside `mixed_precision`: off, it trains in fp32 unsaid."""
    asked, section = str(config.get("mixed_precision")).lower(), config.get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    if asked not in ("fp16", "bf16") or file in (None, "none"):
        return
    from plait.frontends.deepspeed import read_config

    theirs = read_config(file).get(asked)
    if theirs is not None and str(theirs.get("enabled", False)).lower() == "false":
        message = f"{asked}, and `{asked}.enabled` of the DeepSpeed configuration does not switch it on"
        words.wrong("mixed_precision", message, f"Write 'auto' in its section `{asked}`, or leave the section out.")


def is_accelerate(config: Mapping[str, Any]) -> bool:
    """Whether a mapping is one of Accelerate's configurations, and none of Plait's."""
    return "distributed_type" in config or "compute_environment" in config


def processes(config: Mapping[str, Any]) -> int | None:
    """How many processes Accelerate would start on each machine; None where it does not say."""
    count = config.get("num_processes")
    return count // _machine_count(config) if isinstance(count, int) and count > 0 else None


def machines(config: Mapping[str, Any]) -> Machines | None:
    """The machines of a configuration; None for this one alone. Raises `ConfigError` where they could not meet."""
    problems = [
        Problem(key, f"{value!r}: `plait train` starts ranks on this machine only", remedy)
        for key, value, remedy in _elsewhere(config)
    ]
    count = _machine_count(config)
    rank, address, port, total = (
        config.get(key) for key in ("machine_rank", "main_process_ip", "main_process_port", "num_processes")
    )
    if count > 1 and not problems:
        if not isinstance(rank, int) or not 0 <= rank < count:
            remedy = f"Write 0 to {count - 1}, another number in the file of each machine."
            problems.append(Problem("machine_rank", f"{rank!r}, and num_machines is {count}", remedy))
        if not address:
            remedy = "Write the address of the machine whose machine_rank is 0."
            problems.append(Problem("main_process_ip", f"there is none, and num_machines is {count}", remedy))
        if port is not None and not 0 < (whole_number(str(port)) or 0) < 1 << 16:
            remedy = "Write one that is free on the machine whose machine_rank is 0, from 1 to 65535."
            problems.append(Problem("main_process_port", f"{port!r} is not a port", remedy))
        if isinstance(total, int) and total % count:
            remedy = f"Write a multiple of {count}: each machine starts as many."
            problems.append(Problem("num_processes", f"{total}, and num_machines is {count}", remedy))
    if problems:
        raise ConfigError(problems)
    if count == 1:
        return None
    found = Machines(count, int(rank or 0), str(address))
    return found if port is None else replace(found, port=int(port))


def _machine_count(config: Mapping[str, Any]) -> int:
    count = config.get("num_machines")
    return count if isinstance(count, int) and count > 0 else 1


def _elsewhere(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys that name other machines, which Accelerate reaches from this one."""
    for section, key in (("deepspeed_config", "deepspeed_hostfile"), ("mpirun_config", "mpirun_hostfile")):
        named = config.get(section)
        hostfile = named.get(key) if isinstance(named, Mapping) else None
        if hostfile:
            remedy = f"Start with `plait launch --hostfile {hostfile} --no_python plait train …`, or leave it out."
            yield f"{section}.{key}", hostfile, remedy


def as_overrides(sections: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Sections as they would stand on a command line: `strategy.zero=3`."""
    found: list[str] = []
    for name, value in sections.items():
        if isinstance(value, Mapping):
            found += as_overrides(value, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}={json.dumps(value)}")
    return found


def _kind(words: Words, config: Mapping[str, Any]) -> str:
    value = config.get("distributed_type", "NO")
    word = "NO" if value is False else words.word("distributed_type", value, _KINDS)  # YAML reads a bare NO as false
    return word or "NO"


def _distributed_type(words: Words, key: str, value: Any) -> None:
    kind = "NO" if value is False else str(value).upper()
    if kind in _DEVICES:
        words.refused(key, value, "Plait runs on CPU, CUDA and XPU; write MULTI_GPU or MULTI_CPU")
    elif kind in _PLAIN:
        words.honoured(key, value, "strategy.zero: 0 (replicas)")
    else:
        words.honoured(key, value, f"the strategy is as {_SECTION_OF.get(kind)} says")


def _compute_environment(words: Words, key: str, value: Any) -> None:
    if str(value).upper() == "LOCAL_MACHINE":
        words.honoured(key, value, "this machine")
    else:
        words.refused(key, value, "write LOCAL_MACHINE; hosts of a cluster are reached by `plait launch`")


def _mixed_precision(words: Words, key: str, value: Any) -> None:
    if value in (None, False) or str(value).lower() == "no":
        words.honoured(key, value, "precision: fp32")
        return
    word = words.word(key, value, ("no", "fp16", "bf16", "fp8"))
    if word == "fp8":
        words.refused(
            key,
            value,
            "write bf16: Accelerate's 8-bit backends are not used here; a run description has `precision: fp8`",
        )
    elif word is not None:
        set_precision(words, key, word)
        words.honoured(key, value, f"precision.compute: {word}, with fp32 weights in the optimizer")


def _old_fp16(words: Words, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("precision.compute", "fp16")
        words.mapped(key, value, "the old word for mixed_precision: fp16; precision.compute: fp16")
    else:
        words.unneeded(key, value, "off, as here")


def _old_dynamo(words: Words, key: str, value: Any) -> None:
    read_dynamo(words, key, {"dynamo_backend": value})


def _use_cpu(words: Words, key: str, value: Any) -> None:
    if words.flag(key, value):
        words.set("device", "cpu")
        words.honoured(key, value, "device: cpu")
    else:
        words.honoured(key, value, "device: auto")


def _num_processes(words: Words, key: str, value: Any) -> None:
    if value != -1 and words.count(key, value) is None:
        return
    meaning = (
        "`plait train` starts its share for this machine, unless --nproc is given; `plait launch --nproc_per_node`"
    )
    words.mapped(key, value, meaning)


def _num_machines(words: Words, key: str, value: Any) -> None:
    number = words.count(key, value)
    if number == 1:
        words.honoured(key, value, "this machine")
    elif number is not None:
        meaning = "`plait train --accelerate-config`, run on each machine, starts the ranks of that one"
        words.honoured(key, value, f"{meaning}; `plait launch --hostfile` starts all of them")


def _gpu_ids(words: Words, key: str, value: Any) -> None:
    if value in (None, "all"):
        words.unneeded(key, value, "all devices, as here")
    else:
        words.refused(key, value, f"start with CUDA_VISIBLE_DEVICES={value}")


_MEETING = answered("mapped", "of several machines; also `plait launch --node_rank`, `--master_addr`, `--master_port`")
_SAGEMAKER = answered("refused", "Amazon SageMaker's own; start the processes there with `plait launch`")
_TPU = switched_off("there are no TPUs here")

READERS: dict[str, Reader] = {
    "compute_environment": _compute_environment,
    "distributed_type": _distributed_type,
    "mixed_precision": _mixed_precision,
    "use_cpu": _use_cpu,
    "debug": answered("mapped", "a collective that ranks disagree about is always named, with the rank that waits"),
    "num_processes": _num_processes,
    "num_machines": _num_machines,
    "machine_rank": _MEETING,
    "main_process_ip": _MEETING,
    "main_process_port": _MEETING,
    "rdzv_backend": _MEETING,
    "same_network": _MEETING,
    "gpu_ids": _gpu_ids,
    "main_training_function": answered("unneeded", "a script is run as it is"),
    "enable_cpu_affinity": answered("mapped", "`plait launch --bind_cores_to_rank`"),
    "fsdp_config": read_fsdp,
    "deepspeed_config": read_deepspeed,
    "parallelism_config": read_parallelism,
    "megatron_lm_config": read_megatron,
    "mpirun_config": read_mpirun,
    "dynamo_config": read_dynamo,
    "fp8_config": switched_off("Accelerate's 8-bit backends are not used here; a run description has `precision: fp8`"),
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    # of older versions
    "fp16": _old_fp16,
    "dynamo_backend": _old_dynamo,
    # of the other compute environment
    **dict.fromkeys(
        (
            "ec2_instance_type",
            "iam_role_name",
            "image_uri",
            "profile",
            "region",
            "base_job_name",
            "pytorch_version",
            "transformers_version",
            "py_version",
            "sagemaker_inputs_file",
            "sagemaker_metrics_file",
            "additional_args",
        ),
        _SAGEMAKER,
    ),
}
