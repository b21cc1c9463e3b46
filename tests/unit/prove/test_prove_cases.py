"""From one run description to two."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing, refused

from plait.config import RunConfig, parse_sections
from plait.config.strategy import OffloadConfig
from plait.errors import ConfigError
from plait.prove import prove
from plait.prove.compare import rounding_of
from plait.prove.prove import default_ranks, make_cases, name_of

GPT = {"type": "gpt", "vocab_size": 300, "dim": 16, "layers": 6, "heads": 2, "seq_len": 16}


def run(**sections: Any) -> RunConfig:
    return parse_sections(**{"device": "cpu", "model": GPT, **sections}).config


def test_both_runs_have_the_same_batch_in_the_same_pieces() -> None:
    cases = make_cases(run(strategy="zero2", batch={"micro": 3, "accumulation": 2}), ranks=4)
    assert (cases.reference.batch.total, cases.reference.batch.micro) == (24, 3)
    assert cases.reference.batch == cases.candidate.batch


def test_the_reference_spreads_recomputes_and_compiles_nothing() -> None:
    strategy = {"zero": 3, "recompute": "full", "layout": {"tp": 2, "pp": 2}, "pipeline": {"micro_batches": 4}}
    cases = make_cases(run(strategy=strategy, batch={"micro": 1}))
    assert cases.reference.strategy == parse_sections().config.strategy.model_copy(
        update={"meta_init": cases.candidate.strategy.meta_init}
    )
    assert cases.candidate.strategy.layout.pp == 2


def test_the_run_keeps_what_decides_a_step_and_loses_what_writes_or_measures() -> None:
    config = run(
        strategy="ddp",
        seed=7,
        val_data={"type": "text", "path": "stdlib"},
        train={"max_steps": 90, "val_every": 10, "clip_norm": 0.5},
        schedule={"type": "CosineAnnealingLR"},
        checkpoint={"every": 5, "resume": "auto"},
        hooks=[{"type": "ema"}],
    )
    cases = make_cases(config, ranks=2)
    assert cases.candidate.schedule == config.schedule
    assert (cases.candidate.train.max_steps, cases.candidate.train.clip_norm, cases.candidate.seed) == (90, 0.5, 7)
    assert cases.candidate.checkpoint.every is None
    assert cases.candidate.val_data is None
    assert [note.split()[0] for note in cases.remarks] == ["Hooks", "Both"]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 2),
        ("zero3", 2),
        ({"layout": {"tp": 2, "pp": 3}}, 6),
        ({"zero": 1, "layout": {"dp_shard": 2, "tp": 2}}, 4),
        ("single", 1),
    ],
)
def test_ranks_are_those_that_the_layout_fixes_and_two_where_it_fixes_none(strategy: Any, ranks: int) -> None:
    assert default_ranks(run(strategy=strategy)) == ranks


def test_what_is_the_reference_itself_is_refused() -> None:
    with refused(ConfigError, "`--ranks 2`", key="strategy"):
        make_cases(run(strategy="single"))


@pytest.mark.parametrize(
    ("technique", "named"),
    [
        ({"recompute": "full"}, ["recompute", "full"]),
        ({"offload": "cpu"}, ["offload", "cpu"]),
        (
            {"zero": 3, "offload": {"optimizer": "nvme", "params": "cpu"}},
            ["zero3", "offload", "nvme", "weights", "host"],
        ),
        ({"offload": {"activations": "all"}}, ["activations"]),
        ({"tiles": {"names": ["blocks.*.ffn"]}}, ["tiles"]),
    ],
)
def test_one_rank_that_does_more_than_the_reference_can_be_proved_and_is_named(
    technique: Any, named: list[str]
) -> None:
    cases = make_cases(run(strategy={**technique, "layout": {"dp_replicate": 1, "dp_shard": 1}}))
    assert not missing(name_of(cases.candidate, cases.layout), *named, "1 rank")
    assert cases.reference.strategy.offload == OffloadConfig()


def test_a_layout_that_leaves_nothing_to_shard_is_said() -> None:
    cases = make_cases(run(strategy={"zero": 3, "layout": {"tp": 2}}))
    assert "`--ranks 4`" in cases.remarks[0]


def test_layers_of_own_models_are_shrunk_on_both_sides() -> None:
    cases = make_cases(run(strategy="ddp"), layers=2)
    assert cases.reference.model.layers == cases.candidate.model.layers == 2  # type: ignore[union-attr]
    (note,) = cases.remarks
    assert not missing(note, "6", "2 layers")


def test_a_model_is_not_shrunk_to_more_layers_than_it_has() -> None:
    with refused(ConfigError, "7", "6", key="--layers"):
        make_cases(run(strategy="ddp"), layers=7)


def test_a_folder_that_takes_no_certificate_is_found_before_the_steps(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "inside", "/proc/certificate"):
        with refused(ConfigError, f"'{out}'", key="--out"):
            prove({"model": GPT, "data": {"type": "import", "target": "builtins:list"}}, out=out)


def test_layers_of_a_transformers_model_are_shrunk_by_its_own_key_with_lists_of_them(tmp_path: Path) -> None:
    described = {"model_type": "qwen2", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(described))
    cases = make_cases(run(model={"type": "hf", "path": str(tmp_path)}, strategy="ddp"), layers=2)
    assert cases.candidate.model.config == {  # type: ignore[union-attr]
        **described,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
    }
    assert any("random" in note for note in cases.remarks)


def test_layers_of_a_model_of_ones_own_are_shrunk_where_an_argument_names_them() -> None:
    model = {"type": "import", "target": "mine:Net", "args": {"width": 3, "n_layers": 5}}
    cases = make_cases(run(model=model, strategy="ddp"), layers=2)
    assert cases.candidate.model.args == {"width": 3, "n_layers": 2}  # type: ignore[union-attr]


@pytest.mark.parametrize("model", [{"type": "resnet"}, {"type": "import", "target": "mine:Net", "args": {"width": 3}}])
def test_a_model_without_a_number_of_layers_cannot_be_shrunk(model: dict[str, Any]) -> None:
    with refused(ConfigError, model["type"], "num_layers", key="--layers"):
        make_cases(run(model=model, strategy="ddp"), layers=2)


def test_the_coarser_of_compute_and_reduction_decides_the_tolerance() -> None:
    words = {
        word: rounding_of(run(precision=precision).precision, on_cpu=True).dtype
        for word, precision in (
            ("fp32", "fp32"),
            ("bf16", "bf16"),
            ("tf32", "tf32"),
            ("reduced", {"compute": "fp16", "reduce": "bf16"}),
        )
    }
    assert words == {"fp32": "fp32", "bf16": "bf16", "tf32": "fp32", "reduced": "bf16"}


@pytest.mark.parametrize("code", [130, 143])
def test_a_proof_whose_ranks_are_told_to_stop_ends_as_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(import_module("plait.prove.prove"), "run_ranks", lambda *_: code)
    described = {"model": GPT, "data": {"type": "import", "target": "nowhere:data"}, "batch": {"total": 4}}
    with pytest.raises(SystemExit) as ended:
        prove({**described, "strategy": "zero3", "work_dir": str(tmp_path)})
    assert ended.value.code == code
