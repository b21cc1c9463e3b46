"""A certificate passes what is right, and fails what is wrong, where it is wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import yaml

from plait.config import parse_sections, to_dict
from plait.prove import Certificate
from plait.prove.compare import rounding_of
from plait.prove.job import PERTURBED, TRACE, ProofJob, ProofTrace
from plait.prove.prove import certify, make_cases
from tests.multi.ranks import RankPool
from tests.refusals import missing

STEPS = 3
MODEL = {"type": "gpt", "vocab_size": 300, "dim": 16, "layers": 2, "heads": 2, "seq_len": 16, "dropout": 0.1}
BATCH = {"total": 4, "micro": 1}
PIPELINE = {"layout": {"pp": 2}}
TENSOR = {"layout": {"tp": 2}}
BUCKETS = {"zero": 0, "bucket_mb": 1e-6}
"""Each parameter in a bucket of its own."""


class Reference(NamedTuple):
    """A run on one process, made once, and where it lies."""

    folder: Path
    sections: dict[str, Any]


def describe(folder: Path) -> dict[str, Any]:
    """A run description on a fresh text."""
    lines = (f"line {i}: {random.random()} and {random.random()}\n" for i in range(80))
    (folder / "corpus.txt").write_text("".join(lines))
    text = {"type": "text", "path": str(folder / "corpus.txt"), "vocab_size": 300, "seq_len": 16}
    return {
        "work_dir": str(folder / "run"),
        "device": "cpu",
        "seed": random.randrange(1000),
        "model": MODEL,
        "data": {**text, "cache": str(folder / "cache")},
        "batch": BATCH,
        "train": {"max_steps": 40},
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return run_reference(tmp_path_factory.mktemp("proof"))


def run_reference(folder: Path, **further: Any) -> Reference:
    from plait.prove.record import run

    sections = {**describe(folder), **further}
    config = parse_sections(**sections, strategy="ddp").config
    perturbation = rounding_of(config.precision, on_cpu=True).epsilon
    run(
        ProofJob(
            to_dict(make_cases(config, ranks=2).reference), str(folder / "reference"), STEPS, perturbation=perturbation
        )
    )
    return Reference(folder, sections)


Plant = Callable[[int], Any]


def no_bug(rank: int) -> Any:
    return nullcontext()


def run_candidate(rank: int, size: int, job: ProofJob, plant: Plant) -> None:
    from plait.prove.record import run

    with plant(rank):
        run(job)


def prove_on(pool: RankPool, reference: Reference, strategy: Any, plant: Plant = no_bug) -> Certificate:
    cases = make_cases(parse_sections(**reference.sections, strategy=strategy).config, ranks=pool.size)
    one, many = reference.folder / "reference", reference.folder / f"candidate-{random.random()}"
    pool.run(run_candidate, ProofJob(to_dict(cases.candidate), str(many), STEPS, against=str(one)), plant)
    traces = [ProofTrace.read(path / TRACE) for path in (one, one / PERTURBED, many)]
    return certify(cases, rounding_of(cases.candidate.precision, on_cpu=True), *traces)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", TENSOR, PIPELINE], ids=str)
def test_a_right_strategy_passes(two_ranks: RankPool, reference: Reference, strategy: Any) -> None:
    certificate = prove_on(two_ranks, reference, strategy)
    assert certificate.passed, certificate.verdict()
    weights = {each.name for each in certificate.findings if each.name.startswith("model.")}
    moments = {each.name for each in certificate.findings if each.name.endswith((".exp_avg", ".exp_avg_sq"))}
    assert len(moments) == 2 * len(weights) > 0
    assert len(certificate.checks) == (0 if strategy is PIPELINE else 1)


# ---- planted bugs, in ranks that are otherwise as they always are


@contextmanager
def one_gradient_is_not_reduced(index: int, rank: int) -> Iterator[None]:
    from plait.distributed.ddp import GradientBuckets

    whole = GradientBuckets._launch

    def launch(self: GradientBuckets, bucket: Any) -> None:
        if self._next == self._bucket_and_position[index][0]:
            self._next += 1
        else:
            whole(self, bucket)

    with patch.object(GradientBuckets, "_launch", launch):
        yield


@contextmanager
def the_loss_is_scaled_by_the_ranks_once_more(rank: int) -> Iterator[None]:
    from plait.engine.loss import LossNormalizer

    right = LossNormalizer.scaled
    with patch.object(LossNormalizer, "scaled", lambda self, loss: right(self, loss) / 2):
        yield


@contextmanager
def one_rank_counts_its_tokens_twice(rank: int) -> Iterator[None]:
    from plait.engine.loss import LossNormalizer

    right = LossNormalizer.add

    def add(self: LossNormalizer, loss: Any, *, micro_batches: int) -> None:
        right(self, loss._replace(weight=loss.weight * 2) if rank == 1 else loss, micro_batches=micro_batches)

    with patch.object(LossNormalizer, "add", add):
        yield


@contextmanager
def all_ranks_have_one_seed(rank: int) -> Iterator[None]:
    from plait.distributed import seed_everything

    with patch("plait.engine.prepare.seed_everything", lambda seed, _rank: seed_everything(seed, 0)):
        yield


@contextmanager
def ranks_along_tp_have_seeds_of_their_own(rank: int) -> Iterator[None]:
    from plait.distributed import seed_everything

    with patch("plait.engine.prepare.seed_everything", lambda seed, _rank: seed_everything(seed, rank)):
        yield


def test_a_gradient_that_is_not_reduced_is_named(two_ranks: RankPool, reference: Reference) -> None:
    names = ProofTrace.read(reference.folder / "reference" / TRACE).names
    params = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    # What is added to all keys alike changes nothing: the gradient of that bias is rounding, reduced or not.
    lost = random.choice([name for name in params if not name.endswith("k.bias")])
    certificate = prove_on(two_ranks, reference, BUCKETS, partial(one_gradient_is_not_reduced, params.index(lost)))
    first = certificate.first_tensor
    assert first is not None
    assert first.step == 1
    wrong = {each.name for each in certificate.findings if each.is_tensor and each.step == 1 and not each.agrees}
    assert first.name in wrong
    # Adam's first step has the length of its rate whatever the gradient is: by chance it may still be right.
    assert wrong - {f"model.{lost}"} == {f"optim.{lost}.exp_avg", f"optim.{lost}.exp_avg_sq"}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_wrong_loss_scale_shows_although_the_optimizer_forgives_it(
    two_ranks: RankPool, reference: Reference, strategy: str
) -> None:
    certificate = prove_on(two_ranks, reference, strategy, the_loss_is_scaled_by_the_ranks_once_more)
    first, tensor = certificate.first, certificate.first_tensor
    assert first is not None
    assert tensor is not None
    assert (first.step, first.name) == (1, "grad_norm")
    assert first.deviation == pytest.approx(0.5, rel=1e-3)
    assert (tensor.step, tensor.layer) == (1, "embedding")
    moments = [each for each in certificate.findings if each.step == 1 and each.name.endswith(".exp_avg")]
    assert all(each.deviation == pytest.approx(0.5, rel=1e-3) for each in moments if not each.is_noise)


def test_tokens_that_count_twice_show_in_the_first_loss(two_ranks: RankPool, reference: Reference) -> None:
    certificate = prove_on(two_ranks, reference, "zero1", one_rank_counts_its_tokens_twice)
    wrong = [each for each in certificate.findings if each.step == 1 and not each.agrees]
    assert wrong[0].name == "loss"
    assert {"grad_norm", "targets"} <= {each.name for each in wrong}
    assert not missing(next(each.detail for each in wrong if each.name == "targets"), "96", "64")


def test_a_dropout_seed_that_ranks_share_is_caught(two_ranks: RankPool, reference: Reference) -> None:
    certificate = prove_on(two_ranks, reference, "ddp", all_ranks_have_one_seed)
    assert certificate.first is None  # without dropout there is nothing wrong
    assert not certificate.passed
    assert not missing(certificate.verdict(), "ranks 0 and 1", "draw 1")


def test_dropout_that_differs_along_tp_is_caught(two_ranks: RankPool, reference: Reference) -> None:
    certificate = prove_on(two_ranks, reference, TENSOR, ranks_along_tp_have_seeds_of_their_own)
    assert certificate.first is None
    assert not certificate.passed
    assert not missing(certificate.verdict(), "ranks 0 and 1", "copies")


# ---- parts of one's own


class Steady(torch.optim.Optimizer):
    """SGD that says of itself that it goes number by number, and does."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def factor(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * self.factor())


