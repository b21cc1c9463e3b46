"""Rules between settings: what contradicts, what has no effect, and what is fine."""

from __future__ import annotations

import pytest
from tests.refusals import refused

from plait.config import check, parse
from plait.errors import ConfigError

JSONL = {"type": "jsonl", "path": "x", "text_key": "text"}

CYCLE = {"type": "OneCycle", "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": True}
BROKEN = [
    # strategy
    ({"strategy": {"zero": 2, "sharding": "FULL_SHARD"}}, {"strategy.sharding": "`strategy.zero` is 2"}),
    ({"strategy": {"zero": 1, "sharding": "SHARD_GRAD_OP"}}, {"strategy.sharding": "stage 2"}),
    ({"strategy": {"reshard_after_forward": False}}, {"strategy.reshard_after_forward": "nothing is sharded"}),
    ({"strategy": {"zero": 0, "forward_prefetch": 1}}, {"strategy.forward_prefetch": "nothing is sharded"}),
    ({"strategy": {"backward_prefetch": 2}}, {"strategy.backward_prefetch": "nothing is sharded"}),
    ({"strategy": {"zero": 1, "reshard_after_forward": True}}, {"strategy.reshard_after_forward": "stage 3"}),
    ({"strategy": {"zero": 2, "reshard_after_forward": 4}}, {"strategy.reshard_after_forward": "stage 2"}),
    ({"strategy": {"zero": 3, "reshard_after_forward": False}}, {"strategy.reshard_after_forward": "stage 2"}),
    ({"strategy": {"zero": 3, "reshard_after_forward": 1}}, {"strategy.reshard_after_forward": "stage 2"}),
    ({"strategy": {"zero": 3, "bucket_mb": 25.0}}, {"strategy.bucket_mb": "no effect"}),
    ({"strategy": {"layout": {"dp_shard": 2}}}, {"strategy.layout.dp_shard": "stage 0"}),
    ({"strategy": {"recompute": {"mode": "full", "every": 2}}}, {"strategy.recompute.every": "mode every"}),
    ({"strategy": {"recompute": {"save_ops": ["mm"]}}}, {"strategy.recompute.save_ops": "mode selective"}),
    ({"strategy": {"recompute": {"budget_gib": 3.0}}}, {"strategy.recompute.budget_gib": "mode auto"}),
    (
        {"strategy": {"compile": {"enabled": False, "backend": "eager", "scope": "block"}}},
        {"strategy.compile.backend": "enabled` is false", "strategy.compile.scope": "enabled` is false"},
    ),
    ({"strategy": {"wrap": {"classes": ["Block"]}}}, {"strategy.wrap.classes": "nothing is sharded"}),
    ({"strategy": {"wrap": {"min_params": 9}, "compile": True}}, {"strategy.wrap.min_params": "nothing is sharded"}),
    ({"strategy": {"tiles": {"tokens": 64}}}, {"strategy.tiles.tokens": "no layer is named"}),
    (
        {"strategy": {"layout": {"tp": 2}, "tensor": {"async_tp": True}}},
        {"strategy.tensor.async_tp": "needs `strategy.compile`"},
    ),
    (
        {"strategy": {"layout": {"pp": 2}, "pipeline": {"micro_batches": 4}}, "batch": {"accumulation": 2}},
        {"strategy.pipeline.micro_batches": "`batch.accumulation` is 2"},
    ),
    (
        {"strategy": {"offload": {"optimizer": "nvme", "path": "here"}}, "checkpoint": {"async_save": True}},
        {"checkpoint.async_save": "`strategy.offload.optimizer: nvme`"},
    ),
    ({"device": "cpu", "backend": "nccl"}, {"backend": "`device` is cpu"}),
    ({"device": "xpu", "backend": "nccl"}, {"backend": "`device: cuda`"}),
    ({"device": "cuda", "backend": "xccl"}, {"backend": "`device: xpu`"}),
    # precision
    ({"precision": {"scaler": {"window": 1000}}}, {"precision.scaler.window": "only in fp16"}),
    ({"precision": {"compute": "bf16", "scaler": {"static": 8.0}}}, {"precision.scaler.static": "is bf16"}),
    (
        {"precision": {"compute": "fp16", "scaler": {"static": 8.0, "window": 5}}},
        {"precision.scaler.window": "fixes the scale at 8"},
    ),
    ({"precision": {"compute": "bf16", "reduce": "fp16"}}, {"precision.reduce": "is bf16"}),
    ({"precision": {"master": False}}, {"precision.master": "the weights are fp32"}),
    ({"precision": {"compute": "tf32", "master": False}}, {"precision.master": "the weights are fp32"}),
    # train
    ({"train": {"max_epochs": 2, "max_steps": 3}}, {"train.max_steps": "`train.max_epochs`"}),
    ({"train": {"max_steps": 3, "by_epoch": True}}, {"train.by_epoch": "`train.max_steps: 3`"}),
    ({"train": {"max_epochs": 3, "by_epoch": False}}, {"train.by_epoch": "`train.max_epochs: 3`"}),
    ({"train": {"clip_norm": 1.0, "clip_value": 0.5}}, {"train.clip_value": "`train.clip_norm`"}),
    ({"train": {"val_every": 1}}, {"train.val_every": "validation data"}),
    ({"train": {"val_batches": 1}}, {"train.val_batches": "validation data"}),
    ({"checkpoint": {"best": {}}}, {"checkpoint.best": "validation data"}),
    ({"hooks": [{"type": "ema"}, {"type": "early_stop"}]}, {"hooks.1": "early_stop needs validation data"}),
    ({"optim": {"type": "SGD", "nesterov": True}}, {"optim.nesterov": "momentum"}),
    ({"optim": {"type": "SGD"}, "schedule": CYCLE}, {"schedule.cycle_momentum": "SGD has no momentum"}),
    ({"optim": {"type": "Adagrad"}, "schedule": CYCLE}, {"schedule.cycle_momentum": "Adagrad has no momentum"}),
    (
        {"schedule": {"type": "LinearLR", "warmup_start_factor": 0.1}},
        {"schedule.warmup_start_factor": "`schedule.warmup` is 0"},
    ),
    ({"log": {"wandb_project": "p"}}, {"log.wandb_project": "no wandb"}),
    ({"train": {"guard": {"enabled": False, "max_skips": 3}}}, {"train.guard.max_skips": "no step is skipped"}),
    # model
    ({"model": {"type": "gpt", "dim": 100, "heads": 12}}, {"model.dim": "8.33"}),
    ({"model": {"type": "llama", "dim": 100, "heads": 12, "kv_heads": 12}}, {"model.dim": "8.33"}),
    ({"model": {"type": "llama", "heads": 32, "kv_heads": 5}}, {"model.kv_heads": "6.4"}),
    ({"model": {"type": "llama", "dim": 60, "heads": 4}}, {"model.dim": "even"}),
    ({"model": {"type": "hf"}}, {"model": "`path` or `config`"}),
    ({"model": {"type": "hf", "path": "x", "config": {"model_type": "gpt2"}}}, {"model.config": "'x'"}),
    ({"model": {"type": "hf", "config": {}, "pretrained": True}}, {"model.pretrained": "no weights"}),
    # data
    ({"data": {**JSONL, "tokenizer": "t.json", "vocab_size": 512}}, {"data.vocab_size": "size of its own"}),
    ({"val_data": {**JSONL, "val_fraction": 0.05}}, {"val_data.val_fraction": "`val_data.split` is all"}),
    (
        {"model": {"type": "gpt", "seq_len": 64}, "data": {**JSONL, "seq_len": 65}},
        {"data.seq_len": "longer than `model.seq_len`, 64"},
    ),
    (
        {"model": {"type": "llama", "vocab_size": 300}, "data": {**JSONL, "vocab_size": 301}},
        {"data.vocab_size": "`model.vocab_size` is 300"},
    ),
    ({"model": {"type": "llama", "vocab_size": 256}, "data": JSONL}, {"data.vocab_size": "`model.vocab_size` is 256"}),
    *(
        ({"model": {"type": "hf", "config": {}, "task": task}, role: JSONL}, {"model.task": f"`{role}`"})
        for task in ("masked-lm", "seq2seq-lm", "sequence-classification", "base")
        for role in ("data", "val_data")
    ),
]

