"""The phases as runs: one after another, interrupted, and with what users get wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tests.refusals import refused
from typer.testing import CliRunner

from plait.checkpoint.convert.detect import open_source
from plait.cli.convert import PLAIN, convert
from plait.cli.main import app
from plait.config import check, parse
from plait.errors import CheckpointError, ConfigError, ModelError
from plait.posttrain.lora import Quantized, lora_layers, read_adapter
from plait.posttrain.metrics import PairScore, Preferences, calibration
from plait.posttrain.run import PhaseRunner, phase_runner
from plait.trainer import Runner

MODEL = {"type": "gpt", "vocab_size": 12, "dim": 32, "layers": 2, "heads": 4, "seq_len": 24}


def describe(work_dir: Path, steps: int = 3, **changes: Any) -> dict[str, Any]:
    posttrain = {"data": [{"type": "task", "samples": 100, "size": 1}], "val_fraction": 0.1}
    return {
        "work_dir": str(work_dir),
        "model": MODEL,
        "posttrain": {**posttrain, **changes.pop("posttrain", {})},
        "plan": "off",
        "optim": {"lr": 1e-2},
        "batch": {"total": 8},
        "train": {"max_steps": steps},
        "log": {"console": "none"},
        **changes,
    }


def run(phase: str, description: dict[str, Any]) -> dict[str, torch.Tensor]:
    with phase_runner(phase, description) as runner:
        runner.train()
        return {name: tensor.clone() for name, tensor in runner.engine.state_tensors().items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with open_source(folder) as source:
        return {name: source.read(name) for name in source.entries if name.startswith("model.")}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to answer a little."""
    folder = tmp_path_factory.mktemp("tuned")
    run("sft", describe(folder, steps=40))
    return folder


def test_answers_are_learned(tuned: Path) -> None:
    lines = [json.loads(line) for line in next(tuned.glob("events*.jsonl")).read_text().splitlines()]
    losses = [line["data"]["metrics"]["loss"] for line in lines if line["kind"] == "validate"]
    assert losses[-1] < 1.2  # guessing costs 2.4


def test_a_reward_model_starts_from_the_tuned_body_and_gets_better(tuned: Path, tmp_path: Path) -> None:
    start = {"start": str(tuned)}
    with phase_runner("reward", describe(tmp_path, 40, posttrain=start, reward={"center": 0.01})) as runner:
        before, body = runner.validate(), weights(tuned)
        for name, param in runner.engine.model.named_parameters():
            if name != "head.weight":
                assert torch.equal(param, body[f"model.{name}"])
        assert runner.engine.model.get_parameter("head.weight").shape == (1, 32)
        runner.train()
        after = runner.validate()
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > 0.7
    assert after["margin"] > before["margin"]
    assert ElementTree.parse(tmp_path / "calibration.svg").getroot().get("aria-label")
    again = phase_runner("reward", describe(tmp_path / "again", posttrain={"start": str(tmp_path)}))
    with again as runner:  # a reward model that goes on keeps its head
        runner.setup()
        assert torch.equal(runner.engine.model.get_parameter("head.weight"), weights(tmp_path)["model.head.weight"])


def test_the_adapter_of_a_reward_model_brings_its_head(tuned: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"posttrain": {"start": str(tuned)}, "checkpoint": {"last": False}}
    after = run("reward", describe(tmp_path / "a", **changes, lora={"rank": 2}))
    lora = {"rank": 2, "adapter": str(tmp_path / "a" / "adapter")}
    with phase_runner("reward", describe(tmp_path / "b", **changes, lora=lora)) as runner:
        runner.setup()
        for name, param in runner.engine.model.named_parameters():
            assert torch.equal(param, after[f"model.{name}"]), name


@pytest.mark.parametrize(("reference", "precision"), [("start", "fp32"), ("start", "bf16"), ("base", "fp32")])
def test_both_references_are_the_model_that_dpo_starts_from(
    tuned: Path, tmp_path: Path, reference: str, precision: str
) -> None:
    changes: dict[str, Any] = {"lora": {"rank": 4}, "dpo": {"reference": reference}, "precision": precision}
    description = describe(tmp_path, posttrain={"start": str(tuned)}, **changes)
    with phase_runner("dpo", description) as runner:
        found = runner.validate()
        assert found["loss"] == pytest.approx(0.6931, abs=1e-4)
        assert found["margin"] == pytest.approx(0.0, abs=1e-4)
        runner.train()
        assert runner.validate()["loss"] < 0.69


def test_a_dpo_run_that_was_stopped_goes_on_with_the_reference_it_had(tuned: Path, tmp_path: Path) -> None:
    start = {"start": str(tuned)}
    whole = run("dpo", describe(tmp_path / "whole", 6, posttrain=start, dpo={"loss": "kto"}))
    stopped = describe(tmp_path / "stopped", 6, posttrain=start, dpo={"loss": "kto"})
    run("dpo", {**stopped, "train": {"max_steps": 6, "stop_after": 3}})
    gone_on = run("dpo", {**stopped, "checkpoint": {"resume": "auto"}})
    assert whole.keys() == gone_on.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, gone_on[name]), name


