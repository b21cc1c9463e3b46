"""Parsing: overrides, shorthands and origins."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from plait.config import RunConfig, parse, parse_sections
from plait.config.optim import AdamWConfig, SGDConfig
from plait.config.train import EmaConfig
from plait.errors import ConfigError


def problems(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        parse(source, overrides)
    return {problem.path: problem for problem in caught.value.problems}


def test_nothing_at_all_is_the_default_run():
    assert parse({}).config == RunConfig()


def test_parsed_is_frozen_and_can_cross_to_another_process():
    parsed = parse({"seed": 3}, ["optim.lr=1e-3"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.config = RunConfig()
    assert pickle.loads(pickle.dumps(parsed)) == parsed


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "value"),
        [
            ("seed=3", 3),
            ("timeout_s=1e2", 100.0),
            ("work_dir=runs/a=b", "runs/a=b"),
            ("work_dir=runs/a: b #1", "runs/a: b #1"),
            ("work_dir=*.txt", "*.txt"),
            ("work_dir='3'", "3"),
            ("work_dir=<<", "<<"),
            ("model=null", None),
            (" seed = 3 ", 3),
            ("deterministic=true", True),
        ],
    )
    def test_a_value_is_read_as_yaml(self, override, value):
        key = override.partition("=")[0].strip()
        assert getattr(parse({}, [override]).config, key) == value

    def test_lists_and_mappings_are_written_in_brackets(self):
        config = parse({}, ["optim.betas=[0.8, 0.9]", "strategy.layout={dp_replicate: 2, dp_shard: 4}"]).config
        assert config.optim.betas == (0.8, 0.9)
        assert (config.strategy.layout.dp_replicate, config.strategy.layout.dp_shard) == (2, 4)

    def test_later_ones_win(self):
        assert parse({"seed": 1}, ["seed=2", "seed=3"]).config.seed == 3

    def test_an_index_reaches_into_a_list(self):
        config = parse({"hooks": [{"type": "ema"}]}, ["hooks.0.decay=0.9"]).config
        assert config.hooks[0].decay == 0.9

    def test_the_next_index_adds_an_entry(self):
        config = parse({}, ["hooks.0={type: ema}", "hooks.1.type=early_stop", "hooks.1.patience=7"]).config
        assert [hook.type for hook in config.hooks] == ["ema", "early_stop"]
        assert config.hooks[1].patience == 7

    def test_one_entry_of_a_default_list_can_be_set(self):
        for source in ({}, {"optim": {"lr": 1.0}}, {"optim": {"type": "AdamW"}}):
            assert parse(source, ["optim.betas.1=0.95"]).config.optim.betas == (0.9, 0.95)

    def test_one_entry_of_a_tuple_from_python_can_be_set(self):
        given = (0.5, 0.6)
        assert parse({"optim": {"type": "Adam", "betas": given}}, ["optim.betas.0=0.7"]).config.optim.betas == (
            0.7,
            0.6,
        )

    def test_a_section_that_was_null_can_be_opened(self):
        config = parse({"schedule": None}, ["schedule.type=LinearLR", "schedule.warmup=5"]).config
        assert config.schedule.warmup == 5

    def test_the_source_is_left_as_it_was(self):
        source = {"hooks": [{"type": "ema"}], "optim": {"lr": 1.0}}
        parse(source, ["hooks.0.decay=0.9", "optim.lr=2"])
        assert source == {"hooks": [{"type": "ema"}], "optim": {"lr": 1.0}}

    @pytest.mark.parametrize(
        ("text", "remedy"),
        [
            ("seed", "section.key=value"),
            ("=3", "section.key=value"),
            ("a..b=3", "section.key=value"),
            ("--seed=3", "`seed=3`"),
            ("seed=", "seed=null"),
            ("optim.betas=[0.9", "bracket"),
        ],
    )
    def test_a_malformed_one_shows_the_right_form(self, text, remedy):
        problem = problems({}, [text])[text]
        assert remedy in problem.remedy
        assert problem.origin == "override"

    def test_an_index_beyond_the_list_names_the_entries(self):
        problem = problems({"hooks": [{"type": "ema"}]}, ["hooks.4.decay=0.9"])["hooks.4"]
        assert re.findall(r"\d+", problem.remedy) == ["0", "0", "1"]

    def test_nothing_can_be_set_inside_a_number(self):
        assert "3" in problems({"seed": 3}, ["seed.x=1"])["seed"].message


class TestShorthands:
    @pytest.mark.parametrize(
        ("word", "stage"),
        [("ddp", 0), ("zero1", 1), ("ZeRO-2", 2), ("zero_3", 3), ("fsdp", 3), ("hsdp", 3), ("single", 0)],
    )
    def test_a_strategy_is_one_word(self, word, stage):
        assert parse({"strategy": word}).config.strategy.stage == stage

    def test_an_override_goes_through_a_strategy_word(self):
        strategy = parse({"strategy": "zero3"}, ["strategy.compile=true"]).config.strategy
        assert strategy.zero == 3
        assert strategy.compile.enabled

    def test_an_override_goes_through_a_precision_word(self):
        precision = parse({"precision": "bf16"}, ["precision.reduce=bf16"]).config.precision
        assert (precision.compute, precision.reduce) == ("bf16", "bf16")

    def test_an_override_goes_through_a_recompute_word(self):
        recompute = parse(
            {"strategy": {"recompute": "every"}}, ["strategy.recompute.every=3"]
        ).config.strategy.recompute
        assert (recompute.mode, recompute.every) == ("every", 3)

    def test_an_override_goes_through_compile_true(self):
        section = parse({"strategy": {"compile": True}}, ["strategy.compile.mode=max-autotune"]).config.strategy.compile
        assert (section.enabled, section.mode) == (True, "max-autotune")

    def test_an_override_goes_through_an_override(self):
        strategy = parse(
            {}, ["strategy=zero2", "strategy.recompute=full", "strategy.recompute.mode=none"]
        ).config.strategy
        assert (strategy.zero, strategy.recompute.mode) == (2, "none")

    def test_a_word_that_means_nothing_is_reported_once_even_when_opened(self):
        found = problems({"strategy": "zer3"}, ["strategy.compile=true"])
        assert list(found) == ["strategy"]
        assert "`zero3`" in found["strategy"].remedy

    def test_data_parallel_is_answered_with_ddp(self):
        assert "ddp" in problems({"strategy": "nn.DataParallel"})["strategy"].remedy

    def test_a_wrong_word_is_reported_where_it_was_written(self):
        found = problems({"precision": "bf61", "strategy": {"recompute": "ful"}})
        assert set(found) == {"precision", "strategy.recompute"}
        assert "`bf16`" in found["precision"].remedy

    def test_a_wrong_word_in_the_full_key_is_reported_there(self):
        assert set(problems({"precision": "bf16"}, ["precision.compute=bf61"])) == {"precision.compute"}

    def test_an_optimizer_without_a_type_is_adamw(self):
        assert parse({}, ["optim.lr=3e-4"]).config.optim == AdamWConfig(lr=3e-4)

    def test_shorthand_tables_are_never_changed(self):
        parse({"strategy": "single"}, ["strategy.layout.dp_replicate=4"])
        assert parse({"strategy": "single"}).config.strategy.layout.dp_replicate == 1


class TestOrigins:
    def test_each_value_knows_where_it_came_from(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("strategy: zero3\noptim: {type: AdamW, betas: [0.9, 0.95]}\n")
        origins = parse(path, ["optim.lr=1e-4", "strategy.compile=true"]).origins
        assert origins["strategy.zero"] == "run.yaml"
        assert origins["optim.betas"] == "run.yaml"
        assert origins["optim.lr"] == "override"
        assert origins["strategy.compile.enabled"] == "override"
        assert origins["strategy.wrap.names"] == "default"
        assert origins["seed"] == "default"

    def test_an_override_of_a_section_forgets_what_was_in_it(self):
        parsed = parse({"optim": {"type": "SGD", "lr": 1.0, "momentum": 0.9}}, ["optim={type: SGD}"], origin="base")
        assert parsed.origins["optim.momentum"] == "default"
        assert parsed.origins["optim.type"] == "override"

    def test_a_source_can_be_given_a_name(self):
        assert parse({"seed": 1}, origin="sweep 7").origins["seed"] == "sweep 7"

    def test_a_problem_carries_its_origin(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text("sed = 1\n")
        found = problems(path, ["optim.lrr=1"])
        assert found["sed"].origin == "run.toml"
        assert found["optim.lrr"].origin == "override"


class TestSections:
    def test_keywords_are_mappings_words_or_section_objects(self):
        parsed = parse_sections(
            optim=SGDConfig(lr=0.5), strategy="zero1", train={"max_steps": 10}, hooks=[EmaConfig(decay=0.5)], seed=4
        )
        assert parsed.config.optim == SGDConfig(lr=0.5)
        assert parsed.config.strategy.zero == 1
        assert parsed.config.train.max_steps == 10
        assert parsed.config.hooks == (EmaConfig(decay=0.5),)
        assert parsed.origins["optim.lr"] == "keyword"
        assert parsed.origins["optim.momentum"] == "default"

    def test_only_what_was_set_in_a_section_object_counts_as_set(self):
        assert parse_sections(optim=SGDConfig(lr=0.5)).config.optim.model_fields_set == {"type", "lr"}

    def test_none_is_the_same_as_left_out(self):
        assert parse_sections(model=None, batch=None).config == RunConfig()

    def test_a_path_object_is_a_path(self):
        assert parse_sections(work_dir=Path("runs") / "x").config.work_dir == str(Path("runs/x"))

    def test_every_path_knows_the_home_folder(self):
        config = parse_sections(work_dir="~/runs", checkpoint={"resume": "~/old"}).config
        assert (config.work_dir, config.checkpoint.resume) == (str(Path.home() / "runs"), str(Path.home() / "old"))

    def test_every_path_knows_variables(self, monkeypatch):
        monkeypatch.setenv("SCRATCH", "/fast")
        config = parse_sections(work_dir="$SCRATCH/runs", checkpoint={"resume": "${SCRATCH}/old"}).config
        assert (config.work_dir, config.checkpoint.resume) == ("/fast/runs", "/fast/old")

    @pytest.mark.parametrize("path", ["$NOT_SET/runs", "runs/${NOT_SET}", "$0"])
    def test_a_variable_that_is_not_set_is_refused(self, path, monkeypatch):
        monkeypatch.delenv("NOT_SET", raising=False)
        with pytest.raises(ConfigError) as caught:
            parse_sections(work_dir=path)
        assert [problem.path for problem in caught.value.problems] == ["work_dir"]
        assert path in str(caught.value)

    def test_errors_are_the_same_and_say_keyword(self):
        with pytest.raises(ConfigError) as caught:
            parse_sections(optimizer={"lr": 1}, train={"max_step": 1})
        assert {problem.path for problem in caught.value.problems} == {"optimizer", "train.max_step"}
        assert {problem.origin for problem in caught.value.problems} == {"keyword"}

    def test_objects_in_args_are_handed_on_untouched(self):
        shape, thing = (3, 4), object()
        section = {"type": "import", "target": "m:f", "args": {"shape": shape, "thing": thing}}
        config = parse_sections(model=section).config
        assert config.model.args["shape"] == shape
        assert config.model.args["thing"] is thing


def test_what_was_not_written_about_data_is_no_larger_than_the_model() -> None:
    model = {"type": "gpt", "seq_len": 64, "vocab_size": 300}
    text: dict[str, Any] = {"type": "text", "path": "x"}
    mixture = {"type": "mixture", "sources": [text, {"type": "tokens", "path": "y", "seq_len": 32}]}
    config: Any = parse({"model": model, "data": mixture, "val_data": {**text, "vocab_size": 280}}).config
    first, second = config.data.sources
    assert (first.seq_len, first.vocab_size, second.seq_len) == (64, 300, 32)
    assert (config.val_data.seq_len, config.val_data.vocab_size) == (64, 280)
    assert first.model_fields_set == {"type", "path"}  # so that no rule takes it for written
    again: Any = parse_sections(model=model | {"seq_len": 48}, data=first).config
    assert again.data.seq_len == 48
    roomy: Any = parse({"model": {"type": "llama"}, "data": text}).config
    assert (roomy.data.seq_len, roomy.data.vocab_size) == (1024, 4096)
