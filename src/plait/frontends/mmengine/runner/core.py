"""What both runners are: arguments, loops, hooks and one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.config import choose
from plait.errors import ConfigError, ModelError, Problem, TrainingError
from plait.frontends import Answer
from plait.frontends.mmengine.config.config import as_config
from plait.frontends.mmengine.evaluator import build_evaluator
from plait.frontends.mmengine.logging import MessageHub, make_logger
from plait.frontends.mmengine.model.base_model import BaseModel, call_with
from plait.frontends.mmengine.optim import build_optim_wrapper
from plait.frontends.mmengine.registry import LOG_PROCESSORS, MODELS
from plait.frontends.mmengine.runner.checkpoints import Checkpoints
from plait.frontends.mmengine.runner.dataloader import build_dataloader
from plait.frontends.mmengine.runner.describe import (
    build_strategy,
    check_batch,
    finish,
    known_arguments,
    read_compile,
    read_wrapper,
    takes_nothing,
)
from plait.frontends.mmengine.runner.environment import Randomness, check_launcher, read_environment
from plait.frontends.mmengine.runner.hook_table import HookTable
from plait.frontends.mmengine.runner.phases import Phases, by_epoch, wanted_phases
from plait.frontends.mmengine.runner.saving import Saver
from plait.frontends.mmengine.runner.schedules import build_schedulers, scale_rates
from plait.frontends.mmengine.strategy.table import Sheet
from plait.frontends.mmengine.visualization import Visualizer, build_visualizer
from plait.precision import make_policy
from plait.spec import Phase
from plait.strategy import ManualEngine, Preparation, prepare_manual
from plait.world import detect_ranks, on_main, open_world, restore_rng_state, rng_state


class BaseRunner(Checkpoints):
    """Trains, validates and tests a model as MMEngine's runners do, on Plait's native engine."""

    def __init__(
        self,
        model: Any,
        *,
        work_dir: str | Path = "work_dirs",
        experiment_name: str | None = None,
        train_dataloader: Any = None,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        train_cfg: Any = None,
        val_dataloader: Any = None,
        val_evaluator: Any = None,
        val_cfg: Any = None,
        test_dataloader: Any = None,
        test_evaluator: Any = None,
        test_cfg: Any = None,
        strategy: Any = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        default_hooks: Mapping[str, Any] | None = None,
        custom_hooks: Sequence[Any] | None = None,
        data_preprocessor: Any = None,
        load_from: str | Path | None = None,
        resume: str | bool = False,
        launcher: str | None = None,
        env_cfg: Mapping[str, Any] | None = None,
        log_processor: Any = None,
        log_level: int | str = "INFO",
        visualizer: Any = None,
        default_scope: str | None = "mmengine",
        randomness: Mapping[str, Any] | None = None,
        compile: Any = False,
        cfg: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            known = known_arguments(BaseRunner)
            raise ConfigError(
                [Problem(key, "there is no such argument", choose(key, known, "argument")) for key in unknown]
            )
        if default_scope not in (None, "mmengine", "plait"):
            message = f"{default_scope!r}: names are looked up without a scope"
            raise ConfigError(
                Problem("default_scope", message, f"Write type='{default_scope}.Name' where one is meant.")
            )
        wanted = wanted_phases(
            {"cfg": train_cfg, "dataloader": train_dataloader},
            {"cfg": val_cfg, "dataloader": val_dataloader, "evaluator": val_evaluator},
            {"cfg": test_cfg, "dataloader": test_dataloader, "evaluator": test_evaluator},
            optim_wrapper=optim_wrapper,
            schedules=param_scheduler,
        )
        self.phases = Phases(self, wanted)
        self.cfg = as_config(cfg or {})
        self.work_dir = str(work_dir)
        self.strategy = build_strategy(strategy)
        self._resume, self._load_from, self._loaded = resume, load_from, False
        self._compile, self._auto_scale = compile, auto_scale_lr or self.strategy.auto_scale_lr
        self._open(launcher, env_cfg or {}, randomness or {})
        self._name(experiment_name)
        self.logger = make_logger(log_level, self.log_dir / f"{self.timestamp}.log", is_main=self.world.is_main)
        self.message_hub = MessageHub(self.experiment_name)
        self.visualizer = build_visualizer(
            visualizer, save_dir=self.log_dir, work_dir=Path(work_dir), is_main=self.world.is_main
        )
        self.log_processor: Any = log_processor
        if log_processor is None or isinstance(log_processor, Mapping):
            counted = by_epoch(train_cfg) if "train" in wanted else True
            described = {"type": "LogProcessor", "by_epoch": counted, **(log_processor or {})}
            self.log_processor = LOG_PROCESSORS.build(described)
        self._hooks = HookTable(default_hooks, custom_hooks)
        self._preprocessor = data_preprocessor
        self.model: Any = self.build_model(model)
        self.optim_wrapper: Any = optim_wrapper
        self.param_schedulers: Any = param_scheduler
        self.saver = Saver(self)
        self._engine: ManualEngine | None = None

    # ---- before the model

    def _open(self, launcher: str | None, env_cfg: Mapping[str, Any], randomness: Mapping[str, Any]) -> None:
        self._sheet = Sheet()
        self.launcher = launcher
        self._start_method = read_environment(env_cfg, self._sheet)
        self._randomness = Randomness.read(randomness)
        check_launcher(launcher)
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else detect_ranks().size
        found = self.strategy.translate(size)
        for section, value in found.sections.items():
            self._sheet.sections.setdefault(section, value)
        self._sheet.account.entries += found.account.entries
        read_compile(self._compile, self._sheet)
        # How is computed, the optim wrapper says too, and there is none before there is a model.
        self.world = open_world(finish(self._sheet, work_dir=self.work_dir, precision=None))
        self.device = self.world.device
        self.seed = self._randomness.start(self.world.rank)
        self.deterministic = self._randomness.deterministic

    def _name(self, experiment_name: str | None) -> None:
        self.timestamp: str = on_main(self.world, lambda: time.strftime("%Y%m%d_%H%M%S"))
        name = experiment_name or (Path(self.cfg.filename).stem if self.cfg.filename else None)
        self.experiment_name = self.timestamp if name is None else f"{name}_{self.timestamp}"
        self.log_dir = Path(self.work_dir) / self.timestamp
        on_main(self.world, lambda: self.log_dir.mkdir(parents=True, exist_ok=True))

    def build_model(self, model: Any) -> Any:
        """The model from its description; one that is a model already stays as it is."""
        if isinstance(model, Mapping):
            more = {} if self._preprocessor is None else {"data_preprocessor": self._preprocessor}
            model = MODELS.build({**more, **model})
        elif self._preprocessor is not None:
            message = "the model is an object, and has one already"
            raise ConfigError(Problem("data_preprocessor", message, "Give it to the model, or describe the model."))
        if not isinstance(model, nn.Module):
            message = f"a {type(model).__name__} is no model"
            raise ConfigError(Problem("model", message, "Give a module, or a dict with its type."))
        needed = {"train": "train_step", "val": "val_step", "test": "test_step"}
        missing = [step for mode, step in needed.items() if self.phases.has(mode) and not hasattr(model, step)]
        if missing:
            raise ModelError(
                f"{type(model).__name__} has no {', '.join(missing)}: derive it from BaseModel, which has them all"
            )
        return model

    # ---- the engine

    @property
    def engine(self) -> ManualEngine:
        """The model, made ready; `setup` does that."""
        if self._engine is None:
            raise TrainingError("the runner has no engine yet: call runner.setup(), as train(), val() and test() do")
        return self._engine

    def setup(self) -> None:
        """Make the model and its optimizer ready, unless that was done; what a user calls does it first."""
        if self._engine is not None:
            return
        model, sheet = self.model, self._sheet
        if self.strategy.sync_bn is not None:
            model = self._with_sync_bn(model)
        if takes_nothing(getattr(model, "init_weights", None)) and not self.strategy.skip_init_weights:
            model.init_weights()
        optimizer = None
        if self.phases.has("train"):
            wrapper = build_optim_wrapper(self.optim_wrapper, model, default=self.strategy.default_wrapper)
            self.optim_wrapper = wrapper
            read_wrapper(wrapper, self.strategy, sheet, self.device)
            optimizer = wrapper.optimizer
            replicas = self.world.layout.data_parallel
            check_batch(sheet.sections.get("batch", {}), self.batch_total // replicas, replicas)
            if self._auto_scale is not None:
                scale_rates(self, wrapper, self._auto_scale)
        self.config = finish(
            sheet, work_dir=self.work_dir, seed=self.seed, deterministic=self.deterministic, log={"console": "none"}
        )
        generators = rng_state(self.device)
        given = Preparation(self.config, self.world, model=model, optimizer=optimizer, say=self.logger.warning)
        self._engine = engine = prepare_manual(given)
        restore_rng_state(generators, self.device)  # what preparing drew is not missing afterwards
        self.model = engine.model
        self._route_calls(engine)
        if optimizer is not None:
            self.optim_wrapper.attach(engine, self.forward_context)
            self.param_schedulers = build_schedulers(self, self.param_schedulers)
        else:
            self.param_schedulers = []
        if self.world.heartbeat.is_read:
            enter = self.world.heartbeat.enter
            engine.on_phase = lambda phase: enter(phase, engine.steps)

    def forward_context(self) -> AbstractContextManager[Any]:
        """What the model is called under, for steps that call it themselves."""
        return make_policy(self.config.precision).context(self.device)

    def _route_calls(self, engine: ManualEngine) -> None:
        """Let a model's steps call it through the engine, which moves and casts what it is called with."""
        own = getattr(type(self.model), "_run_forward", None)
        usual = own is BaseModel._run_forward or getattr(own, "__module__", "").startswith("mmengine.")
        if usual:
            self.model._run_forward = lambda data, mode: call_with(engine.forward, data, mode)

    def _with_sync_bn(self, model: nn.Module) -> nn.Module:
        if self.device.type == "cpu":
            message = "'torch' needs CUDA: torch's SyncBatchNorm has no kernel for CPU"
            raise ConfigError(Problem("strategy.sync_bn", message, "Leave it out."))
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted

    # ---- what a user calls

    def train(self) -> nn.Module:
        """Train to the end, from the start or from a checkpoint; returns the model."""
        loop = self.phases.loop("train")
        self.setup()
        if self.phases.has("val"):
            self.phases.loop("val")  # what is wrong with it shows now, not after the first epoch
        self._tell()
        with self._shown():
            self.call_hook("before_run")
            self.load_or_resume()
            self.optim_wrapper.initialize_count_status(self.model, loop.iter, loop.max_iters)
            loop.run()
            self.saver.wait()
            self.call_hook("after_run")
        return self.model  # type: ignore[no-any-return]

    def val(self) -> dict[str, float]:
        """Validate; returns the metrics."""
        return self._evaluate("val")

    def test(self) -> dict[str, float]:
        """Test; returns the metrics."""
        return self._evaluate("test")

    def _evaluate(self, mode: str) -> dict[str, float]:
        loop = self.phases.loop(mode)
        self.setup()
        with self._shown():
            self.call_hook("before_run")
            self.load_or_resume()
            metrics: dict[str, float] = loop.run()
            self.call_hook("after_run")
        return metrics

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Back ends are open while something happens."""
        if isinstance(self.visualizer, Visualizer):
            self.visualizer.open()
        try:
            yield
        finally:
            self.visualizer.close()

    def close(self) -> None:
        """Let files and processes go."""
        self.saver.close()
        self.visualizer.close()
        self.world.close()

    def _tell(self) -> None:
        for entry in self._sheet.account.of(Answer.MAPPED, Answer.UNNEEDED):
            self.logger.info(f"{entry.key}: {entry.answer}: {entry.text}")
        self.logger.info(f"Hooks will be executed in the following order:\n{self._hooks.info()}")
        if self.world.is_main and len(self.cfg):
            self.cfg.dump(Path(self.work_dir) / (Path(self.cfg.filename).name if self.cfg.filename else "config.py"))

    # ---- for hooks and loops

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call a point of every hook."""
        self._hooks.call(self, fn_name, **kwargs)

    def register_hook(self, hook: Any, priority: int | str | None = None) -> None:
        """Add a hook."""
        self._hooks.register(hook, priority)

    def build_dataloader(self, dataloader: Any) -> Any:
        """A loader from its description."""
        return build_dataloader(
            dataloader, seed=self.seed, diff_rank_seed=self._randomness.diff_rank_seed, start_method=self._start_method
        )

    def build_evaluator(self, evaluator: Any) -> Any:
        """An evaluator from its description."""
        return build_evaluator(evaluator)

    def enter(self, phase: Phase) -> None:
        """Say what this rank begins to do."""
        self.world.heartbeat.enter(phase, 0 if self._engine is None else self._engine.steps)
