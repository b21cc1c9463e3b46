"""An `accelerate` YAML in Plait's words: every key has one of four answers, and none is dropped."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from tests.refusals import refused

from plait.config import parse_sections
from plait.errors import ConfigError
from plait.frontends.accelerate.config import (
    DEEPSPEED,
    DYNAMO,
    MEGATRON,
    PARALLELISM,
    READERS,
    as_overrides,
    is_accelerate,
    processes,
    translate,
)
from plait.frontends.accelerate.config import FSDP_READERS as FSDP
from plait.frontends.key_report import KeyOutcome

SEEDS = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP # 使用FSDP的配置
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def answers(sections: Any) -> dict[str, KeyOutcome]:
    return {entry.key: entry.outcome for entry in translate(sections).report.entries}


def test_the_fsdp_file_of_the_documents_is_taken_key_for_key(tmp_path: Path) -> None:
    file = tmp_path / "acc.yaml"
    file.write_text(SEEDS)
    found = translate(file)
    assert found.sections == {
        "strategy": {"sharding": "FULL_SHARD", "wrap": {"classes": ["BertLayer"]}},
        "precision": {"compute": "bf16"},
    }
    assert len(found.report.entries) == SEEDS.count(":") - 1  # `fsdp_config` is answered through its keys
    assert not list(found.report.of(KeyOutcome.REFUSED))
    assert processes({"num_processes": 2}) == 2
    assert as_overrides(found.sections) == [
        'strategy.sharding="FULL_SHARD"',
        'strategy.wrap.classes=["BertLayer"]',
        'precision.compute="bf16"',
    ]


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({"distributed_type": "MULTI_GPU"}, {"zero": 0}),
        ({"distributed_type": False}, {"zero": 0}),  # a bare NO, as YAML reads it
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, {"sharding": "FULL_SHARD"}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
            {"sharding": "SHARD_GRAD_OP"},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 4, "fsdp_min_num_params": 1000}},
            {"sharding": "HYBRID_SHARD", "wrap": {"min_params": 1000}},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True, "fsdp_forward_prefetch": True}},
            {"sharding": "FULL_SHARD", "offload": {"optimizer": "cpu", "params": "cpu"}, "forward_prefetch": 1},
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True},
                "parallelism_config": {
                    "parallelism_config_dp_shard_size": 2,
                    "parallelism_config_tp_size": 2,
                    "parallelism_config_cp_size": 2,
                    "parallelism_config_cp_comm_strategy": "alltoall",
                },
            },
            {
                "sharding": "FULL_SHARD",
                "recompute": {"mode": "full"},
                "layout": {"dp_shard": 2, "tp": 2, "cp": 2},
                "context": {"kind": "ring"},
            },
        ),
        (
            {
                "distributed_type": "MULTI_GPU",
                "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True},
            },
            {"zero": 0, "compile": {"enabled": True, "backend": "inductor", "scope": "block"}},
        ),
        (
            {"distributed_type": "MULTI_CPU", "dynamo_config": {"dynamo_backend": "NO", "dynamo_mode": "default"}},
            {"zero": 0, "compile": {"enabled": False}},
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": {
                    "megatron_lm_tp_degree": 2,
                    "megatron_lm_pp_degree": 2,
                    "megatron_lm_num_micro_batches": 4,
                    "megatron_lm_use_distributed_optimizer": True,
                },
            },
            {"layout": {"tp": 2, "pp": 2}, "pipeline": {"micro_batches": 4}, "zero": 1},
        ),
    ],
)
def test_what_accelerate_spreads_is_spread_alike(given: dict[str, Any], strategy: dict[str, Any]) -> None:
    found = translate(given)
    found.report.raise_refusals()
    assert found.sections["strategy"] == strategy
    parse_sections(**found.sections)  # and is a run description


def test_deepspeed_sections_get_the_answers_of_deepspeed_files(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "deepspeed_config": {
            "zero_stage": 3,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "none",
            "zero3_init_flag": True,
        },
    }
    found = translate(given)
    assert found.sections["strategy"]["zero"] == 3
    assert found.sections["batch"] == {"accumulation": 4}
    assert found.sections["train"] == {"clip_norm": 1.0}
    assert answers(given)["deepspeed_config.zero_stage"] == KeyOutcome.HONOURED
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    from_file = translate({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}})
    assert from_file.sections["strategy"]["zero"] == 2
    assert from_file.sections["precision"]["compute"] == "bf16"
    with refused(ConfigError, "deepspeed_config_file", key="deepspeed_config.zero_stage"):
        translate(
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"deepspeed_config_file": str(file), "zero_stage": 3},
            }
        )


@pytest.mark.parametrize(
    ("given", "key", "names"),
    [
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_ofload_params": True}},
            "fsdp_config.fsdp_ofload_params",
            ["`fsdp_offload_params`"],
        ),
        ({"mixed_precison": "bf16"}, "mixed_precison", ["`mixed_precision`"]),
        ({"distributed_type": "FSPD"}, "distributed_type", ["'FSPD'", "`FSDP`"]),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL"}},
            "fsdp_config.fsdp_sharding_strategy",
            ["'FULL'", "`FULL_SHARD`"],
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}},
            "fsdp_config.fsdp_auto_wrap_policy",
            ["SIZE_BASED_WRAP", "fsdp_min_num_params"],
        ),
        ({"num_processes": "two"}, "num_processes", ["'two'"]),
        ({"use_cpu": "maybe"}, "use_cpu", ["'maybe'", "true", "false"]),
    ],
)
def test_a_mistake_is_an_error_with_a_suggestion(given: dict[str, Any], key: str, names: list[str]) -> None:
    with refused(ConfigError, *names, key=key):
        translate(given)


@pytest.mark.parametrize(
    "given",
    [
        {"mixed_precision": "fp8"},
        {"distributed_type": "XLA"},
        {"gpu_ids": "0,1"},
        {"compute_environment": "AMAZON_SAGEMAKER"},
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": "head"}},
    ],
)
def test_what_cannot_be_had_is_refused_by_name(given: dict[str, Any]) -> None:
    account = translate(given).report
    with refused(ConfigError, key=next(iter(account.of(KeyOutcome.REFUSED))).key):
        account.raise_refusals()


def test_no_key_of_accelerate_is_without_an_answer() -> None:
    args = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate import ParallelismConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin

    for config in (args.ClusterConfig, args.SageMakerConfig):
        missing = {field.name for field in dataclasses.fields(config)} - READERS.keys()
        assert not missing, f"{config.__name__}: {missing}"
    flags = {name for action in launch_command_parser()._actions for name in action.option_strings}
    for readers, prefix in ((FSDP, "--fsdp_"), (MEGATRON, "--megatron_lm_"), (DYNAMO, "--dynamo_")):
        names = {flag.removeprefix("--") for flag in flags if flag.startswith(prefix)}
        assert names <= readers.keys(), names - readers.keys()
    names = {flag.removeprefix("--") for flag in flags if flag.startswith("--parallelism_config_")}
    assert names <= PARALLELISM.keys(), names - PARALLELISM.keys()
    assert {"zero_stage", "zero3_init_flag", "offload_param_device", "deepspeed_hostfile"} <= DEEPSPEED.keys()
    # Plugins have the same fields as theirs, less what is about objects of FSDP 1.
    from plait.frontends.accelerate.utils import dataclasses as plugins

    objects = {"state_dict_config", "optim_state_dict_config", "param_init_fn"}
    theirs = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)} - objects
    assert theirs == {field.name for field in dataclasses.fields(plugins.FullyShardedDataParallelPlugin)}
    sizes = {field.name for field in dataclasses.fields(plugins.ParallelismConfig)}
    assert sizes <= {field.name for field in dataclasses.fields(ParallelismConfig)}


def test_it_is_known_from_other_files_and_read_without_torch() -> None:
    assert is_accelerate({"distributed_type": "NO"})
    assert not is_accelerate({"strategy": "ddp"})
    code = "import sys, plait.frontends.accelerate.config; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_any_value_of_any_key_is_answered_or_a_named_error() -> None:
    from plait.errors import PlaitError

    values: list[Any] = [None, True, False, 0, 1, -1, 2.5, "", "no", "two", "auto", [], ["a"], {}, {"a": 1}]
    sections = {
        "fsdp_config": ("FSDP", FSDP),
        "deepspeed_config": ("DEEPSPEED", DEEPSPEED),
        "megatron_lm_config": ("MEGATRON_LM", MEGATRON),
        "parallelism_config": ("NO", PARALLELISM),
        "dynamo_config": ("NO", DYNAMO),
    }
    given = [{key: value} for key in READERS for value in values]
    for section, (kind, readers) in sections.items():
        given += [{"distributed_type": kind, section: {key: value}} for key in readers for value in values]
    for config in given:
        try:
            found = translate(config)
            assert len(found.report.entries) >= 1
            parse_sections(**found.sections)
        except PlaitError:
            continue
