"""PPO and GRPO as runs. The Runner has time, log, checkpoints and resuming; here answers are made and fed to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.config import Parsed, PosttrainConfig, PpoConfig, RunConfig
from plait.data import MicroBatch
from plait.engine import Engine, ManualEngine, NativeEngine, StepResult, prepare_manual
from plait.errors import DataError
from plait.generate import HybridEngine, Sampling, Weights
from plait.launch import Phase
from plait.monitor import EventKind
from plait.posttrain.data.prepare import longest, prepare_rows
from plait.posttrain.data.tasks import Prompt, correctness
from plait.posttrain.lora import difference, has_adapter, is_transposed
from plait.posttrain.models import make_writer
from plait.posttrain.rl.actor import Tally, Told
from plait.posttrain.rl.experience import ExampleMixture, Experience, ExperienceLoader
from plait.posttrain.rl.memory_plan import OnlineMemoryPlan
from plait.posttrain.rl.rewards import FunctionScorer, ModelScorer, Rules, Scorer, find_function
from plait.posttrain.rl.roles import ModelRoles, make_model_roles
from plait.posttrain.rl.rollout import RolloutWorker, RolloutWriter, Stop
from plait.posttrain.rl.rollout import measure as measure_answers
from plait.posttrain.rl.settings import Online
from plait.posttrain.run import PhaseRunner
from plait.trainer import Hook

if TYPE_CHECKING:
    from plait.trainer import Runner

# What an online phase does around each step: the critic learns too, figures are told, all of it is kept.


class Rollouts(Hook):
    """Tells what rollouts and steps were like, and keeps the answers in use and the controller in checkpoints."""

    name = "rollout"
    priority = 30

    def __init__(self, run: OnlineRunner) -> None:
        self._run = run
        self._begun = 0.0

    def before_run(self, runner: Runner) -> None:
        """Measure the model as it begins, so that there is something to compare with."""
        if runner.step == 0 and runner.has("val_data"):
            runner.validate()

    def before_step(self, runner: Runner) -> None:
        """From here on it learns; the critic does so in its own hook, which comes later."""
        self._begun = time.perf_counter()

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Add what this step did to what is known of the rollout."""
        self._run.roller.clock.seconds["learning"] += time.perf_counter() - self._begun
        runner.figures.update(self._run.roller.figures)
        if runner.step % runner.config.log.every and runner.step != runner.total_steps:
            return  # nobody will see it, and looking waits for the device
        if (told := _told(runner.engine.model)) is not None:
            runner.figures.update(policy_loss=told.loss, clip_fraction=told.clipped)
        critic = self._run.cast.critic
        if critic is not None and (told := _told(critic.model)) is not None:
            runner.figures["value_loss"] = told.loss

    def after_run(self, runner: Runner) -> None:
        """Tell where the time went."""
        runner.emit(EventKind.MESSAGE, level="info", text=str(self._run.roller.clock))

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """The answers in use."""
        return self._run.roller.experience.tensors()

    def state(self) -> dict[str, Any]:
        """Which rollout it is, and what was found out in it."""
        roller = self._run.roller
        return {"number": roller.experience.number, "beta": roller.controller.beta, "figures": roller.figures}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on within the rollout."""
        roller = self._run.roller
        roller.experience.number = int(state["number"])
        roller.controller = replace(roller.controller, beta=float(state["beta"]))
        roller.figures = dict(state["figures"])


class Critic(Hook):
    """Trains the critic on the answers of each step, and keeps it in the run's checkpoints."""

    name = "critic"
    priority = 40

    def __init__(self, run: OnlineRunner) -> None:
        self._run = run
        self._restored = False

    @property
    def _engine(self) -> NativeEngine:
        critic = self._run.cast.critic
        assert critic is not None, "the hook is there only with a critic"
        return critic

    def before_run(self, runner: Runner) -> None:
        """Bring it up to date with what a checkpoint brought."""
        if self._restored:
            self._engine.state_loaded()
            self._restored = False

    def before_step(self, runner: Runner) -> None:
        """One step over the same answers as the policy's."""
        experience, parts = self._run.roller.experience, []
        for rows in runner.loader.current:
            inputs = experience.inputs(rows, "values", "returns")
            old = inputs.pop("values")
            parts.append(MicroBatch({**inputs, "old": old}, len(rows)))
        self._engine.train_step(parts)

    def after_run(self, runner: Runner) -> None:
        """Wait for its last step, and hear what there is to report of it."""
        self._engine.settle()

    def allocate(self, runner: Runner, entries: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """For the optimizer's state."""
        found = {name.removeprefix("optim."): entry for name, entry in entries.items() if name.startswith("optim.")}
        self._engine.allocate_optimizer_state(found)

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Weights and optimizer state."""
        return self._engine.state_tensors()

    def state(self) -> dict[str, Any]:
        """Its steps."""
        return self._engine.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._engine.restore(state)
        self._restored = True


def _told(model: Any) -> Told | None:
    tally = model.tally
    assert isinstance(tally, Tally)
    return tally.latest


# Adapters on the way out: added to their matrices while whole weights go to a library that knows no adapters.


_PARTS = ("lora_A.weight", "lora_B.weight", "weight")


def merged_weights(model: nn.Module, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The weights of `model` with every adapter added to its matrix; all others pass by as they are.

    One matrix at a time is held until its adapter has come. The sum is made in fp32 and rounded once.
    """
    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if has_adapter(module)}
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, part = next(
            ((name.removesuffix(f".{part}"), part) for part in _PARTS if name.endswith(f".{part}")), (name, "")
        )
        if layer not in adapted:
            yield name, tensor
            continue
        pieces = held.setdefault(layer, {})
        pieces[part] = tensor
        if len(pieces) == len(_PARTS):
            down, up, weight = (pieces[part] for part in _PARTS)
            change = difference(down.float(), up.float(), adapted[layer].lora_scale)
            change = change.t() if is_transposed(adapted[layer]) else change
            del held[layer]
            yield f"{layer}.weight", (weight.float() + change).to(weight.dtype)
    assert not held, "a matrix, its adapter or a part of it is no parameter"


