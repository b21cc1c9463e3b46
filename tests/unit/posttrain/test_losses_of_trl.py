"""The same numbers as TRL's trainers compute, where TRL is installed."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.config.posttrain import DpoConfig
from plait.posttrain.losses import preferring, reward_loss, token_logprobs
from plait.posttrain.rl.algorithms import grpo_loss
from plait.posttrain.start import extend

trl = pytest.importorskip("trl")
accelerate = pytest.importorskip("accelerate")


def trainer(kind: Any, **attributes: Any) -> Any:
    """One of their trainers with only what its loss looks at, and what it writes down beside it."""

    class Bare(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            self.accelerator = accelerate.Accelerator(cpu=True)
            self.model = nn.Linear(1, 1)
            self._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
            self._total_train_tokens, self._tp_size, self.aux_loss_enabled = 0, 1, False
            vars(self).update(attributes)

    return Bare()


def theirs(compute: Any, *args: Any) -> float:
    """What they compute; a version that looks at more than it did is no failure of ours."""
    try:
        return float(compute(*args))
    except AttributeError as error:
        pytest.skip(f"this version of TRL looks at more than its loss: {error}")


class Words(nn.Module):
    """A language model that does not look at what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ours", "word"), [("dpo", "sigmoid"), ("ipo", "ipo"), ("hinge", "hinge"), ("apo_zero", "apo_zero")]
)
def test_preferences(ours: Any, word: str) -> None:
    ids, labels = torch.randint(0, 7, (4, 6)), torch.randint(0, 7, (4, 6))
    labels[:, :2] = -100
    labels[1, 4:] = -100
    reference, lengths, model = torch.randn(4) - 8, (labels >= 0).sum(-1), Words()
    logprobs = token_logprobs(model(ids), labels).detach()
    extend(model, mixins=(preferring(model, DpoConfig(loss=ours, beta=0.2)),))
    given = reference / lengths if ours == "ipo" else reference
    found = model(ids, labels=labels, reference=given)["loss"].mean().detach()

    # Theirs has the token itself where ours has the one before it.
    mask = F.pad((labels >= 0).long(), (1, 0))
    batch = {
        "input_ids": F.pad(ids, (1, 0)),
        "completion_mask": mask,
        "attention_mask": torch.ones_like(mask),
        "ref_chosen_logps": reference[:2],
        "ref_rejected_logps": reference[2:],
    }
    shown = dict.fromkeys(("entropy", "mean_logits"), torch.zeros_like(logprobs))  # for their log alone
    answer = SimpleNamespace(log_probs=logprobs, is_top1=logprobs > 0, **shown)
    peer = trainer(
        trl.DPOTrainer,
        beta=0.2,
        label_smoothing=0.0,
        ld_alpha=None,
        loss_types=[word],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        use_weighting=False,
    )
    assert float(found) == pytest.approx(theirs(peer._compute_loss, lambda **_: answer, batch, False), rel=1e-5)


def test_rewards() -> None:
    rewards = torch.randn(6)
    peer = trainer(trl.RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=0.1))
    batch = {"attention_mask": torch.ones(6, 3), "margin": 0.5}
    expected = theirs(peer.compute_loss, lambda **_: SimpleNamespace(logits=rewards[:, None]), batch)
    found = reward_loss(rewards[:3], rewards[3:], margin=0.5, center=0.1).mean()
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("weighting", "word"), [("answer", "grpo"), ("token", "bnpo"), ("length", "dr_grpo")])
def test_groups(weighting: Any, word: str) -> None:
    now, old, reference = (torch.randn(4, 6) * 0.3 - 1 for _ in range(3))
    lengths = torch.randint(1, 7, (4, 1))
    mask, advantages = (torch.arange(6) < lengths).long(), torch.randn(4)
    options = {"clip": 0.2, "clip_high": 0.28, "reference": reference, "beta": 0.05, "longest": 9}
    found = grpo_loss(now, old, advantages, mask, weighting=weighting, **options).loss.mean()
    peer = trainer(
        trl.GRPOTrainer,
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        loss_type=word,
        beta=0.05,
        epsilon_low=0.2,
        epsilon_high=0.28,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        max_completion_length=9,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
    )
    batch = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.zeros(4, 6, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }
    assert float(found) == pytest.approx(theirs(peer._compute_loss, peer.model, batch), rel=1e-5)
