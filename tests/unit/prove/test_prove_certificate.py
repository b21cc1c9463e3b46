"""The verdict, and how it is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.refusals import missing

from plait.config import parse_sections
from plait.prove.certificate import Certificate, ComparedQuantity, write_page
from plait.prove.compare import rounding_of
from plait.prove.job import Deviation, ProofTrace
from plait.prove.prove import certify, make_cases

NAMES = ["model.embed.weight", "model.blocks.0.w", "model.blocks.1.w", "optim.embed.weight.m", "optim.blocks.1.w.m"]
STEPS = 3


def trace(deviation: float = 0.0, **changes: Any) -> ProofTrace:
    weights = {name: Deviation(0.0, 0.0) for name in NAMES if name.startswith("model.")}
    after = [{name: Deviation(deviation, 0.0) for name in NAMES} for _ in range(STEPS)]
    numbers = {"loss": [3.0] * STEPS, "grad_norm": [1.0] * STEPS, "targets": [64.0] * STEPS, "skipped": [False] * STEPS}
    return ProofTrace(**{**numbers, "names": list(NAMES), "deviations": [weights, *after], **changes})


def certificate(candidate: ProofTrace, perturbed: ProofTrace | None = None, **reference: Any) -> Certificate:
    model = {"type": "gpt", "vocab_size": 9, "dim": 8, "layers": 1, "heads": 1, "seq_len": 4}
    config = parse_sections(device="cpu", model=model, strategy="ddp").config
    rounding = rounding_of(config.precision, on_cpu=True)
    return certify(make_cases(config, ranks=2), rounding, trace(**reference), perturbed or trace(1e-7), candidate)


def test_runs_that_agree_pass() -> None:
    found = certificate(trace(1e-6))
    assert found.passed
    assert found.verdict().startswith("PASS")
    assert not missing(found.verdict(), "ddp", "2 ranks", "5 tensors", "3 steps")


def test_the_largest_deviation_is_named_where_there_is_one() -> None:
    assert not any(word in certificate(trace()).verdict() for word in ("step 1", "embed.weight", "7.6e-06"))
    assert not missing(certificate(trace(1e-7)).verdict(), "step 1", "embed.weight", "1.0e-07", "7.6e-06")


def test_the_first_difference_is_the_earliest_step_and_there_the_first_layer() -> None:
    candidate = trace()
    for step, name in ((2, "optim.blocks.1.w.m"), (3, "model.embed.weight"), (2, "model.blocks.1.w")):
        candidate.deviations[step][name] = Deviation(0.25, 0.0)
    found = certificate(candidate)
    assert not found.passed
    assert (found.first_tensor.step, found.first_tensor.name) == (2, "model.blocks.1.w")  # type: ignore[union-attr]
    assert found.first_tensor.layer == "blocks.1"  # type: ignore[union-attr]
    assert found.verdict().startswith("FAIL")
    assert not missing(found.verdict(), "step 2", "blocks.1.w", "2.5e-01", "7.6e-06", "fp32", "1.2e-07")


def test_a_number_is_named_before_the_tensors_of_its_step() -> None:
    candidate = trace(grad_norm=[1.0, 1.01, 1.0])
    candidate.deviations[2]["optim.embed.weight.m"] = Deviation(0.5, 0.0)
    first, tensor = certificate(candidate).first, certificate(candidate).first_tensor
    assert not missing(str(first), "step 2", "grad_norm", "1.01", "1.0e-02")
    assert not missing(str(tensor), "step 2", "embed.weight", "(m ", "optimizer")


def test_weights_must_start_equal_bit_for_bit() -> None:
    candidate = trace()
    candidate.deviations[0]["model.embed.weight"] = Deviation(1e-9, 0.0)
    assert not missing(certificate(candidate).verdict(), "FAIL", "start", "embed.weight", "1.0e-09")


def test_one_target_too_many_is_a_difference() -> None:
    assert certificate(trace(targets=[64.0, 65.0, 64.0])).first.name == "targets"  # type: ignore[union-attr]


def test_what_rounding_moves_far_may_differ_as_far_and_no_further() -> None:
    perturbed = trace(1e-3)
    assert certificate(trace(1e-2), perturbed).passed
    assert not certificate(trace(2e-2), perturbed).passed


def test_what_rounding_alone_decides_is_set_apart_and_said() -> None:
    perturbed = trace()
    perturbed.deviations[1]["model.blocks.0.w"] = Deviation(1.0, 0.0)
    candidate = trace()
    candidate.deviations[1]["model.blocks.0.w"] = Deviation(1.4, 0.0)
    found = certificate(candidate, perturbed)
    assert found.passed
    assert [each.name for each in found.findings if each.is_noise] == ["model.blocks.0.w"]
    assert any(not missing(note, "rounding", "blocks.0.w") for note in found.notes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_in_one_run_alone_is_a_difference(value: float) -> None:
    assert certificate(trace(loss=[3.0, value, 3.0])).first.name == "loss"  # type: ignore[union-attr]


def test_a_rule_of_dropout_that_does_not_hold_fails_the_certificate() -> None:
    found = certificate(trace(checks=[("ranks differ", False, "ranks 0 and 1 drew the same")]), drops=["blocks.0"])
    assert not found.passed
    assert not missing(found.verdict(), "FAIL", "ranks differ", "ranks 0 and 1 drew the same")
    assert any(not missing(note, "Dropout", "0", "blocks.0") for note in found.notes)


def test_a_model_that_draws_numbers_with_dropout_off_is_said() -> None:
    assert any("random" in note for note in certificate(trace(), random=True).notes)


def test_the_file_is_strict_json_with_every_comparison(tmp_path: Path) -> None:
    candidate = trace()
    candidate.deviations[1]["model.blocks.0.w"] = Deviation(math.inf, 0.0, "shapes differ")
    certificate(candidate).write(tmp_path / "certificate.json")
    data = json.loads((tmp_path / "certificate.json").read_text(), parse_constant=pytest.fail)
    assert (data["verdict"], data["first_tensor"]["name"]) == ("FAIL", "model.blocks.0.w")
    assert len(data["findings"]) == 3 + STEPS * (4 + len(NAMES))
    assert data["steps"][0]["loss_reference"] == 3.0


def test_the_page_shows_the_verdict_and_each_layer(tmp_path: Path) -> None:
    candidate = trace(checks=[("ranks differ", True, "<14> pairs")])
    candidate.deviations[1]["model.blocks.0.w"] = Deviation(0.125, 0.0)
    write_page(certificate(candidate), tmp_path / "page.html")
    page = ElementTree.fromstring((tmp_path / "page.html").read_text().partition("\n")[2])
    text = " ".join(page.itertext())
    assert "FAIL" in text
    assert "1.2e-01" in text
    assert "<14> pairs" in text
    cells = [cell.text for cell in page.iter("td")]
    assert {"embed", "blocks.0", "blocks.1"} <= set(cells)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.blocks.3.attention.q.weight", "blocks.3"),
        ("optim.model.layers.11.mlp.up.weight.exp_avg", "model.layers.11"),
        ("model.embedding.weight", "embedding"),
        ("optim.0.weight.exp_avg", "0"),
    ],
)
def test_a_layer_is_the_name_up_to_its_first_number(name: str, layer: str) -> None:
    assert ComparedQuantity(1, name, 0.0, 0.0).layer == layer
