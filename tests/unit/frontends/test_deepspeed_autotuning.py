"""DeepSpeed's `autotuning` section, key by key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from tests.refusals import refused

from plait.config import parse
from plait.errors import ConfigError
from plait.frontends.deepspeed.config.autotuning import AUTOTUNING, translate_autotuning
from plait.plan.space import useful_dimensions
from plait.tune.config import space_of

ASK_DEEPSPEED = """
import json
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
class Asked(dict):
    names = set()
    def __contains__(self, name): self.names.add(name); return False
    def get(self, name, default=None): self.names.add(name); return default
DeepSpeedAutotuningConfig({"autotuning": Asked(a=1)})
print("ANSWER" + json.dumps(sorted(Asked.names)))
"""


def test_the_section_of_the_gpt2_example_is_a_search() -> None:
    mappings = {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}
    found = translate_autotuning({"enabled": True, "arg_mappings": mappings}, nproc=16)
    assert found.enabled
    assert (found.config.tuner, found.config.trials, found.config.early_stop) == ("grid", 50, 5)
    assert (found.config.warmup, found.config.steps, found.config.nproc) == (2, 5, 16)
    assert found.config.dimensions == ("zero", "micro")  # `fast` is DeepSpeed's default
    assert [(entry.key, entry.outcome) for entry in found.report.entries] == [
        ("autotuning.enabled", "honoured"),
        ("autotuning.arg_mappings", "unneeded"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("tuner_type", "model_based", "tuner", "model"),
        ("tuner_type", "gridsearch", "tuner", "grid"),
        ("tuner_type", "random", "tuner", "random"),
        ("tuner_early_stopping", 7, "early_stop", 7),
        ("tuner_num_trials", 9, "trials", 9),
        ("metric", "throughput", "metric", "throughput"),
        ("metric", "latency", "metric", "step_time"),
        ("metric", "flops", "metric", "throughput"),
        ("start_profile_step", 5, "warmup", 4),
        ("end_profile_step", 12, "steps", 12),
        ("max_train_micro_batch_size_per_gpu", 8, "micro_max", 8),
        ("min_train_micro_batch_size_per_gpu", 2, "micro_min", 2),
        ("num_tuning_micro_batch_sizes", 6, "micro_count", 6),
        ("mp_size", 2, "space", {"strategy.layout.tp": (2,)}),
        ("fast", True, "dimensions", ("zero", "micro")),
    ],
)
def test_a_key_reaches_the_search(key: str, value: Any, name: str, expected: Any) -> None:
    found = translate_autotuning({key: value})
    assert getattr(found.config, name) == expected
    assert [entry.key for entry in found.report.entries] == [f"autotuning.{key}"]


def test_a_search_that_is_not_fast_varies_all_that_can_pay_offload_too() -> None:
    found = translate_autotuning({"fast": False}, nproc=2)
    assert found.report.entries[0].text == "dimensions: all that can pay on the machine"
    run = parse({"model": {"type": "gpt"}, "batch": {"total": 8}, "device": "cpu"}).config
    assert {"zero", "layout", "recompute", "micro"} <= set(space_of(run, found.config).dimensions)
    assert "offload" in useful_dimensions("cuda")


def test_the_folder_and_what_is_in_it() -> None:
    found = translate_autotuning({"results_dir": "there", "overwrite": True})
    assert (found.out, found.fresh, found.enabled) == ("there", True, False)


@pytest.mark.parametrize(
    ("section", "key", "named"),
    [
        ({"tuner_typ": "random"}, "tuner_typ", ["`tuner_type`"]),
        ({"tuner_type": "xgboost"}, "tuner_type", ["xgboost"]),
        ({"metric": "forward"}, "metric", ["forward", "throughput", "latency"]),
        ({"tuner_num_trials": 0}, "tuner_num_trials", ["0"]),
        ({"mp_size": float("inf")}, "mp_size", ["inf"]),
        ({"metric": ["throughput"]}, "metric", ["[", "throughput"]),
        ({"enabled": "yes"}, "enabled", ["yes"]),
        ({"start_profile_step": 9, "end_profile_step": 5}, "start_profile_step", ["9", "`end_profile_step`", "5"]),
        ({"start_profile_step": 6}, "start_profile_step", ["6", "`end_profile_step`", "5"]),
        ({"end_profile_step": 2}, "start_profile_step", ["3", "`end_profile_step`", "2"]),
        (
            {"min_train_micro_batch_size_per_gpu": 8, "max_train_micro_batch_size_per_gpu": 4},
            "min_train_micro_batch_size_per_gpu",
            ["8", "`max_train_micro_batch_size_per_gpu`", "4"],
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], key: str, named: list[str]) -> None:
    with refused(ConfigError, *named, key=f"autotuning.{key}"):
        translate_autotuning(section)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_every_key_that_deepspeed_reads_has_an_answer() -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", ASK_DEEPSPEED]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert set(json.loads(answer.stdout.partition("ANSWER")[2])) == set(AUTOTUNING)
