"""`Runner`, and `BaseRunner`, its common part with `FlexibleRunner`: arguments, loops, hooks and one engine."""

from __future__ import annotations

import inspect
import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from plait.config import RunConfig, check, choose, parse_sections
from plait.distributed import Ranks, detect_ranks, make_deterministic, on_main, open_world, restore_rng_state, rng_state
from plait.engine import ManualEngine, Preparation, prepare_manual
from plait.errors import ConfigError, ModelError, Problem, TrainingError, WorldError
from plait.frontends import KeyOutcome, TranslatedSettings, honoured, honoured_as, refused_unless, unneeded
from plait.frontends.mmengine.config import Config, as_config
from plait.frontends.mmengine.dataset import build_dataloader
from plait.frontends.mmengine.dist import sync_random_seed
from plait.frontends.mmengine.evaluator import build_evaluator
from plait.frontends.mmengine.hooks import SortedHooks
from plait.frontends.mmengine.logging import MessageHub, make_logger
from plait.frontends.mmengine.model import BaseModel, call_with
from plait.frontends.mmengine.optim.optimizers import (
    BaseOptimWrapper,
    DeepSpeedOptimWrapper,
    build_optim_wrapper,
    scale_rates,
)
from plait.frontends.mmengine.optim.schedulers import build_schedulers
from plait.frontends.mmengine.registry import LOG_PROCESSORS, MODELS, RUNNERS, STRATEGIES, check_arguments
from plait.frontends.mmengine.runner.loops import RunnerLoops, by_epoch, wanted_phases
from plait.frontends.mmengine.runner.saving import Checkpoints, MMEngineSaver
from plait.frontends.mmengine.strategy import BaseStrategy, Reader
from plait.frontends.mmengine.visualization import Visualizer, build_visualizer
from plait.launch import Phase
from plait.precision import make_policy

# Translates a runner's arguments into a run description, with a report on every translated key.


_COMPILE: dict[str, Reader] = {
    "backend": honoured_as("strategy.compile.backend"),
    "mode": honoured_as("strategy.compile.mode"),
    "dynamic": honoured_as("strategy.compile.dynamic"),
    "fullgraph": honoured_as("strategy.compile.fullgraph"),
    "target": refused_unless("`forward` is compiled; the rest of a step is the engine's", "forward"),
    "options": refused_unless("write a `mode` instead"),
    "disable": refused_unless("write compile=False", False),
}


def build_strategy(cfg: Any) -> BaseStrategy:
    """Return the strategy that `cfg` describes; by default `DDPStrategy`."""
    made = STRATEGIES.build({"type": "DDPStrategy"} if cfg is None else cfg)
    if not isinstance(made, BaseStrategy):
        message = f"a {type(made).__name__} needs another engine"
        remedy = f"Write strategy=dict(type=…) with one of {', '.join(STRATEGIES)}."
        raise ConfigError(Problem("strategy", message, remedy))
    return made


def read_compile(compile_cfg: Any, settings: TranslatedSettings) -> None:
    """Translate the argument `compile`: true, or a dict of arguments of `torch.compile`."""
    if not compile_cfg:
        return
    settings.set("strategy.compile.enabled", True)
    if isinstance(compile_cfg, Mapping):
        settings.read(compile_cfg, _COMPILE, "compile")
    settings.honoured("compile", compile_cfg, "strategy.compile")


def read_wrapper(
    wrapper: BaseOptimWrapper, strategy: BaseStrategy, settings: TranslatedSettings, device: torch.device
) -> None:
    """Translate the dtype, clipping and accumulation of an optim wrapper."""
    wrapper_type = type(wrapper).__name__
    if strategy.requires_default_wrapper and not isinstance(wrapper, DeepSpeedOptimWrapper):
        message = f"{wrapper_type} cannot be used with {type(strategy).__name__}, which sets precision itself"
        raise ConfigError(Problem("optim_wrapper.type", message, f"Write type={strategy.default_wrapper!r}."))
    if isinstance(wrapper, DeepSpeedOptimWrapper):
        wrapper.accumulate(int(settings.sections.get("batch", {}).get("accumulation", 1)))
    if wrapper.clip:
        settings.sections.setdefault("train", {}).update(wrapper.clip)
        settings.honoured("optim_wrapper.clip_grad", wrapper.clip, f"train: {wrapper.clip}")
    if wrapper.precision is None:
        return
    wanted = dict(wrapper.precision)
    if wanted["compute"] == "autocast":
        # As torch.autocast chooses its default dtype on this device.
        wanted["compute"] = "bf16" if torch.get_autocast_dtype(device.type) == torch.bfloat16 else "fp16"
    if wanted["compute"] != "fp16":
        wanted.pop("scaler")
    before = settings.sections.get("precision", {}).get("compute")
    if before not in (None, wanted["compute"]):
        message = f"{wanted['compute']}, but {before} in the strategy"
        raise ConfigError(Problem("optim_wrapper.dtype", message, "Leave one of them out."))
    settings.sections.setdefault("precision", {}).update(wanted)
    text = f"precision.compute: {wanted['compute']}; the optimizer keeps fp32 weights"
    settings.mapped("optim_wrapper.type", wrapper_type, text)