FINE = [
    {"model": {"type": "hf", "config": {}}, "data": JSONL},
    {"model": {"type": "hf", "config": {}, "task": "masked-lm"}, "data": {"type": "import", "target": "mine:rows"}},
    {"strategy": {"layout": {"pp": 2}, "pipeline": {"micro_batches": 4}}, "batch": {"accumulation": 4}},
    {"strategy": {"layout": {"pp": 2}, "pipeline": {"micro_batches": 4}}},
    {"strategy": {"layout": {"pp": 2}}, "batch": {"accumulation": 4}},
    {"profile": {"start": 6, "steps": 3}, "train": {"max_steps": 8}},
    {},
    {"strategy": {"zero": 3, "sharding": "FULL_SHARD"}},
    {"strategy": {"zero": 0, "sharding": "NO_SHARD", "bucket_mb": 10}},
    {"strategy": {"zero": 0, "forward_prefetch": 0}},
    {"strategy": {"zero": 2, "reshard_after_forward": False}},
    {"strategy": {"zero": 3, "reshard_after_forward": 8, "forward_prefetch": 2, "backward_prefetch": 2}},
    {"strategy": "hsdp"},
    {"strategy": {"sharding": "_HYBRID_SHARD_ZERO2"}},
    {"strategy": {"sharding": "HYBRID_SHARD", "layout": {"dp_shard": 8}}},
    {"strategy": {"zero": 2, "layout": {"dp_replicate": 4, "dp_shard": 2}}},
    {"strategy": {"layout": {"dp_replicate": 4}}},
    {"strategy": "single"},
    {"strategy": {"recompute": {"mode": "every", "every": 3}, "wrap": {"names": ["layers.*"]}}},
    {"strategy": {"recompute": {"mode": "full", "budget_gib": None}}},
    {"strategy": {"compile": {"scope": "block"}, "wrap": {"classes": ["Block"]}}},
    {"strategy": {"compile": {"enabled": False}}},
    {"strategy": {"wrap": {"classes": []}}},
    {"device": "cuda", "backend": "nccl"},
    {"device": "auto", "backend": "nccl"},
    {"device": "cuda", "backend": "gloo"},
    {"precision": {"compute": "fp16", "reduce": "fp16", "scaler": {"window": 5}}},
    {"precision": {"compute": "bf16", "master": False}},
    {"precision": {"scaler": {}}},
    {"train": {"max_epochs": 2, "by_epoch": True}},
    {"train": {"by_epoch": True}},
    {"train": {"val_every": None}},
    {"val_data": JSONL, "train": {"val_every": 1}, "checkpoint": {"best": {}}, "hooks": [{"type": "early_stop"}]},
    {"optim": {"type": "SGD", "nesterov": True, "momentum": 0.9}},
    {"optim": {"type": "SGD", "momentum": 0.9}, "schedule": CYCLE},
    {"optim": {"type": "Lion"}, "schedule": CYCLE},
    {
        "schedule": {"type": "LinearLR", "warmup": 5, "warmup_start_factor": 0.1, "by": "epoch"},
        "train": {"max_steps": 9},
    },
    {"schedule": {"type": "WarmupLR"}},
    {"precision": "fp16", "train": {"guard": {"enabled": False, "max_skips": 3}}},
    {"log": {"sinks": ["wandb"], "wandb_project": "p"}},
    {"model": {"type": "llama", "dim": 64, "heads": 4, "kv_heads": 2, "vocab_size": 4096}, "data": JSONL},
    {"model": {"type": "hf", "config": {}}},
    {"model": {"type": "hf", "path": "x", "pretrained": True}},
    {"data": {**JSONL, "split": "train", "val_fraction": 0.1}},
    {"data": {"type": "cifar10", "path": "x"}, "model": {"type": "resnet"}},
    {"model": {"type": "gpt", "seq_len": 8}, "data": {"type": "import", "target": "m:f"}},
]


