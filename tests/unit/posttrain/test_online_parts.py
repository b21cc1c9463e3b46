"""What experience is made of, part by part, against small cases that can be worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused

from plait.config import check, parse
from plait.config.posttrain import GrpoConfig, PpoConfig
from plait.config.train import ResolvedBatch
from plait.config.trust import entry_points_of
from plait.distributed import open_world
from plait.errors import ConfigError, TrainingError
from plait.posttrain.data.datasets import ExampleRow
from plait.posttrain.data.records import ChatMessage
from plait.posttrain.data.tasks import Prompt, correctness, final_number, gsm8k_reward, task_reward
from plait.posttrain.data.template import ChatTokens
from plait.posttrain.losses import from_bits
from plait.posttrain.rl.algorithms import divergence, of_grpo, of_ppo
from plait.posttrain.rl.experience import ExampleMixture, Experience, ExperienceLoader
from plait.posttrain.rl.rewards import Answer, FunctionScorer, Rules, find_function
from plait.posttrain.rl.settings import Online

TASK = {"type": "task", "name": "sorting", "samples": 50, "size": 1}
MODEL = {"type": "gpt", "vocab_size": 12, "dim": 16, "layers": 1, "heads": 2, "seq_len": 16}


def settings(phase: str = "grpo", **changes: Any) -> Any:
    return parse({"phase": phase, "model": MODEL, "posttrain": {"data": [TASK]}, **changes}).config


def test_tokens_earn_their_divergence_and_the_last_one_the_reward() -> None:
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    logprobs, reference = -torch.rand(2, 4), -torch.rand(2, 4)
    values, rewards = torch.randn(2, 4), torch.tensor([2.0, -1.0])
    ppo = PpoConfig(gamma=1.0, lam=1.0, whiten=False)
    found = of_ppo(ppo, rewards, logprobs, reference, values, mask, 0.5)
    paid = -0.5 * (logprobs - reference)
    for row, (first, end) in enumerate([(1, 4), (1, 2)]):
        for place in range(first, end):  # with nothing discounted, a return is what is still to come
            rest = float(paid[row, place:end].sum() + rewards[row])
            assert float(found.returns[row, place]) == pytest.approx(rest, rel=1e-5)
            assert float(found.advantages[row, place]) == pytest.approx(rest - float(values[row, place]), rel=1e-4)
    assert not found.advantages[~mask].any()
    white = of_ppo(PpoConfig(), rewards, logprobs, reference, values, mask, 0.5).advantages[mask]
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(white.std()) == pytest.approx(1.0, abs=1e-3)


def test_answers_of_a_group_are_compared_and_unknown_ones_left_out() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, math.nan, 3.0, 1.0, 2.0])
    mask = torch.ones(8, 3, dtype=torch.bool)
    found = of_grpo(GrpoConfig(group=4, spread="none"), rewards, mask).advantages
    assert found[:, 0].tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.0, 1.0, -1.0, 0.0])
    assert torch.equal(found[:, 0], found[:, 2])


def test_divergence_is_summed_over_an_answer_and_averaged_over_answers() -> None:
    logprobs, reference = torch.zeros(3, 2), torch.tensor([[-1.0, -2.0], [-3.0, 9.0], [9.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert divergence(logprobs, reference, mask) == pytest.approx(3.0)


def test_experience_labels_answers_only_and_gives_numbers_as_they_are() -> None:
    experience = Experience(2, 10, pad=0)
    experience.put([[5, 6, 7], [5]], [[8, 9], [4, 3, 2]])
    assert experience.ids[0, :5].tolist() == [5, 6, 7, 8, 0]
    assert experience.labels[0, :5].tolist() == [-100, -100, 8, 9, -100]
    assert experience.labels[1, :4].tolist() == [4, 3, 2, -100]
    experience.old.copy_(torch.randn_like(experience.old))
    inputs = experience.inputs([1, 0], "old")
    assert inputs["input_ids"].shape == (2, 8)  # cut to the longest, in steps of eight
    assert torch.equal(from_bits(inputs["old"]), experience.old[[1, 0], :8])
    experience.forget(torch.tensor([True, False]))
    assert not experience.mask[0].any()
    assert experience.mask[1].any()


def loader_of(epochs: int, rank: int = 0, ranks: int = 1, total: int = 4) -> tuple[ExperienceLoader, list[int]]:
    class Place:
        data_rank = rank

        class layout:  # noqa: N801
            data_parallel = ranks

    rolled: list[int] = []
    config = settings(rollout={"prompts": 4}, grpo={"group": 2, "epochs": epochs})
    online, experience = Online.of(config), Experience(8, 8, pad=0)
    experience.put([[1]] * 8, [[2, 3]] * 8)

    def roll(number: int) -> None:
        rolled.append(number)
        experience.number = number

    batch = ResolvedBatch(total, total // ranks, 1)
    place: Any = Place()
    return ExperienceLoader(online, experience, roll, prompts=10, batch=batch, world=place, seed=3), rolled


def test_a_rollout_is_a_fixed_number_of_steps_and_every_answer_comes_once_a_pass() -> None:
    loader, rolled = loader_of(epochs=3)
    assert (loader.steps_per_rollout, loader.steps_per_epoch, loader.samples_per_epoch) == (6, 18, 72)
    seen: list[list[int]] = []
    for _ in loader.epoch(1):
        seen.append([row for part in loader.current for row in part])
    assert rolled == [3, 4, 5]
    assert len(seen) == 18
    for first in range(0, 18, 2):
        assert sorted(seen[first] + seen[first + 1]) == list(range(8))
    halves = [loader_of(epochs=3, rank=rank, ranks=2)[0] for rank in (0, 1)]
    for step, _ in enumerate(zip(*(half.epoch(1) for half in halves), strict=True)):
        assert sorted(row for half in halves for part in half.current for row in part) == sorted(seen[step])


def test_going_on_within_a_rollout_needs_its_answers() -> None:
    loader, rolled = loader_of(epochs=1)
    loader.dataset.number = 1
    assert sum(1 for _ in loader.epoch(0, 3)) == 3
    assert rolled == [2]
    with refused(TrainingError, "rollout 0", f"rollout {loader.dataset.number}"):
        next(iter(loader.epoch(0, 1)))
    with refused(ConfigError, "4 × 2", key="rollout.prompts"):
        loader_of(epochs=1, total=3)


def test_what_is_mixed_in_is_a_weighted_mean_however_a_step_is_cut() -> None:
    rows = [ExampleRow(ChatTokens([1, *range(2, 3 + size)], [False] + [True] * (1 + size))) for size in range(3)]
    mixture = ExampleMixture(rows, weight=0.5, seed=1, pad=0, answers=4)
    inputs = {"input_ids": torch.ones(2, 8).long(), "labels": torch.full((2, 8), 7), "old": torch.zeros(2, 8).int()}
    scale = mixture.scale(3, range(4), targets=32)
    parts = [mixture.append_to(dict(inputs), 3, chosen, scale) for chosen in ([0, 1], [2, 3])]
    learned = sum(int((part["labels"][2:] != -100).sum()) for part in parts)
    assert scale == pytest.approx(0.5 * 32 / learned)
    assert all(part["input_ids"].shape == (4, 8) and len(part["old"]) == 2 for part in parts)


def answer(text: str, prompt: str = "ba=", *, finished: bool = True) -> Answer:
    return Answer(Prompt((1,), (ChatMessage("user", prompt),), "ab"), text, finished)


def fragile(prompt: str, text: str, right: str) -> Any:
    """A reward function with every fault that one can have."""
    if text == "raise":
        raise ValueError("cannot judge this")
    return {"nan": math.nan, "none": None, "text": "1.5", "true": True}.get(text, 1.0)


def test_rewards_that_are_no_numbers_are_counted_out_or_stop_the_run() -> None:
    world = open_world(parse({"device": "cpu"}).config)
    answers = [answer(text) for text in ("raise", "nan", "none", "text", "fine", "true")]
    said: list[str] = []
    kind = FunctionScorer("fragile", fragile, world, bad="skip", log=said.append)
    for _ in range(2):
        assert kind.score(answers) == pytest.approx([*[math.nan] * 4, 1.0, 1.0], nan_ok=True)
    assert len(said) == 1  # the first time
    assert not missing(said[0], "fragile", "ValueError: cannot judge this", "6", "3")
    strict = FunctionScorer("fragile", fragile, world, bad="error")
    with refused(
        TrainingError, "fragile", "ValueError: cannot judge this", "'ba='", "6", "3", "rollout.bad_reward: skip"
    ):
        strict.score(answers)
    with refused(TrainingError, "'1.5'", "str", "rollout.bad_reward: skip"):
        strict.score(answers[3:])
    assert strict.score([answers[2], answers[4]]) == pytest.approx([math.nan, 1.0], nan_ok=True)  # None says: unknown


def test_empty_and_unfinished_answers_may_have_a_set_reward() -> None:
    world = open_world(parse({"device": "cpu"}).config)
    rollout = settings(rollout={"empty_reward": -1.0, "unfinished_reward": -2.0}).rollout
    scorer = Rules(FunctionScorer("fragile", fragile, world, bad="error"), rollout)
    found = scorer.score([answer(" "), answer("x", finished=False), answer("x")])
    assert found == [-1.0, -2.0, 1.0]


def test_answers_are_checked_by_the_data_they_belong_to() -> None:
    sources = settings().posttrain.data
    assert [correctness(sources)("ba=", text, "") for text in ("ab", "ba", "a")] == [1.0, 0.0, 0.0]
    assert correctness(sources)("what?", "ab", "") is None
    partly = [task_reward(sources)("ba=", text, "") for text in ("ab", "aa", "ba", "abb")]
    assert partly == pytest.approx([1.0, 0.25, 0.0, 0.5 * 2 / 3])
    assert final_number("so 3 + 4 = 7\n#### 1,234") == "1234"
    written = ("72.50", "72.5", "72.00", "100", "0.0")
    assert [final_number(text) for text in written] == ["72.5", "72.5", "72", "100", "0"]
    assert gsm8k_reward("", "It is 72.", "… #### 72") == 1.0
    assert gsm8k_reward("", "no idea", "… #### 72") == 0.0
    assert gsm8k_reward("", "It is 72.", "unknown") is None


@pytest.mark.parametrize(
    ("phase", "changes", "key", "names"),
    [
        ("ppo", {}, "ppo.reward_model", ["`ppo.reward`"]),
        ("ppo", {"ppo": {"reward_model": "x", "reward": "task"}}, "ppo.reward", ["task", "`ppo.reward_model`"]),
        ("ppo", {"ppo": {"reward": "task", "kl_target": 3.0}}, "ppo.kl_target", ["3.0", "`ppo.kl`", "adaptive"]),
        ("grpo", {"grpo": {"reference": "base"}}, "grpo.reference", ["`base`", "`lora`"]),
        ("grpo", {"grpo": {"reference": "none", "beta": 0.1}}, "grpo.beta", ["0.1", "`reference`", "none"]),
        ("grpo", {"strategy": {"layout": {"cp": 2}}}, "strategy.layout.cp", ["2", "`strategy.layout.cp: 1`"]),
        ("grpo", {"strategy": {"recompute": "auto"}}, "strategy.recompute", ["auto", "full"]),
        ("grpo", {"checkpoint": {"best": {}}}, "checkpoint.best.metric", ["'loss'", "reward"]),
        (None, {"rollout": {}}, "rollout", ["`plait ppo`", "`plait grpo`"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(phase: Any, changes: Any, key: str, names: Any) -> None:
    with refused(ConfigError, *names, key=key):
        check(settings(phase, **changes), has_val=True, require_length=False)


def test_reward_functions_are_found_by_name_or_by_the_data() -> None:
    assert find_function(settings())[0] == "task"
    assert find_function(settings(grpo={"reward": "operator:setitem"}))[0] == "operator:setitem"
    with refused(ConfigError, "'nowhere:f'", key="grpo.reward.type"):
        find_function(settings(grpo={"reward": "nowhere:f"}))
    with refused(ConfigError, "'math:pi'", "float", key="grpo.reward.type"):
        find_function(settings(grpo={"reward": "math:pi"}))
    unknown = settings(posttrain={"data": [{"type": "file", "path": "x.jsonl"}]})
    with refused(ConfigError, "package.module:function", key="grpo.reward"):
        find_function(unknown)


def near(prompt: str, answer: str, right: str | None, bonus: float = 0.0) -> float:
    return float(answer == right) + bonus


class Near:
    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def __call__(self, prompt: str, answer: str, right: str | None) -> float:
        return near(prompt, answer, right, self.bonus)


@pytest.mark.parametrize(
    "reward",
    [
        {"type": f"{__name__}:near", "bonus": 0.5},
        {"type": near, "bonus": 0.5},
        {"type": f"{__name__}:Near", "bonus": 0.5},
        Near(0.5),
        "near_enough",
    ],
    ids=["name", "function", "class", "object", "plug-in"],
)
def test_a_reward_of_ones_own_has_arguments(reward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "judges-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: judges\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[plait.reward]\nnear_enough = judges:near\n")
    (tmp_path / "judges.py").write_text(f"from {__name__} import Near\nnear = Near(0.5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points_of.cache_clear()
    for config in (settings(grpo={"reward": reward}), settings("ppo", ppo={"reward": reward})):
        _, function = find_function(config)
        assert (function("1+1=", "2", "2"), function("1+1=", "3", "2")) == (1.5, 0.5)
    entry_points_of.cache_clear()


def test_a_reward_that_cannot_be_called_so_is_refused_at_its_key() -> None:
    for reward, key in (
        ({"type": near, "bonsu": 1.0}, "grpo.reward.bonsu"),
        ("operator:eq", "grpo.reward"),
        (Near, "grpo.reward"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_function(settings(grpo={"reward": reward}))
        assert caught.value.problems[0].path == key
    with pytest.raises(ConfigError) as caught:
        settings(grpo={"reward": "tsak"})
    assert caught.value.problems[0].path == "grpo.reward"


def test_equal_rewards_of_a_group_teach_nothing_and_are_counted() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.3, 0.1, math.nan, math.nan, math.nan, 0.7, math.nan, math.nan])
    mask = torch.ones(12, 2, dtype=torch.bool)
    for baseline in ("mean", "others"):
        found = of_grpo(GrpoConfig(group=3, baseline=baseline), rewards, mask)
        assert found.zero_std_groups == 0.75
        assert found.advantages[:, 0].nonzero().flatten().tolist() == [3, 4, 5]