def finish(settings: TranslatedSettings, **more: Any) -> RunConfig:
    """Return the run description of the translated settings; raise `ConfigError` for problems and refused keys."""
    settings.raise_problems()
    settings.report.raise_refusals()
    # Without `batch`: the loader and the optim wrapper set the batch sizes.
    sections = {key: value for key, value in settings.sections.items() if key != "batch"}
    config = parse_sections(**{**sections, **more}).config
    if config.checkpoint.node_local:
        message = "node-local checkpoints are not supported by this front end"
        raise ConfigError(Problem("strategy.checkpoint", message, "Leave out `use_node_local_storage`."))
    check(config, has_val=False, require_length=False)
    return config


def check_batch(batch: Mapping[str, Any], size: int, ranks: int) -> None:
    """Raise `ConfigError` if a strategy's batch sizes differ from the loader's, which has `size` samples per rank."""
    expected = {"micro": size, "total": size * int(batch.get("accumulation", 1)) * ranks}
    names = {"micro": "train_micro_batch_size_per_gpu", "total": "train_batch_size"}
    for key, value in expected.items():
        if batch.get(key, value) != value:
            message = f"{batch[key]}, but `train_dataloader.batch_size` {size} makes it {value}"
            raise ConfigError(Problem(f"strategy.{names[key]}", message, "Leave it out."))


def known_arguments(runner: Any) -> list[str]:
    """Return the names of a runner's arguments."""
    parameters = inspect.signature(runner.__init__).parameters
    return [name for name in parameters if name not in ("self", "cfg", "unknown")]


def takes_nothing(function: Any) -> bool:
    """Whether `function` is a function that can be called without arguments; false for None."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def misspelt(keys: Any, known: Any) -> list[Problem]:
    """Return problems for unknown keys that resemble arguments of a runner; others are the file's own variables."""
    from difflib import get_close_matches

    problems = []
    for key in keys:
        if key not in known and get_close_matches(str(key), known, n=1, cutoff=0.85):
            problems.append(Problem(str(key), "a runner has no such argument", choose(key, known, "argument")))
    return problems


# Settings of the process: launcher, backend, seeds, limits.


LAUNCHERS = {"pytorch": "torchrun", "slurm": "slurm", "mpi": "mpi", "none": "none"}
_STARTED_BY = {"pytorch": "torchrun", "slurm": "srun", "mpi": "mpirun"}


def check_launcher(launcher: str | None, ranks: Ranks | None = None) -> None:
    """Raise if this process was not started by `launcher`; with None, check nothing."""
    if launcher is None:
        return
    if launcher not in LAUNCHERS:
        raise ConfigError(Problem("launcher", f"{launcher!r}", choose(launcher, LAUNCHERS, "launcher")))
    detected = ranks or detect_ranks()
    if detected.launcher == LAUNCHERS[launcher] or detected.launcher == "caller":
        return
    if launcher == "none":
        if detected.size > 1:
            name = next(key for key, value in LAUNCHERS.items() if value == detected.launcher)
            raise WorldError(
                f"launcher='none', but {detected.launcher} started {detected.size} processes, which would each train "
                f"alone and overwrite each other's files: pass launcher={name!r} (--launcher {name})"
            )
        return
    raise WorldError(
        f"launcher={launcher!r}, but this process was not started by {_STARTED_BY[launcher]}: start it with that, or "
        "pass launcher='none' for one process"
    )


def _backend(settings: TranslatedSettings, key: str, value: Any) -> None:
    if value not in ("nccl", "gloo", "mpi"):
        refused_unless("write nccl, gloo or mpi")(settings, key, value)
    elif value == "nccl" and not torch.cuda.is_available():  # scripts that run on the CPU set it too
        settings.mapped(key, value, "backend: gloo, since this machine has no CUDA device")
    else:
        honoured_as("backend")(settings, key, value)


