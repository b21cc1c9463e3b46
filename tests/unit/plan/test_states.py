"""Model states alone: DeepSpeed's numbers, to the digit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.refusals import refused
from torch import nn

from plait.cli.plan import show_states
from plait.config import parse
from plait.config.model import HFConfig, LlamaConfig
from plait.errors import ConfigError
from plait.models import build_model
from plait.plan.states import (
    StatesEstimate,
    count_params,
    estimate_states,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

INTERNLM2 = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 1 GPU per node.
SW: Model with 1889M total params, 189M largest layer params.
  per CPU  |  per GPU |   Options
   47.50GB |   0.71GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   47.50GB |   0.71GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   42.22GB |   4.22GB | offload_param=none, offload_optimizer=cpu , zero_init=1
   42.22GB |   4.22GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.06GB |  32.37GB | offload_param=none, offload_optimizer=none, zero_init=1
   10.56GB |  32.37GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
T0_3B = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 2 GPUs per node.
SW: Model with 2783M total params, 65M largest layer params.
  per CPU  |  per GPU |   Options
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
"""
T0_3B_CONFIG = {
    "model_type": "t5",
    "d_model": 2048,
    "d_ff": 5120,
    "d_kv": 64,
    "num_heads": 32,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
ASK_DEEPSPEED = """
import contextlib, io, json, sys
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as zero3
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold as zero2
def told(function, *sizes):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        function(*sizes)
    return text.getvalue()
cases = json.loads(sys.argv[1])
print("ANSWER" + json.dumps([[told(zero2, a, *rest), told(zero3, a, b, *rest)] for a, b, *rest in cases]))
"""


def on_meta(config: LlamaConfig | HFConfig) -> nn.Module:
    with torch.device("meta"):
        return build_model(config)


def test_internlm2_on_one_gpu_has_the_six_published_rows(capsys: pytest.CaptureFixture[str]) -> None:
    model = on_meta(LlamaConfig(vocab_size=92544, dim=2048, layers=24, heads=16, kv_heads=8, ffn_dim=8192))
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1)
    assert capsys.readouterr().out == INTERNLM2


def test_t0_3b_on_two_gpus_has_the_published_row(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    estimate_zero3_model_states_mem_needs_all_live(on_meta(HFConfig(config=T0_3B_CONFIG, task="base")), 2, 1)
    assert capsys.readouterr().out.startswith(T0_3B)


def test_seven_billion_parameters_need_112_gb() -> None:
    account = StatesEstimate(7_000_000_000)
    assert account.rows() == (
        ("weights", 2, 14.0),
        ("gradients", 2, 14.0),
        ("optimizer", 12, 84.0),
        ("total", 16, 112.0),
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (4, 4, 8)),
        ({"precision": "bf16"}, (2, 4, 12)),
        ({"precision": {"compute": "bf16", "master": False}}, (2, 2, 4)),
        ({"precision": "bf16", "optim": {"type": "SGD"}}, (2, 4, 4)),
        ({"optim": {"type": "SGD", "momentum": 0.9}}, (4, 4, 4)),
        ({"optim": {"type": "AdamW", "amsgrad": True}}, (4, 4, 12)),
        ({"optim": {"type": "Lion"}}, (4, 4, 4)),
    ],
)
def test_the_account_follows_precision_and_optimizer(
    settings: dict[str, object], expected: tuple[int, int, int]
) -> None:
    account = estimate_states(parse(settings).config, 1)
    assert (account.weights, account.gradients, account.optimizer) == expected


def test_shared_parameters_count_once_wherever_the_model_lies() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Linear(4, 7))
        model[1].weight = model[0].weight
        assert count_params(model) == (40 + 35, 40)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_every_table_is_the_one_that_deepspeed_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def some() -> list[float]:
        total = random.randrange(1, 10 ** random.randrange(4, 13))
        sizes = [random.choice([1, 2, 7, 8]), random.choice([1, 2, 5, 128])]
        return [total, random.randrange(total), *sizes, random.choice([1.0, 1.5, 1.7])]

    cases = [some() for _ in range(200)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", ASK_DEEPSPEED, json.dumps(cases)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert answer.returncode == 0, answer.stderr[-2000:]
    # From Python 3.11 on, a member of DeepSpeed's enum is printed with the name of its class.
    expected = json.loads(answer.stdout.partition("ANSWER")[2].replace("OffloadDeviceEnum.cpu", "cpu "))
    for (total, largest, *rest), (zero2, zero3) in zip(cases, expected, strict=True):
        estimate_zero2_model_states_mem_needs_all_cold(total, *rest)  # type: ignore[arg-type]
        assert capsys.readouterr().out == zero2
        estimate_zero3_model_states_mem_needs_all_cold(total, largest, *rest)  # type: ignore[arg-type]
        assert capsys.readouterr().out == zero3


def test_a_run_description_is_counted_without_giving_its_model_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    # 70 billion parameters: this machine could not hold them.
    path.write_text("model: {type: llama, dim: 8192, layers: 80, heads: 64, kv_heads: 8, ffn_dim: 28672}\n")
    show_states(str(path), ["precision=bf16"], gpus=8)
    out = capsys.readouterr().out
    total = int(float(out.split("M parameters")[0].replace(",", "")) * 1e6)
    assert 68e9 < total < 70e9
    assert "18 B" in out
    assert "HW: Setup with 1 node, 8 GPUs per node." in out
    assert out.count("offload_optimizer=") == 2 + 6


def test_live_and_cold_tables_agree(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(random.randrange(1, 99), random.randrange(1, 99))
    total, _ = count_params(model)
    estimate_zero2_model_states_mem_needs_all_live(model, 4, 2)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(total, 4, 2)
    assert capsys.readouterr().out == live


def test_a_run_without_a_model_has_nothing_to_count(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\n")
    with refused(ConfigError, "`type`", key="model"):
        show_states(str(path), [])
