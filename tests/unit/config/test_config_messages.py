"""Messages: every problem at once, each with its path, its value, and what to write instead."""

from __future__ import annotations

import re

import pytest
from tests.refusals import missing

from plait.config import parse, parse_sections
from plait.config.explain import _FOREIGN_KEYS, plait_key
from plait.config.run import RunConfig
from plait.config.schema import dotted, paths_with_key
from plait.config.text import counted, listed, nearest, show
from plait.errors import ConfigError


def problems(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        parse(source, overrides)
    return {problem.path: problem for problem in caught.value.problems}


def test_all_problems_are_reported_at_once():
    found = problems(
        {
            "sed": 1,
            "optim": {"type": "AdamWW"},
            "batch": {"micro": 0, "mikro": 1},
            "train": {"max_steps": "ten"},
            "hooks": [{"type": "ema", "decay": 2.0}, {"type": "early_stop", "patence": 1}],
        },
        ["log.sinks=[jsonl, tensorbord]", "nonsense"],
    )
    assert set(found) == {
        "sed",
        "optim.type",
        "batch.micro",
        "batch.mikro",
        "train.max_steps",
        "hooks.0.decay",
        "hooks.1.patence",
        "log.sinks.1",
        "nonsense",
    }


def test_pydantic_does_not_shine_through():
    source = {
        "seed": "x",
        "model": {"type": "gpt", "dim": None, "bias": "maybe", "heads": 1.5},
        "data": {"path": "x"},
        "schedule": {"type": "MultiStepLR"},
        "optim": {"type": "AdamW", "betas": [0.9], "lr": float("nan"), "no_decay": "bias"},
        "strategy": {"zero": 4, "layout": 3, "reshard_after_forward": "x"},
    }
    with pytest.raises(ConfigError) as caught:
        parse(source)
    text = str(caught.value).lower()
    for jargon in ("input should", "pydantic", "valid dictionary", "tuple", "literal", "union", "extra inputs", "none"):
        assert jargon not in text
    assert len(caught.value.problems) == 12


class TestUnknownKeys:
    def test_the_nearest_key_is_suggested(self):
        assert "`max_steps`" in problems({"train": {"max_step": 1}})["train.max_step"].remedy

    def test_the_keys_are_listed_where_none_is_near(self):
        assert not missing(problems({"batch": {"xyz": 1}})["batch.xyz"].remedy, "total", "micro", "accumulation")

    def test_the_value_is_named(self):
        assert "'abc'" in problems({"batch": {"xyz": "abc"}})["batch.xyz"].message

    def test_a_key_of_another_section_is_sent_there(self):
        assert not missing(problems({"lr": 1})["lr"].remedy, "`lr`", "`optim`")
        assert not missing(problems({"train": {"micro": 1}})["train.micro"].remedy, "`micro`", "`batch`")
        assert "`seed`" in problems({"train": {"seed": 1}})["train.seed"].remedy

    def test_another_frameworks_word_has_one_answer(self):
        """`strategy.offload` has a key of this name as well, which nobody means who writes a section."""
        remedy = problems({"optimizer": {"lr": 1}})["optimizer"].remedy
        assert "`optim`" in remedy
        assert "offload" not in remedy

    def test_a_key_of_another_type_is_said_to_be_one(self):
        found = problems({"optim": {"type": "SGD", "betas": [0.9, 0.95]}})
        assert not missing(found["optim.betas"].remedy, "`optim`", "SGD")

    def test_the_path_has_no_tag_in_it(self):
        assert set(problems({"optim": {"type": "SGD", "SGD": {"lr": 1}}})) == {"optim.SGD"}

    def test_a_key_that_is_no_text_is_unknown(self):
        assert set(problems({3: 4})) == {"3"}

    @pytest.mark.parametrize(
        ("word", "key"),
        [
            ("zero_optimization", "`strategy.zero`"),
            ("train_micro_batch_size_per_gpu", "`batch.micro`"),
            ("gradient_accumulation_steps", "`batch.accumulation`"),
            ("gradient_clipping", "`train.clip_norm`"),
            ("fp16", "`precision`"),
            ("bf16", "`precision`"),
            ("train_batch_size", "`batch.total`"),
            ("optimizer", "`optim`"),
            ("scheduler", "`schedule`"),
            ("fsdp_config", "`strategy`"),
            ("mixed_precision", "`precision`"),
            ("param_scheduler", "`schedule`"),
            ("optim_wrapper", "`optim`"),
            ("train_cfg", "`train`"),
            ("work_dirs", "`work_dir`"),
            ("default_hooks", "`log` and `checkpoint`"),
        ],
    )
    def test_words_of_other_frameworks_are_translated(self, word, key):
        assert not missing(problems({word: {}})[word].remedy, *key.split(" and "))

    @pytest.mark.parametrize("word", _FOREIGN_KEYS)
    def test_every_translation_leads_to_a_key_that_exists(self, word):
        assert plait_key(word) is not None
        names, _, _ = _FOREIGN_KEYS[word].partition(" (")
        for name in names.split(" and "):
            if name != "the section itself":
                section, _, key = name.rpartition(".")
                assert section in set(paths_with_key(key, RunConfig))


class TestTypes:
    @pytest.mark.parametrize(
        ("source", "path", "names", "remedy"),
        [
            ({"seed": "3"}, "seed", ["whole number", "'3'"], ["3"]),
            ({"seed": True}, "seed", ["whole number", "true"], []),
            ({"seed": 1.5}, "seed", ["whole number", "1.5"], []),
            ({"timeout_s": True}, "timeout_s", ["number", "true"], []),
            ({"timeout_s": None}, "timeout_s", ["number", "null"], ["default"]),
            ({"timeout_s": float("inf")}, "timeout_s", ["finite", "inf"], []),
            ({"deterministic": 1}, "deterministic", ["true", "false", "1"], []),
            ({"work_dir": 3}, "work_dir", ["text", "3"], ['"3"']),
            ({"batch": 32}, "batch", ["keys", "32"], ["total", "micro", "accumulation"]),
            ({"precision": 3}, "precision", ["keys", "3"], ["compute", "recipe", "word"]),
            ({"optim": "adamw"}, "optim", ["'adamw'"], ["AdamW"]),
            ({"optim": {"no_decay": "bias"}}, "optim.no_decay", ["list", "'bias'"], ["[bias]"]),
            ({"optim": {"betas": [0.9]}}, "optim.betas.1", ["1", "[0.9]"], []),
            ({"optim": {"betas": [0, 0, 0]}}, "optim.betas", ["2", "[0, 0, 0]"], []),
            (
                {"strategy": {"reshard_after_forward": "x"}},
                "strategy.reshard_after_forward",
                ["true", "false", "whole number", "'x'"],
                [],
            ),
        ],
    )
    def test_a_wrong_type_says_what_was_expected_and_found(self, source, path, names, remedy):
        found = problems(source)
        assert list(found) == [path]
        assert not missing(found[path].message, *names)
        assert not missing(found[path].remedy, *remedy)

    @pytest.mark.parametrize(
        ("source", "path", "bound"),
        [
            ({"seed": 10**20}, "seed", 2**63 - 1),
            ({"seed": 10**5000}, "seed", 2**63 - 1),
            ({"train": {"max_steps": 1e20}}, "train.max_steps", 2**63 - 1),
            ({"model": {"type": "llama", "dim": 10**15}}, "model.dim", 2**28),
            ({"model": {"type": "gpt", "layers": 10**18}}, "model.layers", 100_000),
            ({"batch": {"total": 10**18}}, "batch.total", 2**28),
            ({"data": {"type": "text", "path": "x", "workers": 10**6}}, "data.workers", 1024),
        ],
    )
    def test_a_number_that_no_run_could_count_with_is_refused(self, source, path, bound):
        assert str(bound) in problems(source)[path].message

    def test_a_whole_number_may_be_written_as_a_float(self):
        assert parse({"train": {"max_steps": 1e5}}).config.train.max_steps == 100_000

    def test_a_number_may_be_written_without_a_point(self):
        assert parse({"timeout_s": 3}).config.timeout_s == 3.0


class TestRanges:
    @pytest.mark.parametrize(
        ("override", "numbers"),
        [
            ("seed=-1", [0, -1]),
            ("strategy.zero=4", [3, 4]),
            ("optim.lr=0", [0, 0]),
            ("optim.betas=[1, 0]", [1, 1]),
            ("strategy.reshard_after_forward=-1", [0, -1]),
        ],
    )
    def test_the_bound_and_the_value_are_named(self, override, numbers):
        (problem,) = problems({}, [override]).values()
        assert sorted(map(int, re.findall(r"-?\d+", problem.message))) == sorted(numbers)


class TestChoices:
    @pytest.mark.parametrize(
        ("sections", "path"),
        [
            ({"model": {"type": "import", "target": "nets.large.Net"}}, "model.target"),
            ({"data": {"type": "import", "target": "nets.large.Net"}}, "data.target"),
            ({"hooks": [{"type": "import", "target": "nets.large.Net"}]}, "hooks.0.target"),
        ],
    )
    def test_what_is_imported_is_named_with_a_colon(self, sections, path):
        assert "nets.large:Net" in problems(sections)[path].remedy

    def test_a_wrong_word_gets_the_nearest_and_all_of_them(self):
        problem = problems({"device": "cudda"})["device"]
        assert "'cudda'" in problem.message
        assert "`cuda`" in problem.remedy
        assert not missing(problem.remedy, "auto", "cpu", "cuda", "xpu", "mps")

    def test_choices_that_are_numbers_are_listed(self):
        remedy = problems({"model": {"type": "resnet", "depth": 20}})["model.depth"].remedy
        assert not missing(remedy, 18, 34, 50, 101, 152)

    @pytest.mark.parametrize(
        ("section", "word", "meant"),
        [("optim", "adam_w", "AdamW"), ("schedule", "cosine", "CosineAnnealingLR"), ("model", "lama", "llama")],
    )
    def test_an_unknown_type_gets_the_nearest(self, section, word, meant):
        assert f"`{meant}`" in problems({section: {"type": word}})[f"{section}.type"].remedy

    def test_a_missing_type_gets_all_of_them(self):
        remedy = problems({"model": {"dim": 3}})["model.type"].remedy
        assert not missing(remedy, "gpt", "llama", "moe", "resnet", "hf", "import")

    def test_a_missing_key_says_who_needs_it(self):
        assert "text" in problems({"data": {"type": "text"}})["data.path"].remedy

    @pytest.mark.parametrize("keys", [{}, {"text_key": "t", "prompt_key": "p"}, {"prompt_key": "p"}])
    def test_jsonl_has_texts_or_prompts_with_completions(self, keys):
        problem = problems({"data": {"type": "jsonl", "path": "x", **keys}})["data"]
        assert not missing(problem.remedy, "text_key", "prompt_key", "completion_key")

    @pytest.mark.parametrize(
        ("section", "value"),
        [({"work_dir": ""}, "''"), ({"work_dir": " "}, "' '"), ({"checkpoint": {"resume": ""}}, "''")],
    )
    def test_empty_text_is_no_path(self, section, value):
        (problem,) = problems(section).values()
        assert value in problem.message

    @pytest.mark.parametrize(
        ("path", "said"), [("runs/" + "长" * 100, "300 bytes"), ("a" * 256 + "/b", "256 bytes"), ("a\0b", "null")]
    )
    def test_names_that_no_file_can_have_are_told_before_anybody_looks_for_them(self, path, said):
        assert said in problems({"work_dir": path})["work_dir"].message
        assert parse_sections(work_dir="/".join(["a" * 255] * 3)).config.work_dir

    def test_a_number_in_place_of_a_pair_is_told_of_both(self):
        assert "[0.9, …]" in problems({"optim": {"betas": 0.9}})["optim.betas"].remedy

    def test_a_list_with_too_few_entries_says_how_many_it_takes(self):
        problem = problems({"data": {"type": "mixture", "sources": []}})["data.sources"]
        assert not missing(problem.message, "2", "[]")

    def test_text_is_quoted_as_the_file_has_it(self):
        assert '"true"' in problems({"checkpoint": {"resume": True}})["checkpoint.resume"].remedy


class TestWords:
    def test_a_long_value_is_cut(self):
        assert len(show("x" * 1000)) == 60

    def test_one_is_not_many(self):
        assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
        assert counted(2, "process", "processes") == "2 processes"

    def test_one_word_is_no_list(self):
        assert listed(["a"]) == "a"
        assert listed("abc", "or") == "a, b or c"

    def test_nothing_is_near_to_nothing(self):
        assert nearest("", ["a"]) is None
        assert nearest("zzz", ["abc"]) is None

    def test_a_path_is_dotted(self):
        assert dotted(("hooks", 0, "decay")) == "hooks.0.decay"


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("strategy.graphs=maybe", ["auto", "true", "false"]),
        ("strategy.offload.ratio=much", ["auto", "number"]),
    ],
)
def test_what_takes_a_word_or_something_else_names_both(setting, names):
    (problem,) = problems({}, [setting]).values()
    assert not missing(problem.remedy, *names)