def _seconds(value: Any) -> float:
    return float(value.total_seconds() if hasattr(value, "total_seconds") else value)


_DISTRIBUTED: dict[str, Reader] = {
    "backend": _backend,
    "timeout": honoured_as("timeout_s", _seconds),
    "init_backend": refused_unless("leave it out", "torch"),
}
_THREADS = unneeded("libraries keep their number of threads; the launcher sets OMP_NUM_THREADS")
_PROCESSES: dict[str, Reader] = {
    "mp_start_method": honoured("start method of data loader workers"),
    "opencv_num_threads": _THREADS,
    "omp_num_threads": _THREADS,
    "mkl_num_threads": _THREADS,
}
_ENVIRONMENT: dict[str, Reader] = {
    "cudnn_benchmark": honoured("torch.backends.cudnn.benchmark"),
    "resource_limit": honoured("limit of open files of this process"),
    "mp_cfg": lambda settings, key, value: settings.read(value, _PROCESSES, key),
    "dist_cfg": lambda settings, key, value: settings.read(value, _DISTRIBUTED, key),
}


def read_environment(env_cfg: Mapping[str, Any], settings: TranslatedSettings) -> str | None:
    """Translate `env_cfg`, apply its settings of this process, and return the start method of loader workers."""
    settings.read(env_cfg, _ENVIRONMENT, "env_cfg")
    settings.raise_problems()
    torch.backends.cudnn.benchmark = bool(env_cfg.get("cudnn_benchmark", False))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(max(int(env_cfg.get("resource_limit", 4096)), soft), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    method = env_cfg.get("mp_cfg", {}).get("mp_start_method")
    return None if method is None else str(method)


@dataclass(frozen=True, slots=True)
class Randomness:
    """The argument `randomness=dict(seed=…)` of a runner."""

    seed: int | None = None
    diff_rank_seed: bool = False
    """Whether each rank has a different seed."""
    deterministic: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Randomness:
        """Return the settings of a runner's argument `randomness`."""
        check_arguments("randomness", cls, given)
        return cls(**given)

    def start(self, rank: int) -> int:
        """Seed all generators; return the seed of the run, by default a random one, the same on all ranks."""
        seed = sync_random_seed() if self.seed is None else int(self.seed)
        rank_seed = (seed + rank if self.diff_rank_seed else seed) % 2**32
        random.seed(rank_seed)
        np.random.seed(rank_seed)
        torch.manual_seed(rank_seed)
        if self.deterministic:
            make_deterministic()
        return seed


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
            raise ConfigError([Problem(key, "unknown argument", choose(key, known, "argument")) for key in unknown])
        if default_scope not in (None, "mmengine", "plait"):
            message = f"{default_scope!r}: default scopes are not supported"
            raise ConfigError(Problem("default_scope", message, f"Write type='{default_scope}.Name'."))
        wanted = wanted_phases(
            {"cfg": train_cfg, "dataloader": train_dataloader},
            {"cfg": val_cfg, "dataloader": val_dataloader, "evaluator": val_evaluator},
            {"cfg": test_cfg, "dataloader": test_dataloader, "evaluator": test_evaluator},
            optim_wrapper=optim_wrapper,
            schedules=param_scheduler,
        )
        self.phases = RunnerLoops(self, wanted)
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
        self._hooks = SortedHooks(default_hooks, custom_hooks)
        self._preprocessor = data_preprocessor
        self.model: Any = self.build_model(model)
        self.optim_wrapper: Any = optim_wrapper
        self.param_schedulers: Any = param_scheduler
        self._engine: ManualEngine | None = None

    # ---- before the model

    def _open(self, launcher: str | None, env_cfg: Mapping[str, Any], randomness: Mapping[str, Any]) -> None:
        self._settings = TranslatedSettings()
        self.launcher = launcher
        self._start_method = read_environment(env_cfg, self._settings)
        self._randomness = Randomness.read(randomness)
        check_launcher(launcher)
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else detect_ranks().size
        translation = self.strategy.translate(size)
        for section, value in translation.sections.items():
            self._settings.sections.setdefault(section, value)
        self._settings.report.entries += translation.report.entries
        read_compile(self._compile, self._settings)
        # Without precision: the optim wrapper sets it too, and can be built only after the model.
        self.world = open_world(finish(self._settings, work_dir=self.work_dir, precision=None))
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
        """Return the model that a dict describes; a module is returned unchanged."""
        if isinstance(model, Mapping):
            more = {} if self._preprocessor is None else {"data_preprocessor": self._preprocessor}
            model = MODELS.build({**more, **model})
        elif self._preprocessor is not None:
            message = "has no effect on a model that is an object"
            raise ConfigError(
                Problem("data_preprocessor", message, "Pass it to the model, or give the model as a dict.")
            )
        if not isinstance(model, nn.Module):
            message = f"a {type(model).__name__} is not a model"
            raise ConfigError(Problem("model", message, "Give a module, or a dict with its type."))
        needed = {"train": "train_step", "val": "val_step", "test": "test_step"}
        missing = [step for mode, step in needed.items() if self.phases.has(mode) and not hasattr(model, step)]
        if missing:
            raise ModelError(
                f"{type(model).__name__} has no {', '.join(missing)}: derive it from BaseModel, which has them"
            )
        return model

    # ---- the engine

    @property
    def engine(self) -> ManualEngine:
        """The engine of the model; `setup` prepares it."""
        if self._engine is None:
            raise TrainingError("the runner has no engine yet: call runner.setup(), as train(), val() and test() do")
        return self._engine

    def setup(self) -> None:
        """Prepare the model and its optimizer on an engine, once; `train`, `val` and `test` call it."""
        if self._engine is not None:
            return
        model, settings = self.model, self._settings
        if self.strategy.sync_bn is not None:
            model = self._with_sync_bn(model)
        if takes_nothing(getattr(model, "init_weights", None)) and not self.strategy.skip_init_weights:
            model.init_weights()
        optimizer = None
        if self.phases.has("train"):
            wrapper = build_optim_wrapper(self.optim_wrapper, model, default=self.strategy.default_wrapper)
            self.optim_wrapper = wrapper
            read_wrapper(wrapper, self.strategy, settings, self.device)
            optimizer = wrapper.optimizer
            replicas = self.world.layout.data_parallel
            check_batch(settings.sections.get("batch", {}), self.batch_total // replicas, replicas)
            if self._auto_scale is not None:
                scale_rates(self, wrapper, self._auto_scale)
        self.config = finish(
            settings, work_dir=self.work_dir, seed=self.seed, deterministic=self.deterministic, log={"console": "none"}
        )
        generators = rng_state(self.device)
        given = Preparation(self.config, self.world, model=model, optimizer=optimizer, log=self.logger.warning)
        self._engine = engine = prepare_manual(given)
        restore_rng_state(generators, self.device)  # so that preparing does not change the random state
        self.saver = MMEngineSaver(self)
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
        """Return the precision context, for `train_step`s and others that call the model without the engine."""
        return make_policy(self.config.precision).context(self.device)

    def _route_calls(self, engine: ManualEngine) -> None:
        """Let the model's `train_step` and the others call it through the engine, which moves and casts its inputs."""
        run_forward = getattr(type(self.model), "_run_forward", None)
        is_standard = run_forward is BaseModel._run_forward or getattr(run_forward, "__module__", "").startswith(
            "mmengine."
        )
        if is_standard:
            self.model._run_forward = lambda data, mode: call_with(engine.forward, data, mode)

    def _with_sync_bn(self, model: nn.Module) -> nn.Module:
        if self.device.type == "cpu":
            message = "'torch' needs CUDA: torch's SyncBatchNorm has no kernel for CPU"
            raise ConfigError(Problem("strategy.sync_bn", message, "Leave it out."))
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted

    # ---- public methods

    def train(self) -> nn.Module:
        """Train to the end, from the start or a checkpoint; return the model."""
        loop = self.phases.loop("train")
        self.setup()
        if self.phases.has("val"):
            self.phases.loop("val")  # built now, so that mistakes in it are reported before the first epoch
        self._log_start()
        with self._visualizer_open():
            self.call_hook("before_run")
            self.load_or_resume()
            self.optim_wrapper.initialize_count_status(self.model, loop.iter, loop.max_iters)
            loop.run()
            self.saver.wait()
            self.call_hook("after_run")
        return self.model  # type: ignore[no-any-return]

    def val(self) -> dict[str, float]:
        """Validate, and return the metrics."""
        return self._evaluate("val")

    def test(self) -> dict[str, float]:
        """Test, and return the metrics."""
        return self._evaluate("test")

    def _evaluate(self, mode: str) -> dict[str, float]:
        loop = self.phases.loop(mode)
        self.setup()
        with self._visualizer_open():
            self.call_hook("before_run")
            self.load_or_resume()
            metrics: dict[str, float] = loop.run()
            self.call_hook("after_run")
        return metrics

    @contextmanager
    def _visualizer_open(self) -> Iterator[None]:
        """A `with` block in which the visualizer's backends are open."""
        if isinstance(self.visualizer, Visualizer):
            self.visualizer.open()
        try:
            yield
        finally:
            self.visualizer.close()

    def close(self) -> None:
        """Close files and the process group."""
        if self._engine is not None:
            self.saver.close()
        self.visualizer.close()
        self.world.close()

    def _log_start(self) -> None:
        for entry in self._settings.report.of(KeyOutcome.MAPPED, KeyOutcome.UNNEEDED):
            self.logger.info(f"{entry.key}: {entry.outcome}: {entry.text}")
        self.logger.info(f"Hooks will be executed in the following order:\n{self._hooks.info()}")
        if self.world.is_main and len(self.cfg):
            self.cfg.dump(Path(self.work_dir) / (Path(self.cfg.filename).name if self.cfg.filename else "config.py"))

    # ---- for hooks and loops

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call a method of every hook."""
        self._hooks.call(self, fn_name, **kwargs)

    def register_hook(self, hook: Any, priority: int | str | None = None) -> None:
        """Add a hook."""
        self._hooks.register(hook, priority)

    def build_dataloader(self, dataloader: Any) -> Any:
        """Return the loader that a dict describes."""
        return build_dataloader(
            dataloader, seed=self.seed, diff_rank_seed=self._randomness.diff_rank_seed, start_method=self._start_method
        )

    def build_evaluator(self, evaluator: Any) -> Any:
        """Return the evaluator that a dict describes."""
        return build_evaluator(evaluator)

    def enter(self, phase: Phase) -> None:
        """Write the phase that this rank enters to its heartbeat."""
        self.world.heartbeat.enter(phase, 0 if self._engine is None else self._engine.steps)


# Reads a runner's arguments from a configuration.


_OF_CFG = ("model_wrapper_cfg", "sync_bn", "activation_checkpointing", "efficient_conv_bn_eval", "compile")
_OF_FILES = ("custom_imports", "runner_type", "env_cfg")


def arguments_of(cfg: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are arguments of a runner; raise for keys that resemble one, ignore other variables."""
    config = as_config(cfg)
    known = known_arguments(BaseRunner)
    problems = misspelt(config.keys(), (*known, *_OF_CFG, *_OF_FILES))
    if problems:
        raise ConfigError(problems)
    if "model" not in config:
        raise ConfigError(Problem("model", "there is none", "Write model=dict(type=…)."))
    taken = {key: config.get(key) for key in known if key in config}
    return {**taken, "cfg": config}


@RUNNERS.register_module(name="Runner")
class MMEngineRunner(BaseRunner):
    """MMEngine's Runner. `cfg` may hold `compile`, `model_wrapper_cfg` and `sync_bn`, as in MMEngine."""

    def __init__(
        self, model: Any, work_dir: str | Path, train_dataloader: Any = None, *, launcher: str = "none", **options: Any
    ) -> None:
        cfg = as_config(options.get("cfg") or {})
        if "strategy" in options:
            message = "Runner has no strategy"
            raise ConfigError(Problem("strategy", message, "Use FlexibleRunner, which has the same arguments."))
        options.setdefault("compile", cfg.get("compile", False))
        options["strategy"] = _strategy(cfg)
        super().__init__(model, work_dir=work_dir, train_dataloader=train_dataloader, launcher=launcher, **options)

    @classmethod
    def from_cfg(cls, cfg: Config | Mapping[str, Any]) -> MMEngineRunner:
        """Return a runner whose arguments are the keys of a configuration."""
        return cls(**arguments_of(cfg))


def _strategy(cfg: Config) -> dict[str, Any]:
    wrapper = dict(cfg.get("model_wrapper_cfg") or {})
    for key in ("activation_checkpointing", "efficient_conv_bn_eval"):
        if cfg.get(key):
            message = f"{cfg.get(key)!r}: rewriting single modules is not supported"
            remedy = "FlexibleRunner with FSDPStrategy(activation_checkpointing=dict()) recomputes whole blocks."
            raise ConfigError(Problem(f"cfg.{key}", message, remedy))
    sharded = "Sharded" in str(getattr(wrapper.get("type"), "__name__", wrapper.get("type", "")))
    return {
        "type": "FSDPStrategy" if sharded else "DDPStrategy",
        "model_wrapper": wrapper,
        "sync_bn": cfg.get("sync_bn"),
    }


Runner = MMEngineRunner
"""MMEngine's name of the class; Plait's own runner is `plait.Runner`."""
