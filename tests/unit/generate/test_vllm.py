"""What goes to vLLM: names, merged adapters, seeds and sizes; and what is said where it is not installed."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.refusals import missing, refused
from torch import Tensor, nn
from typer.testing import CliRunner

from plait.cli.main import app
from plait.config import check, parse
from plait.config.model import HFConfig
from plait.distributed import open_world
from plait.errors import ConfigError, MissingExtraError, ModelError
from plait.generate.hybrid import cache_bytes
from plait.generate.vllm import in_names_of_transformers, load_vllm, seed_of, token_bytes, with_own_head
from plait.models import build_model
from plait.models.common.weights import Made
from plait.models.registry import to_transformers
from plait.posttrain.lora import AdapterSpec, attach, merge
from plait.posttrain.rl.trainer import merged_weights

LLAMA = {"type": "llama", "vocab_size": 40, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_embeddings": True},
    "gpt": {"type": "gpt", "vocab_size": 40, "dim": 32, "layers": 2, "heads": 4, "seq_len": 16},
    "moe": {**LLAMA, "type": "moe", "experts": 4, "ffn_dim": 32},
}


def described(name: str) -> Any:
    return parse({"model": MODELS[name]}).config.model


def with_random_values(config: Any) -> nn.Module:
    model = build_model(config)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape) * 0.2)
    return model.eval()


@pytest.mark.parametrize("name", list(MODELS))
def test_renamed_weights_are_the_model_that_transformers_builds_from_its_description(name: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = described(name)
    model, portable = with_random_values(config), to_transformers(config)
    weights = dict(in_names_of_transformers(model.named_parameters(), portable.made))
    save_file({key: value.detach().contiguous() for key, value in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(portable.description))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 40, (3, 12))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(input_ids=ids), rtol=1e-4, atol=1e-4)


def test_a_part_is_held_only_until_all_is_made_of_it() -> None:
    made = {"sum": Made(("a", "b"), torch.add), "twice": Made(("a",), lambda a: a * 2), "c": Made(("c",), torch.neg)}
    a, b, c = torch.randn(3, 4).unbind()
    coming = in_names_of_transformers([("a", a), ("c", c), ("b", b)], made)
    found = list(coming)
    assert [name for name, _ in found] == ["twice", "c", "sum"]  # each as soon as it can be
    assert torch.equal(dict(found)["sum"], a + b)
    paused = in_names_of_transformers(iter([("c", c), ("a", a)]), made)
    next(paused)
    next(paused)
    assert set(paused.gi_frame.f_locals["held"]) == {"a"}  # type: ignore[attr-defined]


def test_weights_without_a_counterpart_and_counterparts_without_weights_are_refused() -> None:
    config = described("llama")
    model, made = with_random_values(config), to_transformers(config).made
    named = dict(model.named_parameters())
    strange: dict[str, Tensor] = {**named, "blocks.0.attention.q.lora_A.weight": torch.ones(1)}
    with refused(ModelError, "blocks.0.attention.q.lora_A.weight", "transformers"):
        list(in_names_of_transformers(strange.items(), made))
    named.pop("blocks.1.ffn.up.weight")
    with refused(ModelError, "mlp.up_proj.weight", "blocks.1.ffn.up.weight"):
        list(in_names_of_transformers(named.items(), made))


def test_an_embedding_that_is_the_head_too_is_sent_as_both() -> None:
    for name in ("llama", "tied"):
        config = described(name)
        model, made = with_random_values(config), to_transformers(config).made
        found = dict(with_own_head(in_names_of_transformers(model.named_parameters(), made)))
        same = torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
        assert same == (name == "tied")
    with refused(ModelError, "lm_head.weight", "embedding"):
        list(with_own_head([("model.norm.weight", torch.ones(2))]))


def gpt2_of_transformers() -> HFConfig:
    sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return HFConfig(config={"model_type": "gpt2", **sizes})


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "Conv1D"])
def test_adapters_are_merged_on_the_way_out_and_the_policy_keeps_them(transposed: bool) -> None:
    if transposed:
        pytest.importorskip("transformers")
    config = gpt2_of_transformers() if transposed else described("llama")
    model = build_model(config)
    plain = {name for name, _ in model.named_parameters()}
    attach(model, AdapterSpec(rank=3, alpha=random.uniform(1.0, 9.0)), ["linear"])
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    before = {name: param.clone() for name, param in model.named_parameters()}
    found = dict(merged_weights(model, model.named_parameters()))
    assert set(found) == plain
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert merge(model) > 0
    for name, param in model.named_parameters():
        if name in plain:
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-5)


def test_an_answer_has_its_own_seed_and_the_cache_its_size() -> None:
    seeds = {seed_of(seed, key) for seed in range(20) for key in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    for name in ("llama", "gpt", "moe"):
        config = described(name)
        needed = cache_bytes(build_model(config), rows=1, tokens=1, dtype=torch.bfloat16)
        assert token_bytes(to_transformers(config).description, torch.bfloat16) == needed
    assert token_bytes({"model_type": "unheard of"}, torch.bfloat16) is None


def describe(**changes: Any) -> dict[str, Any]:
    return {
        "phase": "grpo",
        "model": LLAMA,
        "posttrain": {"data": [{"type": "task"}]},
        "batch": {"total": 8},
        "train": {"max_steps": 1},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"rollout": {"vllm": {"memory": 0.4}}}, "rollout.vllm", ["0.4", "`rollout.mode`", "auto"]),
        (
            {"rollout": {"mode": "vllm"}, "lora": {"base": "int8"}},
            "lora.base",
            ["int8", "vLLM", "`base: full`", "`rollout.mode`"],
        ),
        (
            {"rollout": {"mode": "vllm"}, "model": {"type": "import", "target": "package.module:Model"}},
            "rollout.mode",
            ["vllm", "`model.type: import`"],
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_anything_starts(
    changes: dict[str, Any], key: str, named: list[str]
) -> None:
    with refused(ConfigError, *named, key=key):
        check(parse(describe(**changes)).config, has_val=True, require_length=False)


def test_without_the_package_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed, where it is
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(describe(work_dir=str(tmp_path / "run"))))
    found = CliRunner().invoke(app, ["grpo", str(file), "rollout.mode=vllm", "--nproc", "2"])
    assert isinstance(found.exception, ConfigError)
    assert [problem.path for problem in found.exception.problems] == ["rollout.mode"]
    assert not missing(str(found.exception), "'vllm'", "pip install 'plait[vllm]'")
    assert not (tmp_path / "run").exists()
    config = parse({"model": LLAMA, "device": "cpu"}).config
    with open_world(config) as world, refused(MissingExtraError, "vLLM", "'vllm'", "plait[vllm]"):
        load_vllm(world)


def test_its_options_are_read_and_checked() -> None:
    rollout = parse(describe(rollout={"mode": "vllm", "vllm": {"memory": 0.25, "eager": True}})).config.rollout
    assert rollout is not None
    assert (rollout.vllm.memory, rollout.vllm.eager) == (0.25, True)
    with refused(ConfigError, "1.5", key="rollout.vllm.memory"):
        parse(describe(rollout={"mode": "vllm", "vllm": {"memory": 1.5}}))