def test_an_adapter_is_written_alone_goes_on_and_is_merged_by_the_next_phase(tuned: Path, tmp_path: Path) -> None:
    lora = {"rank": 4, "targets": ["q", "v", "up"]}
    start = {"start": str(tuned)}
    after = run("sft", describe(tmp_path / "a", posttrain=start, lora=lora, checkpoint={"trainable_only": True}))
    frozen = weights(tuned)
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
    adapter = read_adapter(tmp_path / "a" / "adapter")
    assert adapter.spec.rank == 4
    for name, tensor in adapter.tensors.items():
        assert torch.equal(tensor, after[f"model.{name}"])
    # The checkpoint has the adapter only; a later phase says so, and is told what to do.
    with refused(CheckpointError, str(tmp_path / "a"), "`lora.adapter`"):
        run("dpo", describe(tmp_path / "no", posttrain={"start": str(tmp_path / "a")}))
    more = {**lora, "adapter": str(tmp_path / "a" / "adapter")}
    assert adapter.base == str(tuned)
    assert adapter.strange_base(str(Path("moved") / tuned.name)) is None
    named = tmp_path / "a" / "adapter" / "adapter_config.json"
    named.write_text(json.dumps({**json.loads(named.read_text()), "base_model_name_or_path": "another/model"}))
    with phase_runner("sft", describe(tmp_path / "b", posttrain=start, lora=more)) as runner:
        runner.setup()
        continued = dict(runner.engine.model.named_parameters())
        assert all(torch.equal(continued[name], tensor) for name, tensor in adapter.tensors.items())
        runner.train()
    assert "'another/model'" in (tmp_path / "b" / "events-rank0.jsonl").read_text()
    # A whole checkpoint with an adapter begins the next phase merged.
    saved = weights(tmp_path / "b")
    with phase_runner("dpo", describe(tmp_path / "c", posttrain={"start": str(tmp_path / "b")})) as runner:
        name = "blocks.0.attention.q"
        down, up = saved[f"model.{name}.lora_A.weight"], saved[f"model.{name}.lora_B.weight"]
        expected = saved[f"model.{name}.weight"] + 4.0 * up @ down
        runner.setup()
        found = runner.engine.model.get_parameter(f"{name}.weight")
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("lora", "key"), [({"also": ["*norm*"]}, "lora.also"), ({"only": False}, "lora.only: false")])
def test_what_learns_beside_an_adapter_is_not_in_its_folder_and_that_is_told(
    lora: dict[str, Any], key: str, tuned: Path, tmp_path: Path
) -> None:
    run("sft", describe(tmp_path, 1, posttrain={"start": str(tuned)}, lora=lora))
    said = [json.loads(line) for line in (tmp_path / "events-rank0.jsonl").read_text().splitlines()]
    assert any(key in event["data"]["text"] for event in said if event["kind"] == "message")


@pytest.mark.parametrize("meta", [True, False], ids=["on meta", "built for real"])
def test_a_packed_base_holds_the_weights_that_it_starts_from(tuned: Path, tmp_path: Path, meta: bool) -> None:
    changes: dict[str, Any] = {"posttrain": {"start": str(tuned)}, "strategy": {"meta_init": meta}}
    with phase_runner("sft", describe(tmp_path, **changes, lora={"rank": 2, "base": "int8"})) as runner:
        runner.setup()
        saved, model = weights(tuned), runner.engine.model
        for name in lora_layers(model):
            layer, whole = model.get_submodule(name), saved[f"model.{name}.weight"]
            assert isinstance(layer, Quantized)
            assert torch.allclose(layer.unpacked(torch.float32), whole, atol=0.01 * float(whole.abs().max()))
        runner.train()


def test_a_transformers_model_keeps_its_pretrained_weights_under_an_adapter_and_a_value_head(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=12, max_position_embeddings=32, bos_token_id=0, eos_token_id=0
    )
    original = transformers.LlamaForCausalLM(config)
    original.save_pretrained(str(tmp_path / "hf"))
    from plait.posttrain.data.tasks import Sorting
    from plait.posttrain.data.template import character_tokenizer

    character_tokenizer(Sorting.alphabet).save(tmp_path / "hf" / "tokenizer.json")
    model = {"type": "hf", "path": str(tmp_path / "hf")}
    changes: dict[str, Any] = {"model": model, "posttrain": {"max_len": 16}, "lora": {"rank": 2, "targets": ["q_proj"]}}
    for phase in ("sft", "reward"):
        with phase_runner(phase, describe(tmp_path / phase, 2, **changes)) as runner:
            runner.setup()
            found = dict(runner.engine.model.named_parameters())
            for name, param in original.named_parameters():
                if not (phase == "reward" and name == "lm_head.weight"):
                    assert torch.equal(found[name], param), name
            runner.train()
    assert read_adapter(tmp_path / "sft" / "adapter", original).layers == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    )


