"""Rollouts: generate answers to prompts, compute their rewards, log-probabilities and advantages."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plait.config import GrpoConfig, PpoConfig
from plait.data import SampleOrder
from plait.engine import NativeEngine
from plait.errors import GenerateError
from plait.generate import Completion, HybridEngine, Sampling, cut
from plait.posttrain.data.tasks import Check, Prompt
from plait.posttrain.rl.algorithms import AdaptiveKl, Advantages, FixedKl, divergence, of_grpo, of_ppo
from plait.posttrain.rl.experience import Experience
from plait.posttrain.rl.rewards import Answer, Scorer, ask
from plait.posttrain.rl.roles import ModelRoles
from plait.posttrain.rl.settings import Online

# The time of an online phase, by stage: `writing` (generating answers), `judging` (rewards), `asking` (forward passes
# of policy, reference and critic over the answers), `learning` (training steps).


STAGES = ("writing", "judging", "asking", "learning")


class RolloutTimes:
    """Seconds per stage, and the number of tokens of all answers, since the run began."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.tokens = 0

    @contextmanager
    def count(self, stage: str) -> Iterator[None]:
        """Add the time of this context to a stage."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - begun

    def __str__(self) -> str:
        whole = sum(self.seconds.values()) or 1.0
        shares = (f"{stage} {seconds:.1f} s ({seconds / whole:.0%})" for stage, seconds in self.seconds.items())
        rate = self.tokens / (self.seconds["writing"] or 1.0)
        return f"where the time went: {', '.join(shares)}; answers were written at {rate:,.0f} tokens/s"


# Generating answers with the current policy, and scoring them.


VERIFIED_ANSWERS = 32
"""The number of answers for which generation is verified against the policy's forward pass."""