class OnlineRunner(PhaseRunner):
    """Trains on answers that the model itself gives. Everything else is as in any run."""

    cast: ModelRoles
    """The models beside the policy."""
    roller: RolloutWorker
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
        self.memory_plan = OnlineMemoryPlan(self)

    def prepare(self) -> Engine:
        """Build the policy, the models beside it, and what makes answers."""
        given = self.preparation()
        engine = prepare_manual(given)
        self.cast = make_model_roles(given, self.phase_data)
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
            log=self.warn,
        )
        section = config.posttrain or PosttrainConfig()
        correct = correctness((*section.data, *section.val_data))
        self._writer = RolloutWriter(hybrid, self._scorer(), correct, data.tokenizer.decode, stop)
        ends: tuple[int | str, ...] = (*stop.tokens, *stop.texts)
        self._sampling = Sampling(
            rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, stop=ends, seed=config.seed
        )
        self.roller = RolloutWorker(
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


def _mixture(config: RunConfig, online: Online, pad: int, runner: OnlineRunner) -> ExampleMixture | None:
    method = online.method
    if not isinstance(method, PpoConfig) or not method.ptx_data:
        return None
    rows = prepare_rows(method.ptx_data, config, runner.phase_data)
    if not rows:
        raise DataError(f"no example is left of ppo.ptx_data: {runner.phase_data.account}")
    return ExampleMixture(rows, weight=method.ptx_weight, seed=config.seed, pad=pad, answers=online.answers)


class _Nothing:
    """Prompts to validate on are asked all at once, and need no loader."""

    def close(self) -> None:
        """Nothing is held."""