@pytest.mark.parametrize("kind", ["gpt", "hf"])
def test_a_run_with_adapters_becomes_a_plain_transformers_model(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "vocab_size": 12}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = MODEL if kind == "gpt" else {"type": "hf", "config": {"model_type": "gpt2", **sizes, **tokens}}
    changes = {"model": model, "posttrain": {"max_len": 24}, "lora": {"rank": 2, "scaled_by_root": True}}
    ids = torch.randint(0, 12, (2, 9))
    with phase_runner("sft", describe(tmp_path / "run", **changes)) as runner:
        runner.train()
        expected = runner.engine.model.eval()(ids).detach()
    convert(str(tmp_path / "run"), str(tmp_path / "hf"), replace(PLAIN, to="hf"))
    found = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"))
    assert torch.allclose(found(ids).logits, expected, atol=1e-4)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (tmp_path / "run" / "tokenizer.json").read_bytes()
    if kind == "gpt":  # and a model of Plait's own starts from such a folder
        again = describe(tmp_path / "again", model=model, posttrain={"start": str(tmp_path / "hf")})
        with phase_runner("sft", again) as runner:
            runner.setup()
            assert torch.allclose(runner.engine.model.eval()(ids), expected, atol=1e-4)


def test_weights_of_another_model_are_refused_with_a_table(tuned: Path, tmp_path: Path) -> None:
    other = {"model": {**MODEL, "dim": 16}, "posttrain": {"start": str(tuned)}}
    with refused(ModelError, "embedding.weight", "(12, 32)", "(12, 16)"):
        run("sft", describe(tmp_path, **other))


@pytest.mark.parametrize(
    ("phase", "changes", "key", "names"),
    [
        ("dpo", {"dpo": {"reference": "base"}}, "dpo.reference", ["`base`", "`lora`"]),
        ("dpo", {"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, "dpo.label_smoothing", ["0.1", "ipo"]),
        ("reward", {"strategy": {"layout": {"cp": 2}}}, "strategy.layout.cp", ["2", "`strategy.layout.cp: 1`"]),
        ("sft", {"data": {"type": "text", "path": "stdlib"}}, "data", ["sft", "`posttrain.data`"]),
        ("sft", {"lora": {"only": False, "base": "int8"}}, "lora", ["'int8'", "`only`"]),
        ("sft", {"posttrain": {"template": {"user": "me"}}}, "posttrain.template.user", ["'me'", "`kind: marked`"]),
        ("sft", {"posttrain": {"dta_split": "1,1,1"}}, "posttrain.dta_split", ["`data_split`"]),
        ("sft", {"lora": {"targets": ["qq"]}}, "lora.targets", ["'qq'"]),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(
    phase: str, changes: Any, key: str, names: list[str], tmp_path: Path
) -> None:
    with refused(ConfigError, *names, key=key):
        run(phase, describe(tmp_path, **changes))


def test_the_commands_run_show_and_refuse(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(describe(tmp_path / "run", 1)))
    invoke = lambda *words: CliRunner().invoke(app, list(words))  # noqa: E731
    shown = invoke("reward", str(file), "--dry-run", "reward.margin=0.5")
    assert "reward.margin" in shown.output
    assert not (tmp_path / "run").exists()
    assert isinstance(invoke("dpo", str(file), "dpo.bta=1").exception, ConfigError)
    assert isinstance(invoke("train", str(file)).exception, ConfigError)
    assert invoke("sft", str(file)).exit_code == 0
    assert (tmp_path / "run" / "tokenizer.json").is_file()
    written = parse(tmp_path / "run" / "config.yaml").config
    assert written.phase == "sft"  # the description that is kept says which phase it was


def test_plain_training_refuses_the_sections_of_phases(tmp_path: Path) -> None:
    with refused(ConfigError, "`plait sft`", key="lora"):
        check(parse({**describe(tmp_path), "lora": {}}).config, has_val=False, require_length=False)
    with refused(ConfigError, "`plait sft`", key="posttrain"):
        Runner.from_config(describe(tmp_path))
    with refused(ConfigError, "sft", key="phase"):
        PhaseRunner(parse({"model": MODEL}))


def test_a_model_that_is_as_sure_as_it_is_right_is_calibrated() -> None:
    import math
    import random

    scores = []
    for _ in range(4000):
        margin = random.gauss(0, 2)
        right = random.random() < 1 / (1 + math.exp(-abs(margin)))
        scores.append(PairScore(abs(margin) if right else 0.0, 0.0 if right else abs(margin)))
    assert all(abs(bin.predicted - bin.observed) < 0.15 for bin in calibration(scores) if bin.count > 100)
    found = Preferences().summarize([(1.0, 0.0), (0.0, 1.0), (2.0, 2.0), (3.0, 1.0)])
    assert found["accuracy"] == pytest.approx(2.5 / 4)
    assert found["margin"] == pytest.approx(0.5)
