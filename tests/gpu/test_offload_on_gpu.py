"""Offloading on a real device: streams, pinned rooms and threads give what a resident run gives, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.offload_noise import MIDDLE, VOCABULARY, Yardstick, arrival, described, train

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.generate import sample
from plait.generate.streamed import build_streamed
from plait.kernels.pinned import link_gbps
from plait.models import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"offload": {"optimizer": "cpu", "bucket_mb": 4.0}},
    "ratio": {"offload": {"optimizer": "cpu", "bucket_mb": 4.0, "ratio": 0.5}},
    "nvme": {"offload": {"optimizer": "nvme", "bucket_mb": 4.0}},
    "cpu-updates": {"offload": {"optimizer": "cpu", "update": "cpu", "bucket_mb": 4.0}},
    "cpu-updates-nvme": {"offload": {"optimizer": "nvme", "update": "cpu", "bucket_mb": 4.0}},
    "compiled": {"offload": {"optimizer": "cpu", "bucket_mb": 4.0}, "compile": {"backend": "eager"}},
    "params-cpu": {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu", "bucket_mb": 4.0}},
    "params-nvme": {"zero": 3, "offload": {"optimizer": "nvme", "params": "nvme", "bucket_mb": 4.0}},
}
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"compute": "fp16", "scaler": {"initial_power": 20, "hysteresis": 1}},
}


STEPS = 6


def config_of(tier: str, precision: str, folder: Path) -> RunConfig:
    offload = dict(TIERS[tier]["offload"])
    strategy = {**TIERS[tier], "offload": {**offload, "path": str(folder)} if "nvme" in tier else offload}
    return described(strategy, PRECISIONS[precision], device="cuda", shape=MIDDLE)


@pytest.fixture(scope="module")
def yardsticks() -> Callable[[str], Yardstick]:
    """The resident run of each precision, and what one rounding does to it."""
    made: dict[str, Yardstick] = {}

    def of(precision: str) -> Yardstick:
        if precision not in made:
            made[precision] = Yardstick(PRECISIONS[precision], device="cuda", shape=MIDDLE, steps=STEPS)
        return made[precision]

    return of


# The way of a gradient and of a weight differs by tier and by whether they are narrower than what is updated; fp16
# adds steps that are skipped. So not every pair has something of its own to show.
@pytest.mark.parametrize(
    ("tier", "precision"),
    [
        *(("cpu", "fp32"), ("cpu", "bf16"), ("ratio", "bf16"), ("ratio", "fp16"), ("nvme", "fp32"), ("nvme", "fp16")),
        *(("cpu-updates", "bf16"), ("cpu-updates", "fp16"), ("cpu-updates-nvme", "bf16")),
    ],
)
def test_every_gradient_and_every_new_weight_arrives_in_time(tier: str, precision: str, tmp_path: Path) -> None:
    for _ in range(2):  # what is out of order shows only sometimes
        off, whose = arrival(config_of(tier, precision, tmp_path))
        assert off < 1e-3, whose  # of a step of the rate; a gradient or weight of another step is off by about one


@pytest.mark.parametrize(
    ("tier", "precision"),
    [
        *(("cpu", precision) for precision in PRECISIONS),
        *(("ratio", precision) for precision in ("fp32", "bf16")),
        *(("nvme", precision) for precision in ("bf16", "fp16")),
        *((tier, "bf16") for tier in ("compiled", "cpu-updates", "cpu-updates-nvme")),
        *(("params-cpu", precision) for precision in ("bf16", "fp16")),
        ("params-nvme", "bf16"),
    ],
)
def test_a_tier_differs_from_the_resident_run_by_rounding_alone(
    tier: str, precision: str, tmp_path: Path, yardsticks: Callable[[str], Yardstick]
) -> None:
    yardstick = yardsticks(precision)
    found = train(config_of(tier, precision, tmp_path), steps=STEPS)
    assert found.state.keys() == yardstick.resident.state.keys()
    assert yardstick.problems(found) == []
    if tier != "ratio" and precision == "bf16":
        assert found.peak_gib < 0.6 * yardstick.resident.peak_gib


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_streamed_weights_generate_the_same_text(tier: Any, tmp_path: Path) -> None:
    config = parse_sections(model={**MIDDLE, "vocab_size": VOCABULARY}).config
    assert config.model is not None
    device = torch.device("cuda", torch.cuda.current_device())
    whole = build_model(config.model).to(device)
    model, stream = build_streamed(config, device, tier=tier, folder=tmp_path)
    for name, tensor in stream.tensors().items():
        tensor.copy_(whole.get_parameter(name).detach())
    stream.filled()
    prompt = torch.randint(0, VOCABULARY, (7,), device=device)
    expected = sample(whole, prompt, new_tokens=16, window=128, temperature=0.0)
    assert torch.equal(sample(model, prompt, new_tokens=16, window=128, temperature=0.0), expected)
    assert stream.device_bytes() < 0.7 * sum(param.nbytes for param in whole.parameters())


def test_the_speed_of_the_link_is_that_of_a_link() -> None:
    assert 1.0 < link_gbps(torch.device("cuda")) < 1000.0