class Stop(NamedTuple):
    """The tokens and texts that end an answer."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]


class RolloutBatch(NamedTuple):
    """Answers with their tokens and rewards."""

    answers: list[Answer]
    tokens: list[list[int]]
    rewards: Tensor
    """NaN for an answer without a reward."""


class RolloutSampler:
    """Generates answers with the current policy, and scores them."""

    def __init__(
        self, hybrid: HybridEngine, scorer: Scorer, correct: Check, decode: Callable[[Sequence[int]], str], stop: Stop
    ) -> None:
        self._hybrid, self._scorer, self._correct = hybrid, scorer, correct
        self._decode, self._stop = decode, stop
        self.clock = RolloutTimes()

    def write(
        self, prompts: Sequence[Prompt], sampling: Sampling, keys: Sequence[int], *, verify: bool = False
    ) -> RolloutBatch:
        """Return an answer to each prompt with its reward, on every rank.

        The seed and the answer's key determine its random numbers. `verify`: compare some answers with the policy's
        forward pass.
        """
        with self.clock.count("writing"):
            completions = self._generate([prompt.tokens for prompt in prompts], sampling, keys, verify=verify)
        self.clock.tokens += sum(len(completion.tokens) for completion in completions)
        with self.clock.count("judging"):
            answers = [
                self._answer(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
            ]
            rewards = torch.tensor(self._scorer.score(answers), dtype=torch.float32)
        return RolloutBatch(answers, [completion.tokens for completion in completions], rewards)

    def _generate(
        self, asked: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[int], *, verify: bool
    ) -> list[Completion]:
        try:
            completions = self._hybrid.generate(asked, sampling, keys=keys)
            if verify:
                mode = self._hybrid.mode
                self._hybrid.verify(asked[:VERIFIED_ANSWERS], completions[:VERIFIED_ANSWERS])
                if self._hybrid.mode != mode:  # verification failed and changed the mode: generate again
                    completions = self._hybrid.generate(asked, sampling, keys=keys)
        except torch.OutOfMemoryError as error:
            # Elsewhere a run without memory is started again with smaller micro-batches; that would not help here.
            raise GenerateError(
                f"memory was short while answers were written: {str(error).partition('.')[0]}; write a smaller "
                "`rollout.max_rows`, the answers that a rank writes at once, or a smaller `rollout.max_new_tokens`"
            ) from error
        return completions

    def _answer(self, prompt: Prompt, completion: Completion) -> Answer:
        tokens = completion.tokens[:-1] if completion.tokens[-1] in self._stop.tokens else completion.tokens
        text = cut(self._decode(tokens), self._stop.texts)
        return Answer(prompt, text, completion.finish_reason == "stop")

    def accuracy(self, answers: Sequence[Answer]) -> float | None:
        """Return the share of right answers among those that can be checked; None if none can."""
        judgements = [self._correct(answer.prompt.text, answer.text, answer.prompt.right) for answer in answers]
        known = [correct for correct in judgements if correct is not None]
        return sum(known) / len(known) if known else None


class RolloutWorker:
    """Generates each rollout, and stores it in the `Experience`, which is the same on every rank."""

    def __init__(
        self,
        online: Online,
        prompts: Sequence[Prompt],
        sampler: RolloutSampler,
        actor: NativeEngine,
        roles: ModelRoles,
        experience: Experience,
        *,
        sampling: Sampling,
        rows: int,
        folder: Path | None,
        log: Callable[[str], None] = print,
    ) -> None:
        """`rows`: answers per forward pass; `folder`: where this rank writes sample answers, None if it does not."""
        self.experience = experience
        self.figures: dict[str, float] = {}
        """Metrics of the latest rollout."""
        self.controller = make_controller(online)
        self._online, self._prompts, self._sampler = online, prompts, sampler
        self._actor, self._roles, self._sampling, self._rows = actor, roles, sampling, rows
        self._order = SampleOrder(len(prompts), sampling.seed)
        self._verified: int | None = None
        self._idle: str | None = None
        """Why all advantages of the latest rollout are zero; None if they are not."""
        self.clock = sampler.clock
        self._folder, self._log = folder, log

    def asked(self, number: int) -> list[Prompt]:
        """Return the prompts of a rollout, which depend on the seed and its number only."""
        count, length = self._online.rollout.prompts, len(self._prompts)
        positions = [divmod(position, length) for position in range(number * count, (number + 1) * count)]
        return [self._prompts[self._order.index(epoch, index)] for epoch, index in positions]

    def roll(self, number: int, step: int) -> None:
        """Generate rollout `number` with the current policy, and store it. A collective."""
        online, experience = self._online, self.experience
        with self.clock.count("learning"):
            self._actor.settle()  # so that the last step's work on the device counts as learning
        asked = [prompt for prompt in self.asked(number) for _ in range(online.group)]
        keys = range(number * online.answers, (number + 1) * online.answers)
        due = self._verified is None or number - self._verified >= online.rollout.verify_every
        written = self._sampler.write(asked, self._sampling, keys, verify=due)
        if due:
            self._verified = number
        experience.put([prompt.tokens for prompt in asked], written.tokens)
        experience.number = number
        with self.clock.count("asking"):
            entropies = self._forward_models()
        answered = experience.mask
        idle = self._estimate_advantages(written.rewards).zero_std_groups
        self.figures = self._measure(written, answered, entropies)
        if isinstance(online.method, GrpoConfig):
            self.figures["zero_std_groups"] = idle
        self._warn_if_idle(number, written.rewards, idle)
        self._keep(written, step)

    def _forward_models(self) -> Tensor:
        """Compute and store log-probabilities (policy, reference) and values (critic); return the entropies."""
        experience, roles = self.experience, self._roles
        shape = (experience.width,)
        wanted = {"logprobs": shape, "entropy": shape}
        if self._online.reference == "base":
            wanted["reference"] = shape
        completion = ask(self._actor, experience.lengths, experience.inputs, wanted, rows=self._rows)
        experience.old.copy_(completion["logprobs"])
        held = completion.get("reference")
        if roles.reference is not None:
            only = {"logprobs": shape}
            held = ask(roles.reference, experience.lengths, experience.inputs, only, rows=self._rows)["logprobs"]
        experience.reference.copy_(completion["logprobs"] if held is None else held)
        if roles.critic is not None:
            values = ask(roles.critic, experience.lengths, experience.inputs, {"values": shape}, rows=self._rows)
            experience.values.copy_(values["values"])
        return completion["entropy"]

    def _warn_if_idle(self, number: int, rewards: Tensor, groups: float) -> None:
        """Log a warning if all advantages of a rollout are zero; once for several such rollouts in a row."""
        idle = None
        if not bool(rewards.isfinite().any()):
            idle = "none of its answers has a reward"
        elif groups == 1.0:
            idle = "all answers to the same prompt have the same reward, so that no answer is better than another"
        if idle is not None and self._idle is None:
            self._log(f"rollout {number} teaches nothing: {idle}. Look at the reward, the prompts and the temperature")
        self._idle = idle

    def _estimate_advantages(self, rewards: Tensor) -> Advantages:
        """Compute, store and return the advantages. Answers without a reward are not trained on."""
        experience, method, controller = self.experience, self._online.method, self.controller
        experience.forget(~rewards.isfinite())
        mask = experience.mask
        if isinstance(method, GrpoConfig):
            estimate = of_grpo(method, rewards, mask)
        else:
            held = (experience.old, experience.reference, experience.values)
            estimate = of_ppo(method, rewards.nan_to_num(0.0), *held, mask, controller.beta)
        experience.advantages.copy_(estimate.advantages)
        experience.returns.copy_(estimate.returns)
        return estimate

    def _measure(self, written: RolloutBatch, answered: Tensor, entropies: Tensor) -> dict[str, float]:
        experience, rewards = self.experience, written.rewards
        known = rewards[rewards.isfinite()].double()
        figures = {
            "reward": float(known.mean()) if len(known) else math.nan,
            "reward_std": float(known.std()) if len(known) > 1 else 0.0,
            "length": float(answered.sum(1).double().mean()),
            "entropy": float(entropies[answered].double().mean()),
            "skipped_answers": float(len(rewards) - len(known)),
        }
        if (accuracy := self._sampler.accuracy(written.answers)) is not None:
            figures["accuracy"] = accuracy
        if self._online.reference != "none":
            figures["kl"] = divergence(experience.old, experience.reference, answered)
            figures["beta"] = self.controller.beta
            self.controller = self.controller.after(figures["kl"], len(rewards))
        return figures

    def _keep(self, written: RolloutBatch, step: int) -> None:
        if self._folder is None:
            return
        every = max(len(written.answers) // max(self._online.rollout.samples, 1), 1)
        chosen = range(0, len(written.answers), every)[: self._online.rollout.samples]
        lines = []
        for index in chosen:
            answer, reward = written.answers[index], float(written.rewards[index])
            known = reward if math.isfinite(reward) else None
            kept = {"step": step, "prompt": answer.prompt.text, "answer": answer.text, "reward": known}
            lines.append(json.dumps(kept, ensure_ascii=False) + "\n")
        try:
            with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:  # an error on this rank alone would leave the others waiting
            self._log(f"{self._folder / 'samples.jsonl'} cannot be written to: {error.strerror}; no more are kept")
            self._folder = None


def make_controller(online: Online) -> FixedKl | AdaptiveKl:
    """Return the controller of the KL weight."""
    method = online.method
    if isinstance(method, PpoConfig) and method.kl == "adaptive":
        return AdaptiveKl(method.beta, method.kl_target, method.kl_horizon)
    return FixedKl(method.beta)


# Validation: prompts of the validation data, answered by greedy decoding.


def measure(sampler: RolloutSampler, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, float]:
    """Return the mean reward and length, and the accuracy if answers can be checked. The same on every rank."""
    greedy = replace(sampling, temperature=0.0, top_k=None, top_p=None)
    written = sampler.write(prompts, greedy, range(len(prompts)))
    known = written.rewards[written.rewards.isfinite()].double()
    completion = {
        "reward": float(known.mean()) if len(known) else float("nan"),
        "length": sum(len(tokens) for tokens in written.tokens) / len(prompts),
        "skipped_answers": float(len(prompts) - len(known)),
    }
    accuracy = sampler.accuracy(written.answers)
    return completion if accuracy is None else {**completion, "accuracy": accuracy}