def broken(source, *, has_val=False, require_length=False):
    parsed = parse(source)
    with pytest.raises(ConfigError) as caught:
        check(parsed.config, has_val=has_val, require_length=require_length, origins=parsed.origins)
    return caught.value.problems


@pytest.mark.parametrize(("source", "expected"), BROKEN)
def test_a_contradiction_is_an_error_that_names_both_sides(source, expected):
    found = broken(source)
    assert {problem.path for problem in found} == set(expected)
    for problem in found:
        assert expected[problem.path] in problem.message
        assert problem.remedy


@pytest.mark.parametrize("source", FINE)
def test_settings_that_agree_pass(source):
    check(parse(source).config, has_val=False, require_length=False)


def test_all_contradictions_are_reported_together():
    everything = {"strategy": {"zero": 3, "bucket_mb": 1}, "train": {"clip_norm": 1, "clip_value": 1, "val_every": 1}}
    assert {p.path for p in broken(everything)} == {"strategy.bucket_mb", "train.clip_value", "train.val_every"}


def test_validation_data_may_be_an_object():
    config = parse({"train": {"val_every": 1}, "checkpoint": {"best": {}}}).config
    check(config, has_val=True, require_length=False)


def test_a_length_is_required_only_where_it_is_asked_for():
    check(parse({}).config, has_val=False, require_length=False)
    (problem,) = broken({}, require_length=True)
    assert "max_epochs" in problem.message
    for name in ("max_epochs", "max_steps"):
        check(parse({"train": {name: 1}}).config, has_val=False, require_length=True)


def test_a_problem_carries_its_origin():
    parsed = parse({"strategy": "fsdp"}, ["strategy.bucket_mb=3"], origin="run.yaml")
    with pytest.raises(ConfigError) as caught:
        check(parsed.config, has_val=False, require_length=False, origins=parsed.origins)
    assert caught.value.problems[0].origin == "override"


def test_a_word_and_an_override_that_disagree_name_where_the_word_came_from():
    parsed = parse({"strategy": "fsdp"}, ["strategy.zero=2"], origin="run.yaml")
    with refused(ConfigError, "run.yaml", "FULL_SHARD", "3", key="strategy.sharding"):
        check(parsed.config, has_val=False, require_length=False, origins=parsed.origins)


@pytest.mark.parametrize("plan", [False, "off", {"gate": False}, {"gate": "off"}])
def test_the_gate_is_off_however_yaml_reads_the_word(plan: object) -> None:
    assert parse({"plan": plan}).config.plan.gate == "off"


@pytest.mark.parametrize(("steps", "remedy"), [(8, "`profile.start: 6`"), (5, "`train.max_steps: 11`")])
def test_a_profile_that_comes_too_late_is_told_what_would_do(steps, remedy):
    (problem,) = broken({"profile": {"start": 9, "steps": 3}, "train": {"max_steps": steps}})
    assert remedy in problem.remedy
