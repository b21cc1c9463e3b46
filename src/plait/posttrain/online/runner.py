"""PPO and GRPO as runs. The Runner has time, log, checkpoints and resuming; here answers are made and fed to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plait.config import Parsed, PosttrainConfig, PpoConfig, RunConfig
from plait.errors import DataError
from plait.generate import HybridEngine, Sampling
from plait.posttrain.build import make_writer
from plait.posttrain.data.prepare import longest, prepare_rows
from plait.posttrain.data.prompts import Prompt, correctness
from plait.posttrain.online.cast import Cast, make_cast
from plait.posttrain.online.evaluate import measure as measure_answers
from plait.posttrain.online.experience import Experience
from plait.posttrain.online.foresight import OnlineForesight
from plait.posttrain.online.hooks import Critic, Rollouts
from plait.posttrain.online.loader import ExperienceLoader, Mixture
from plait.posttrain.online.merging import merged_weights
from plait.posttrain.online.rollout import Roller
from plait.posttrain.online.scoring import FunctionScorer, ModelScorer, Rules, Scorer, find_function
from plait.posttrain.online.settings import Online
from plait.posttrain.online.writing import Stop, Writer
from plait.posttrain.run import PhaseRunner
from plait.runner import Hook
from plait.spec import Phase
from plait.strategy import Engine, ManualEngine, prepare_manual


class OnlineRunner(PhaseRunner):
    """Trains on answers that the model itself gives. Everything else is as in any run."""

    cast: Cast
    """The models beside the policy."""
    roller: Roller
    """What makes answers, and holds those in use."""

    def __init__(self, parsed: Parsed, *, hooks: Sequence[Hook] = ()) -> None:
        online = Online.of(parsed.config)
        own: list[Hook] = [Rollouts(self)]
        if isinstance(online.method, PpoConfig):
            own.append(Critic(self))
        if not isinstance(online.method, PpoConfig) or online.method.reward_model is None:
            find_function(parsed.config)  # a name that leads nowhere shows before anything is built
        super().__init__(parsed, hooks=[*own, *hooks])
        self.online = online
        self.foresight = OnlineForesight(self)

    def prepare(self) -> Engine:
        """Build the policy, the models beside it, and what makes answers."""
        given = self.preparation()
        engine = prepare_manual(given)
        self.cast = make_cast(given, self.phase_data)
        self._assemble(engine)
        return engine

    def setup(self) -> None:
        """As of any run; the critic reports its phases too."""
        super().setup()
        if self.cast.critic is not None:  # it learns in steps of its own, and memory may be short in those
            self.cast.critic.on_phase = self.engine.on_phase

    def _assemble(self, engine: ManualEngine) -> None:
        config, online, data = self.config, self.online, self.phase_data
        rollout, context, stop = online.rollout, longest(config), self._stop_of()
        hybrid = HybridEngine(
            engine,
            config,
            build=partial(make_writer, config),
            mode=rollout.mode,
            on_mismatch=rollout.on_mismatch,
            tolerance=rollout.tolerance,
            max_rows=rollout.max_rows,
            decode=data.tokenizer.decode,
            context=context,
            vllm=rollout.vllm,
            merge=None if config.lora is None else merged_weights,
            say=self.warn,
        )
        section = config.posttrain or PosttrainConfig()
        correct = correctness((*section.data, *section.val_data))
        self._writer = Writer(hybrid, self._scorer(), correct, data.tokenizer.decode, stop)
        ends: tuple[int | str, ...] = (*stop.tokens, *stop.texts)
        self._sampling = Sampling(
            rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, stop=ends, seed=config.seed
        )
        self.roller = Roller(
            online,
            data.train,
            self._writer,
            engine,
            self.cast,
            self._experience,
            sampling=self._sampling,
            rows=self.batch.micro,
            folder=Path(config.work_dir) if self.world.is_main else None,
            say=self.warn,
        )

    def _scorer(self) -> Scorer:
        rollout, judge = self.online.rollout, self.cast.judge
        if judge is None:
            name, function = find_function(self.config)
            return Rules(FunctionScorer(name, function, self.world, bad=rollout.bad_reward, say=self.warn), rollout)
        data = self.phase_data
        rows = {"rows": self.batch.micro, "longest": longest(self.config)}
        return Rules(ModelScorer(judge, data.template, data.tokenizer.end, **rows), rollout)

    def _stop_of(self) -> Stop:
        """What ends an answer: what the template ends it with, and texts of the run description."""
        ends = (*self.phase_data.template.ends, *self.online.rollout.stop)
        tokens, texts = (tuple(end for end in ends if isinstance(end, kind)) for kind in (int, str))
        return Stop(tokens, texts)  # type: ignore[arg-type]

    def make_loader(self, role: str) -> Any:
        """What makes answers where the old ones are used up."""
        if role != "data":
            return _Nothing()
        config, data, online = self.config, self.phase_data, self.online
        pad = data.tokenizer.end
        self._experience = Experience(online.answers, longest(config), pad)
        return ExperienceLoader(
            online,
            self._experience,
            self._roll,
            prompts=len(data.train),
            batch=self.batch,
            world=self.world,
            seed=config.seed,
            ptx=_mixture(config, online, pad, self),
        )

    def _roll(self, number: int) -> None:
        self.enter(Phase.EVALUATE)
        self.roller.roll(number, self.step)
        self.enter(Phase.IDLE)

    def measure(self, role: str, limit: int | None) -> tuple[dict[str, float], int]:
        """Answer the prompts, and score the answers."""
        prompts: Sequence[Prompt] = getattr(self.given, role)
        if limit is not None:
            prompts = prompts[: limit * self.batch.total]
        found = measure_answers(self._writer, prompts, self._sampling)
        return found, -(-len(prompts) // self.batch.total)


def _mixture(config: RunConfig, online: Online, pad: int, runner: OnlineRunner) -> Mixture | None:
    method = online.method
    if not isinstance(method, PpoConfig) or not method.ptx_data:
        return None
    rows = prepare_rows(method.ptx_data, config, runner.phase_data)
    if not rows:
        raise DataError(f"no example is left of ppo.ptx_data: {runner.phase_data.account}")
    return Mixture(rows, weight=method.ptx_weight, seed=config.seed, pad=pad, answers=online.answers)


class _Nothing:
    """Prompts to validate on are asked all at once, and need no loader."""

    def close(self) -> None:
        """Nothing is held."""
