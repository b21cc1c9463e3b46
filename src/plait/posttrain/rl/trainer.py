"""PPO and GRPO as runs: a `Runner` whose data are answers that the policy generates during the run."""

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
from plait.posttrain.models import make_generator_model
from plait.posttrain.rl.actor import LossStats, StepStats
from plait.posttrain.rl.experience import ExampleMixture, Experience, ExperienceLoader
from plait.posttrain.rl.memory_plan import OnlineMemoryPlan
from plait.posttrain.rl.rewards import FunctionScorer, ModelScorer, Rules, Scorer, find_function
from plait.posttrain.rl.roles import ModelRoles, make_model_roles
from plait.posttrain.rl.rollout import RolloutSampler, RolloutWorker, Stop
from plait.posttrain.rl.rollout import measure as measure_answers
from plait.posttrain.rl.settings import Online
from plait.posttrain.run import PhaseRunner
from plait.trainer import Hook

if TYPE_CHECKING:
    from plait.trainer import Runner

# Hooks of an online phase: train the critic, log metrics, and store the state in checkpoints.


class Rollouts(Hook):
    """Logs the metrics of rollouts and steps; stores the current rollout and the KL controller in checkpoints."""

    name = "rollout"
    priority = 30

    def __init__(self, run: OnlineRunner) -> None:
        self._run = run
        self._begun = 0.0

    def before_run(self, runner: Runner) -> None:
        """Validate the initial model, for comparison."""
        if runner.step == 0 and runner.has("val_data"):
            runner.validate()

    def before_step(self, runner: Runner) -> None:
        """Start the clock of the step, which includes that of the critic: its hook comes later."""
        self._begun = time.perf_counter()

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Add the metrics of this step to those of the rollout."""
        self._run.worker.clock.seconds["learning"] += time.perf_counter() - self._begun
        runner.figures.update(self._run.worker.figures)
        if runner.step % runner.config.log.every and runner.step != runner.total_steps:
            return  # not logged at this step, and reading the statistics waits for the device
        if (stats := _step_stats(runner.engine.model)) is not None:
            runner.figures.update(policy_loss=stats.loss, clip_fraction=stats.clipped)
        critic = self._run.roles.critic
        if critic is not None and (stats := _step_stats(critic.model)) is not None:
            runner.figures["value_loss"] = stats.loss

    def after_run(self, runner: Runner) -> None:
        """Log the time per stage."""
        runner.emit(EventKind.MESSAGE, level="info", text=str(self._run.worker.clock))

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Return the tensors of the current rollout."""
        return self._run.worker.experience.tensors()

    def state(self) -> dict[str, Any]:
        """Return the number of the current rollout, its metrics and the KL weight."""
        worker = self._run.worker
        return {"number": worker.experience.number, "beta": worker.controller.beta, "figures": worker.figures}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the run resumes within the rollout."""
        worker = self._run.worker
        worker.experience.number = int(state["number"])
        worker.controller = replace(worker.controller, beta=float(state["beta"]))
        worker.figures = dict(state["figures"])


class Critic(Hook):
    """Trains the critic on the answers of each step, and keeps it in the run's checkpoints."""

    name = "critic"
    priority = 40

    def __init__(self, run: OnlineRunner) -> None:
        self._run = run
        self._restored = False

    @property
    def _engine(self) -> NativeEngine:
        critic = self._run.roles.critic
        assert critic is not None, "the hook is there only with a critic"
        return critic

    def before_run(self, runner: Runner) -> None:
        """Tell the engine that the state of a checkpoint was loaded into it."""
        if self._restored:
            self._engine.state_loaded()
            self._restored = False

    def before_step(self, runner: Runner) -> None:
        """Train the critic for one step, on the same answers as the policy."""
        experience, batches = self._run.worker.experience, []
        for rows in runner.loader.current:
            inputs = experience.inputs(rows, "values", "returns")
            old = inputs.pop("values")
            batches.append(MicroBatch({**inputs, "old": old}, len(rows)))
        self._engine.train_step(batches)

    def after_run(self, runner: Runner) -> None:
        """Wait for its last step, which is logged if it was skipped."""
        self._engine.settle()

    def allocate(self, runner: Runner, entries: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate the optimizer state that a checkpoint has."""
        optimizer_entries = {
            name.removeprefix("optim."): entry for name, entry in entries.items() if name.startswith("optim.")
        }
        self._engine.allocate_optimizer_state(optimizer_entries)

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Return weights and optimizer state, for a checkpoint."""
        return self._engine.state_tensors()

    def state(self) -> dict[str, Any]:
        """Return the state of the critic's engine, such as its number of steps."""
        return self._engine.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._engine.restore(state)
        self._restored = True


def _step_stats(model: Any) -> StepStats | None:
    loss_stats = model.loss_stats
    assert isinstance(loss_stats, LossStats)
    return loss_stats.latest


# Weights with merged adapters, for a generation library that gets the plain model.


_SUFFIXES = ("lora_A.weight", "lora_B.weight", "weight")


def merged_weights(model: nn.Module, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `model` with every adapter merged into its layer's weight; others are yielded unchanged.

    `weights` are those of `model`, in any order: the parts of a layer are held until all three have come. Sums are in
    fp32 and are rounded once.
    """
    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if has_adapter(module)}
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, suffix = next(
            ((name.removesuffix(f".{suffix}"), suffix) for suffix in _SUFFIXES if name.endswith(f".{suffix}")),
            (name, ""),
        )
        if layer not in adapted:
            yield name, tensor
            continue
        pieces = held.setdefault(layer, {})
        pieces[suffix] = tensor
        if len(pieces) == len(_SUFFIXES):
            down, up, weight = (pieces[suffix] for suffix in _SUFFIXES)
            change = difference(down.float(), up.float(), adapted[layer].lora_scale)
            change = change.t() if is_transposed(adapted[layer]) else change
            del held[layer]
            yield f"{layer}.weight", (weight.float() + change).to(weight.dtype)
    assert not held, "a matrix, its adapter or a part of it is not a parameter"


class OnlineRunner(PhaseRunner):
    """A `PhaseRunner` for PPO and GRPO: it trains on answers that the policy generates during the run."""

    roles: ModelRoles
    """The engines of reference, reward model and critic."""
    worker: RolloutWorker
    """Generates rollouts, and has the current one."""

    def __init__(self, parsed: Parsed, *, hooks: Sequence[Hook] = ()) -> None:
        online = Online.of(parsed.config)
        own_hooks: list[Hook] = [Rollouts(self)]
        if isinstance(online.method, PpoConfig):
            own_hooks.append(Critic(self))
        if not isinstance(online.method, PpoConfig) or online.method.reward_model is None:
            find_function(parsed.config)  # raises an error for a bad name before anything is built
        super().__init__(parsed, hooks=[*own_hooks, *hooks])
        self.online = online
        self.memory_plan = OnlineMemoryPlan(self)

    def prepare(self) -> Engine:
        """Build the policy, the other models and the rollout worker; return the policy's engine."""
        given = self.preparation()
        engine = prepare_manual(given)
        self.roles = make_model_roles(given, self.phase_data)
        self._assemble(engine)
        return engine

    def setup(self) -> None:
        """Set up the run; the critic's engine reports its phases too."""
        super().setup()
        if self.roles.critic is not None:  # so that running out of memory in its steps is recognized too
            self.roles.critic.on_phase = self.engine.on_phase

    def _assemble(self, engine: ManualEngine) -> None:
        config, online, data = self.config, self.online, self.phase_data
        rollout, context, stop = online.rollout, longest(config), self._stop_of()
        hybrid = HybridEngine(
            engine,
            config,
            build=partial(make_generator_model, config),
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
        self._sampler = RolloutSampler(hybrid, self._scorer(), correct, data.tokenizer.decode, stop)
        stops: tuple[int | str, ...] = (*stop.tokens, *stop.texts)
        self._sampling = Sampling(
            rollout.max_new_tokens, rollout.temperature, rollout.top_k, rollout.top_p, stop=stops, seed=config.seed
        )
        self.worker = RolloutWorker(
            online,
            data.train,
            self._sampler,
            engine,
            self.roles,
            self._experience,
            sampling=self._sampling,
            rows=self.batch.micro,
            folder=Path(config.work_dir) if self.world.is_main else None,
            log=self.warn,
        )

    def _scorer(self) -> Scorer:
        rollout, reward_model = self.online.rollout, self.roles.reward_model
        if reward_model is None:
            name, function = find_function(self.config)
            return Rules(FunctionScorer(name, function, self.world, bad=rollout.bad_reward, log=self.warn), rollout)
        data = self.phase_data
        rows = {"rows": self.batch.micro, "longest": longest(self.config)}
        return Rules(ModelScorer(reward_model, data.template, data.tokenizer.end, **rows), rollout)

    def _stop_of(self) -> Stop:
        """Return what ends an answer: the ends of the template, and `rollout.stop`."""
        endings = (*self.phase_data.template.ends, *self.online.rollout.stop)
        tokens, texts = (tuple(end for end in endings if isinstance(end, end_type)) for end_type in (int, str))
        return Stop(tokens, texts)  # type: ignore[arg-type]

    def make_loader(self, role: str) -> Any:
        """Return the loader of the training data, which generates rollouts; for validation, an empty one."""
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
        self.worker.roll(number, self.step)
        self.enter(Phase.IDLE)

    def measure(self, role: str, limit: int | None) -> tuple[dict[str, float], int]:
        """Generate answers to the prompts; return their metrics and the number of batches."""
        prompts: Sequence[Prompt] = getattr(self.given, role)
        if limit is not None:
            prompts = prompts[: limit * self.batch.total]
        metrics = measure_answers(self._sampler, prompts, self._sampling)
        return metrics, -(-len(prompts) // self.batch.total)


def _mixture(config: RunConfig, online: Online, pad: int, runner: OnlineRunner) -> ExampleMixture | None:
    method = online.method
    if not isinstance(method, PpoConfig) or not method.ptx_data:
        return None
    rows = prepare_rows(method.ptx_data, config, runner.phase_data)
    if not rows:
        raise DataError(f"no example is left of ppo.ptx_data: {runner.phase_data.report}")
    return ExampleMixture(rows, weight=method.ptx_weight, seed=config.seed, pad=pad, answers=online.answers)


class _Nothing:
    """The loader of validation prompts, which `measure` reads directly."""

    def close(self) -> None:
        """Do nothing: no resource is held."""
