"""The flags of DeepSpeed-Chat's scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.refusals import refused

from plait.config import check, parse
from plait.errors import ConfigError
from plait.frontends.deepspeed.chat import DEPLOYMENTS, FLAGS, TRAIN_FLAGS, read_steps, translate

ROOT = Path(__file__).parents[3]

LINE = """--data_path rows.jsonl more.jsonl --data_split 2,4,4 --model_name_or_path opt --per_device_train_batch_size 8
--max_seq_len 512 --learning_rate 9.65e-6 --weight_decay 0.1 --num_train_epochs 2 --gradient_accumulation_steps 4
--lr_scheduler_type cosine --num_warmup_steps 10 --seed 1234 --zero_stage 3 --deepspeed --output_dir out --dtype bf16
--gradient_checkpointing --lora_dim 128 --lora_module_name decoder.layers. --only_optimize_lora --im_start=<s>
--print_steps 5 --compute_fp32_loss --minimum_learning_rate 9.65e-7"""


def test_a_command_line_of_theirs_becomes_a_run_of_the_same_meaning() -> None:
    settings, said = translate(LINE.split())
    config = parse({"phase": "sft"}, [f"{key}={value!r}" for key, value in settings.items()]).config
    assert config.posttrain is not None
    assert [source.path for source in config.posttrain.data] == ["rows.jsonl", "more.jsonl"]  # type: ignore[union-attr]
    assert (config.posttrain.data_split, config.posttrain.max_len) == ("2,4,4", 512)
    assert config.posttrain.template.kind == "marked"
    assert (config.batch.micro, config.batch.accumulation, config.train.max_epochs) == (8, 4, 2)
    assert (config.optim.lr, config.optim.weight_decay, config.seed) == (9.65e-6, 0.1, 1234)
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha, config.lora.only) == (128, 1.0, True)
    assert config.lora.targets == ("*decoder.layers.*",)
    assert (config.strategy.zero, config.strategy.recompute.mode, config.precision.compute) == (3, "full", "bf16")
    assert config.schedule is not None
    assert (config.schedule.type, config.schedule.warmup) == ("CosineAnnealingLR", 10)  # type: ignore[union-attr]
    assert config.schedule.min_factor == pytest.approx(0.1)  # type: ignore[union-attr]
    assert [line.split(":")[0] for line in said] == ["--deepspeed", "--compute_fp32_loss"]


def test_a_configuration_of_deepspeed_behind_the_switch_is_not_lost_without_a_word() -> None:
    ((said,), (plain,)) = (translate(words)[1] for words in (["--deepspeed", "ds_config.json"], ["--deepspeed"]))
    assert ("strategy.config" in said, "strategy.config" in plain) == (True, False)


def test_no_adapters_are_asked_for_with_zero_dimensions() -> None:
    assert translate(["--lora_dim", "0", "--only_optimize_lora"])[0] == {}
    assert translate(["--lora_dim", "4"])[0]["lora.only"] is False


def test_beside_an_older_mini_batch_the_batch_is_what_is_written_at_once() -> None:
    older = ["--per_device_train_batch_size", "8", "--per_device_mini_train_batch_size=4"]
    assert translate(older)[0] == {"batch.micro": 4, "rollout.max_rows": 8}
    assert translate(older[::-1][:1])[0] == {"batch.micro": 4}


def test_unknown_flags_and_words_are_errors() -> None:
    with refused(ConfigError, "`lora_dim`", key="--lora_dimm"):
        translate(["--lora_dimm", "3"])
    with refused(ConfigError, "'x'", key="--seed"):
        translate(["--seed", "x"])
    with refused(ConfigError, "'cosine_with_restarts'", "CosineAnnealingWarmRestarts", key="--lr_scheduler_type"):
        translate(["--lr_scheduler_type", "cosine_with_restarts"])
    with refused(ConfigError, "--learning_rate", "--lr_scheduler_type cosine", key="--minimum_learning_rate"):
        translate(["--minimum_learning_rate", "1e-6"])
    with refused(ConfigError, "--flag", key="3"):
        translate(["3"])


def test_the_words_of_their_three_steps() -> None:
    steps = read_steps(
        ["--step", "3", "1", "--deployment-type", "single_node", "--actor-model", "models/opt", "--actor-zero-stage=3"]
    )
    assert (steps.phases, steps.nproc) == (("sft", "ppo"), "gpu")
    assert steps.settings("sft") == ["work_dir=output/sft", "model.type=hf", "model.path=models/opt", "strategy.zero=3"]
    assert steps.settings("ppo")[-1] == "posttrain.start=output/sft"
    judge = read_steps(["--reward-model", "models/small", "--output-dir", "out"]).settings("reward")
    assert judge == ["work_dir=out/reward", "model.type=hf", "model.path=models/small"]
    assert read_steps(["--deployment-type", "multi_node"]).nproc is None
    for words, key, name in (
        ("--step 4", "--step", "'4'"),
        ("--deployment-type cloud", "--deployment-type", "'cloud'"),
        ("--actor-model 1.3b", "--actor-model", "'1.3b'"),
        ("--actor-zero-stage 5", "--actor-zero-stage", "'5'"),
        ("--stepp 1", "--stepp", "`step`"),
    ):
        with refused(ConfigError, name, key=key):
            read_steps(words.split())


@pytest.mark.parametrize("page", ["posttrain.md", "zh-CN/posttrain.md"])
def test_every_flag_is_in_the_guide(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    words = [*FLAGS, *(name.replace("_", "-") for name in TRAIN_FLAGS), *DEPLOYMENTS]
    assert [name for name in words if f"`--{name}`" not in text and f"`{name}`" not in text] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "posttrain").glob("*.yaml")), ids=lambda path: path.name)
def test_example_descriptions_are_runs_of_every_phase(path: Path) -> None:
    for phase in ("sft", "reward", "dpo"):
        check(parse(path, [f"phase={phase}"]).config, has_val=True, require_length=True)