class Ranked(Steady):
    """One whose steps are longer on every further rank."""

    def factor(self) -> float:
        return 1.0 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)


OWN_PARTS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "optimizer": ({"optim": f"{__name__}:Steady"}, "zero1", True),
    "wrong optimizer, zero1": ({"optim": f"{__name__}:Ranked"}, "zero1", False),
    "wrong optimizer, zero3": ({"optim": f"{__name__}:Ranked"}, "zero3", False),
    "engine": ({}, {"engine": "tests.multi.own_engine:DdpEngine"}, True),
}


@pytest.mark.parametrize("case", OWN_PARTS)
def test_parts_of_ones_own_are_judged(two_ranks: RankPool, tmp_path: Path, case: str) -> None:
    further, strategy, right = OWN_PARTS[case]
    certificate = prove_on(two_ranks, run_reference(tmp_path, **further), strategy)
    assert certificate.passed == right, certificate.verdict()
    if not right:
        assert certificate.first_tensor is not None
        assert certificate.first_tensor.step == 1


# ---- the command

OWN = """
import torch
import torch.distributed as dist
from torch import nn
from plait.distributed import ddp

class Net(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.embedding = nn.Embedding(300, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 300)

    def forward(self, input_ids, labels, **_):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def make(bug=False):
    if bug:
        ddp.dist = type("Silent", (), {**vars(dist), "all_reduce": lambda *a, **k: Done()})
    return Net(bug)

class Done:
    def wait(self):
        pass
"""


@pytest.mark.parametrize("bug", [False, True])
def test_the_command_certifies_a_model_of_ones_own(tmp_path: Path, bug: bool) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    sections = {**describe(tmp_path), "strategy": "ddp", "optim": {"type": "SGD", "lr": 0.1}}
    sections["model"] = {"type": "import", "target": "own_net:make", "args": {"bug": bug}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    command = [sys.executable, "-m", "plait", "prove", "run.yaml", "--steps", "2", "--out", "proof"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ended.returncode == int(bug), ended.stdout + ended.stderr
    found = json.loads((tmp_path / "proof" / "certificate.json").read_text())
    assert found["verdict"] == ("FAIL" if bug else "PASS")
    assert not missing(ended.stdout, found["verdict"], "ddp on 2 ranks")
    assert (tmp_path / "proof" / "certificate.html").exists()
    assert not (tmp_path / "run").exists()
    if bug:
        assert (found["first_tensor"]["step"], found["first_tensor"]["name"]) == (1, "model.embedding.weight")
