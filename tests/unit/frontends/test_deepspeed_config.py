"""A DeepSpeed configuration says the same in Plait's words."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused

from plait.config import check, parse
from plait.errors import ConfigError
from plait.frontends.deepspeed.config import search, translate
from plait.frontends.deepspeed.config.translate import KEYS
from plait.frontends.key_report import KeyOutcome, Translation


def problems(config: Any, **options: Any) -> dict[str, str]:
    """What is wrong, by key."""
    with pytest.raises(ConfigError) as error:
        translate(config, **options)
    return {each.path: f"{each.message} {each.remedy}" for each in error.value.problems}


def answers(translation: Translation) -> dict[str, KeyOutcome]:
    return {entry.key: entry.outcome for entry in translation.report.entries}


def sections(config: Any) -> dict[str, Any]:
    """The translation without the clipping that an absent `gradient_clipping` means."""
    return translate({"gradient_clipping": 0, **config}).sections


def test_a_whole_configuration_parses_and_breaks_no_rule() -> None:
    lr, total = random.uniform(1e-5, 1e-2), 2 * random.randint(1, 50)
    found = translate(
        {
            "train_batch_size": total,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": lr, "betas": [0.8, 0.99], "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": lr, "warmup_num_steps": 50}},
            "fp16": {"enabled": True, "loss_scale_window": 500, "initial_scale_power": 15, "hysteresis": 3},
            "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e7},
            "gradient_clipping": 0.5,
            "steps_per_print": 2000,
        }
    )
    config = parse(found.sections).config
    check(config, has_val=False, require_length=False)
    assert (config.batch.total, config.batch.accumulation, config.train.clip_norm) == (total, 2, 0.5)
    assert (config.optim.type, config.optim.lr, config.optim.no_decay) == ("AdamW", lr, ())
    assert config.schedule is not None
    assert (config.schedule.type, config.strategy.zero, config.log.every) == ("WarmupLR", 3, 2000)
    scaler = config.precision.scaler
    assert (config.precision.compute, config.precision.reduce, scaler.window, scaler.hysteresis) == (
        "fp16",
        "fp16",
        500,
        3,
    )
    assert answers(found)["zero_optimization.reduce_bucket_size"] is KeyOutcome.UNNEEDED
    found.report.raise_refusals()


def test_a_file_with_comments_a_mapping_and_base64_say_the_same(tmp_path: Path) -> None:
    config = {"train_batch_size": random.randint(1, 99), "bf16": {"enabled": True}}
    text = json.dumps(config, indent=1)
    (tmp_path / "ds.json").write_text("// ours\n" + text.replace("{", "{ /* so */", 1))
    (tmp_path / "ds.conf").write_text(text)
    coded = base64.urlsafe_b64encode(text.encode()).decode()
    expected = translate(config).sections
    for each in (tmp_path / "ds.json", str(tmp_path / "ds.conf"), coded):
        assert translate(each).sections == expected


def test_hjson_without_commas_and_quotes_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n  train_batch_size: 8  # all of it\n  "fp16": {\n    enabled: true\n  }\n  "steps_per_print": 5\n}\n'
    )
    config = {"train_batch_size": 8, "fp16": {"enabled": True}, "steps_per_print": 5}
    assert translate(path).sections == translate(config).sections


def test_a_section_without_the_outer_braces_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('// a part\n"zero_optimization": {\n  "stage": 2\n}\n\n"bf16": {"enabled": true},\n')
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert translate(path).sections == translate(config).sections


def test_what_is_no_configuration_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"a": [1, }')
    (tmp_path / "list.json").write_text("[1]")
    for source in ("no such thing", str(tmp_path / "absent.json"), tmp_path / "broken.json", tmp_path / "list.json"):
        assert problems(source)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("gradient_cliping", "gradient_clipping"),
        ("train_batchsize", "train_batch_size"),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(key: str, meant: str) -> None:
    assert f"`{meant}`" in problems({key: 1})[key]


def test_unknown_keys_inside_sections_are_found_too() -> None:
    found = problems({"zero_optimization": {"stage3_max_live_params": 1}, "elasticity": {"enable": True}})
    assert "stage3_max_live_parameters" in found["zero_optimization.stage3_max_live_params"]
    assert "enabled" in found["elasticity.enable"]


def test_a_key_in_the_wrong_place_is_told_where_it_belongs() -> None:
    found = problems({"stage": 2, "lr": 1e-3, "zero_optimization": {"zero_optimization": {}, "loss_scale": 1}})
    assert "`zero_optimization`" in found["stage"]
    assert "`optimizer.params`" in found["lr"]
    assert "top" in found["zero_optimization.zero_optimization"]
    assert "`fp16`" in found["zero_optimization.loss_scale"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_grad_norm", "gradient_clipping"),
        ("learning_rate", "optimizer.params.lr"),
        ("micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
        ("zero_stage", "zero_optimization.stage"),
    ],
)
def test_a_word_of_another_framework_is_told_deepspeeds(key: str, meant: str) -> None:
    assert f"`{meant}`" in problems({key: 1})[key]


def test_and_so_it_is_inside_a_section() -> None:
    given = {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}
    assert "`optimizer.params.lr`" in problems(given)["optimizer.params.learning_rate"]


def test_a_word_that_many_sections_have_belongs_in_none_of_them() -> None:
    told = problems({"tensor_parallel": {"enabled": False}})["tensor_parallel.enabled"]
    assert missing(told, *(f"`{key}`" for key in KEYS)) == [f"`{key}`" for key in KEYS if key != "tensor_parallel"]


def test_a_key_of_another_schedule_is_told_whose_it_is() -> None:
    given = {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}}}
    assert problems(given).keys() == {"scheduler.params.total_num_steps"}
    assert not missing(problems(given)["scheduler.params.total_num_steps"], "WarmupDecayLR", "WarmupCosineLR")


def test_switches_may_be_written_as_texts() -> None:
    written = {"fp16": {"enabled": "true"}, "bf16": {"enabled": "False"}, "zero_optimization": {"stage": 2}}
    meant = {"fp16": {"enabled": True}, "bf16": {"enabled": False}, "zero_optimization": {"stage": 2}}
    assert translate(written).sections == translate(meant).sections
    assert "overlap_comm" in next(iter(problems({"zero_optimization": {"overlap_comm": "yes"}})))


def test_objects_of_the_script_are_taken_as_well(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": tmp_path}}
    config = {"zero_optimization": zero, "steps_per_print": float("inf"), "torch_autocast": {"enabled": True}}
    config["torch_autocast"]["dtype"] = torch.bfloat16
    found = translate(config)
    assert found.sections["strategy"]["offload"]["path"] == str(tmp_path)
    assert found.sections["precision"] == {"compute": "bf16"}
    assert "log" not in found.sections


def test_all_values_of_a_wrong_type_are_named_at_once() -> None:
    found = problems(
        {
            "train_batch_size": "32",
            "fp16": True,
            "zero_optimization": {"stage": 7, "overlap_comm": "yes", "offload_optimizer": {"device": "gpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": "big", "betas": [0.9]}},
            "steps_per_print": 0.5,
        }
    )
    assert set(found) == {
        "train_batch_size",
        "fp16",
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "zero_optimization.offload_optimizer.device",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "steps_per_print",
    }


def test_values_that_plait_refuses_are_named_by_their_deepspeed_key() -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": -1.0, "betas": [0.9, 2.0]}}, "gradient_clipping": -1}
    found = problems(config)
    assert set(found) == {"optimizer.params.lr", "optimizer.params.betas", "gradient_clipping"}
    assert "-1" in found["optimizer.params.lr"]
    assert "`optim.lr`" in found["optimizer.params.lr"]


def test_sizes_of_a_batch_must_multiply_out() -> None:
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert translate(config).sections["batch"] == {"total": 16, "micro": 4, "accumulation": 2}
    assert translate(config, world_size=2)
    parts = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    assert not missing(problems(config, world_size=4)["train_batch_size"], 16, *parts, 32)
    assert not missing(problems({**config, "train_batch_size": 12})["train_batch_size"], 12, *parts, 8)
    assert not missing(problems({"train_batch_size": 10}, world_size=4)["train_batch_size"], 10, 4)
    split = {"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2}}
    assert translate(split, world_size=8)


def test_sizes_left_open_stay_open_or_are_filled_in() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {**dict.fromkeys(names, "auto"), "fp16": {"enabled": "auto", "loss_scale_window": 100}}
    assert sections(config) == {}
    filled = translate(config, auto={"train_micro_batch_size_per_gpu": 3, "fp16.enabled": True})
    assert filled.sections["batch"] == {"micro": 3}
    assert filled.sections["precision"]["scaler"] == {"window": 100}


@pytest.mark.parametrize("other", ["bf16", "amp"])
def test_two_formats_at_once_are_an_error_that_names_both(other: str) -> None:
    found = problems(
        {"fp16": {"enabled": True}, other: {"enabled": True, **({"dtype": "bf16"} if "t" in other else {})}}
    )
    assert f"{other}.enabled" in found["fp16.enabled"]


def test_autocast_stands_on_top_of_the_same_format_only() -> None:
    config = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert sections(config)["precision"] == {"compute": "bf16", "reduce": "bf16", "cast_inputs": False}
    config["torch_autocast"]["dtype"] = "float16"
    assert "bf16.enabled" in problems(config)["torch_autocast.dtype"]
    del config["torch_autocast"]["dtype"]
    assert "torch_autocast.dtype" in problems(config)


def test_one_bf16_under_both_its_names_is_an_error() -> None:
    assert "`bf16`" in problems({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}})["bfloat16"]
    assert translate({"bfloat16": {"enabled": True}}).sections == translate({"bf16": {"enabled": True}}).sections


def test_adam_decouples_its_decay_unless_it_is_told_otherwise() -> None:
    def optim(kind: str, **params: Any) -> dict[str, Any]:
        return dict(sections({"optimizer": {"type": kind, "params": params}})["optim"])

    assert optim("Adam") == {"type": "AdamW", "weight_decay": 0.0}
    assert optim("adam", adam_w_mode=False, weight_decay=0.1) == {"type": "Adam", "weight_decay": 0.1, "no_decay": []}
    assert optim("AdamW", adam_w_mode=False)["type"] == "AdamW"
    assert optim("AdamW", torch_adam=True) == {"type": "AdamW", "weight_decay": 0.01, "no_decay": []}
    assert optim("Lion") == {"type": "Lion", "lr": 1e-3, "betas": [0.9, 0.999]}
    assert optim("Lamb", max_coeff=0.5)["max_trust"] == 0.5
    assert optim("SGD", momentum=0.9)["lr"] == 1e-3
    muon = optim("Muon", lr=0.01, adam_lr=0.002)
    assert (muon["lr"], muon["adam_lr"], muon["adam_eps"]) == (0.01, 0.002, 1e-10)


def test_an_optimizer_that_is_not_there_is_refused_with_a_way_out() -> None:
    given = "`initialize`"
    for name, *others in (("OneBitAdam", "Adam", "Lamb"), ("MuAdam", "mup", given), ("RMSprop", "AdamW", given)):
        with refused(ConfigError, repr(name), *others, key="optimizer.type"):
            translate({"optimizer": {"type": name, "params": {"lr": 1}}}).report.raise_refusals()


def test_schedules_keep_deepspeeds_defaults() -> None:
    def schedule(kind: str, **params: Any) -> Any:
        return sections({"scheduler": {"type": kind, "params": params}})["schedule"]

    assert schedule("WarmupDecayLR", total_num_steps=9)["warmup_max_lr"] == 0.001
    assert "warmup_max_lr" not in schedule("WarmupDecayLR", warmup_max_lr="auto", total_num_steps="auto")
    assert schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1)["cycle_momentum"] is True
    assert schedule("WarmupLR", warmup_num_steps=0)["warmup_num_steps"] == 1
    assert "scheduler.params.cycle_min_lr" in problems({"scheduler": {"type": "OneCycle", "params": {}}})


def test_gradients_are_clipped_at_one_unless_told_otherwise() -> None:
    assert translate({}).sections == {"train": {"clip_norm": 1.0}}
    assert translate({"gradient_clipping": 0}).sections == {}
    assert translate({"gradient_clipping": "auto"}).sections == {"train": {"clip_norm": 1.0}}


def test_sums_take_the_widest_format_that_is_asked_for() -> None:
    def precision(**more: Any) -> Any:
        return sections({"bf16": {"enabled": True}, **more})["precision"].get("reduce")

    assert precision() == "bf16"
    assert precision(communication_data_type="fp32") is None
    assert precision(data_types={"grad_accum_dtype": "fp32"}) is None
    assert precision(fp32_allreduce=True) is None
    assert "communication_data_type" in problems({"bf16": {"enabled": True}, "communication_data_type": "fp16"})


def test_offload_and_infinity_reach_their_words() -> None:
    config = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "ratio": 0.75, "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/disk"},
        "stage3_max_live_parameters": 1e9,
        "stage3_prefetch_bucket_size": 4e6,
        "stage3_param_persistence_threshold": 1e4,
    }
    assert sections({"zero_optimization": config})["strategy"]["offload"] == {
        "optimizer": "nvme",
        "path": "/disk",
        "params": "nvme",  # so no weight lives on the device, and `ratio` has none to keep there
        "live_params": 1_000_000_000,
        "prefetch_params": 4_000_000,
        "persistent_params": 10_000,
    }
    alone = {"stage": 3, "offload_optimizer": config["offload_optimizer"]}
    assert sections({"zero_optimization": alone})["strategy"]["offload"]["ratio"] == 0.25
    config["offload_param"] = {"device": "nvme", "nvme_path": "/other"}
    assert "/disk" in problems({"zero_optimization": config})["zero_optimization.offload_param.nvme_path"]


def test_old_words_of_offload_mean_what_they_meant() -> None:
    old = sections({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    new = sections({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert old == new == {"strategy": {"zero": 2, "offload": {"optimizer": "cpu"}}}
    both = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    assert "offload_optimizer" in problems({"zero_optimization": both})["zero_optimization.cpu_offload"]
    assert sections({"zero_optimization": True}) == {"strategy": {"zero": 1}}
    twice = {"stage3_max_live_parameters": 1, "max_live_parameters": 2}
    assert "zero_optimization.stage3_max_live_parameters" in problems({"zero_optimization": twice})
    assert (
        "offload" not in sections({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})["strategy"]
    )
    alone = sections({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert alone["strategy"]["offload"] == {"params": "cpu", "optimizer": "cpu"}


def test_parallelism_becomes_a_layout() -> None:
    found = sections({"tensor_parallel": {"autotp_size": 4}, "sequence_parallel_size": 2})
    assert found["strategy"] == {"layout": {"tp": 4, "cp": 2}, "context": {"kind": "ulysses"}}
    assert sections({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, "mics_shard_size": 16}}) == {
        "strategy": {"zero": 3, "reshard_after_forward": 8, "layout": {"dp_shard": 16}}
    }


def test_removed_features_are_refused_on_and_pass_off() -> None:
    config = {
        "elasticity": {"enabled": True},
        "sparse_gradients": True,
        "compression_training": {"weight_quantization": {}},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5},
        "nebula": {"enabled": True},
        "hybrid_engine": {"enabled": True},
    }
    with pytest.raises(ConfigError) as error:
        translate(config).report.raise_refusals()
    assert {problem.path.split(".")[0] for problem in error.value.problems} == set(config)
    switched_off = {key: {"enabled": False} if isinstance(value, dict) else False for key, value in config.items()}
    translate(switched_off).report.raise_refusals()


def test_monitors_become_sinks_and_no_secret_is_shown() -> None:
    found = translate(
        {
            "tensorboard": {"enabled": True, "output_path": "log/", "job_name": "a"},
            "wandb": {"enabled": True, "team": "us", "project": "p"},
            "csv_monitor": {"enabled": False},
            "comet": {"enabled": False, "api_key": "hidden"},
        }
    )
    assert found.sections["log"] == {"sinks": ["jsonl", "tensorboard", "wandb"], "wandb_project": "p"}
    assert "hidden" not in "".join(found.report.lines())


def test_a_search_is_reached() -> None:
    config = {"autotuning": {"enabled": True, "fast": False, "tuner_type": "random", "mp_size": 2}}
    found = search(config, nproc=2)
    assert found is not None
    assert (found.config.tuner, found.config.nproc) == ("random", 2)
    assert answers(translate(config))["autotuning.tuner_type"] is KeyOutcome.MAPPED
    assert "autotuning.tunner" in problems({"autotuning": {"tunner": 1}})
    assert search({}) is None


def test_comments_written_as_keys_are_no_typos() -> None:
    found = translate({"_comment": "mine", "//": "also", "comment": 1, "_read_the_docs": "there"})
    assert all(answer is KeyOutcome.UNNEEDED for key, answer in answers(found).items() if key != "gradient_clipping")


def test_the_account_counts_and_aligns_its_lines() -> None:
    report = translate({"train_batch_size": 4, "zero_allow_untested_optimizer": True, "gradient_clipping": 0}).report
    assert not missing(report.summary(), 3, f"2 {KeyOutcome.HONOURED}", f"1 {KeyOutcome.UNNEEDED}")
    assert report.lines()[0].split() == ["honoured", "train_batch_size:", "4", "batch.total:", "4"]


def test_the_chat_recipes_configuration_translates_with_every_switch() -> None:
    """What DeepSpeed-Chat makes for a step of training."""
    for stage in range(4):
        for device in ("cpu", "none"):
            found = translate(
                {
                    "train_batch_size": 32,
                    "train_micro_batch_size_per_gpu": 4,
                    "steps_per_print": 10,
                    "zero_optimization": {
                        "stage": stage,
                        "offload_param": {"device": device},
                        "offload_optimizer": {"device": device},
                        "stage3_param_persistence_threshold": 1e4,
                        "stage3_max_live_parameters": 3e7,
                        "stage3_prefetch_bucket_size": 3e7,
                        "memory_efficient_linear": False,
                    },
                    "fp16": {"enabled": True, "loss_scale_window": 100},
                    "gradient_clipping": 1.0,
                    "prescale_gradients": False,
                    "wall_clock_breakdown": False,
                    "hybrid_engine": {"enabled": False, "inference_tp_size": 1, "pin_parameters": True},
                },
                world_size=8,
            )
            found.report.raise_refusals()
            check(parse(found.sections).config, has_val=False, require_length=False)


WRITTEN: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("deepspeed_configs.json").read_text(encoding="utf-8")
)
"""Configurations as guides to DeepSpeed show them and scripts come with them, whole ones and parts."""


@pytest.mark.parametrize("config", WRITTEN, ids=lambda config: "-".join(config)[:60])
def test_configurations_as_people_have_them_translate_and_none_of_them_is_refused(config: dict[str, Any]) -> None:
    found = translate(config)
    found.report.raise_refusals()
    check(parse(found.sections).config, has_val=False, require_length=False)
