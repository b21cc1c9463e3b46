"""Registries, which build objects from `dict(type='Name', …)`.

[Note: registries are tables of names]
Decorators fill a registry when a module is imported. That is global state, which Plait avoids elsewhere, but scripts
of MMEngine need it. A registry only maps names to classes and functions, so several runs in one process share no other
state through it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

from plait.config import choose, load_code
from plait.errors import ConfigError, Problem

C = TypeVar("C", bound=Callable[..., Any])


class Registry:
    """A table of classes and functions of one kind (models, hooks, …) by name.

    A name that is not registered here is looked up in MMEngine's registry of the same kind, if MMEngine is imported; a
    dotted name is imported.
    """

    def __init__(self, name: str, *, root: str | None = None) -> None:
        """`root`: the name of this registry in `mmengine.registry`."""
        self.name = name
        self._root = root
        self._table: dict[str, Callable[..., Any]] = {}

    @overload
    def register_module(self, name: C) -> C: ...

    @overload
    def register_module(self, name: str | list[str] | None = None, force: bool = False) -> Callable[[C], C]: ...

    @overload
    def register_module(self, name: str | list[str] | None = None, force: bool = False, *, module: C) -> C: ...

    def register_module(self, name: Any = None, force: bool = False, module: Any = None) -> Any:
        """Register a class or function, as a decorator with or without parentheses, or as `module`."""
        if callable(name):
            return self._register(name, [], force)
        names = [name] if isinstance(name, str) else list(name or ())
        if module is not None:
            return self._register(module, names, force)
        return lambda target: self._register(target, names, force)

    def _register(self, target: Callable[..., Any], names: list[str], force: bool) -> Callable[..., Any]:
        for name in names or [target.__name__]:
            if not force and self._table.get(name, target) is not target:
                message = f"{name!r} is already registered, as {_qualified_name(self._table[name])}"
                raise ConfigError(Problem(self.name, message, "Choose another name, or set `force=True`."))
            self._table[name] = target
        return target

    def get(self, key: str) -> Callable[..., Any]:
        """Return the class or function of a name; raise `ConfigError` if there is none."""
        target = self.find(key)
        if target is None:
            raise ConfigError(Problem(f"{self.name}.type", f"{key!r} is not registered", choose(key, self, "name")))
        return target

    def find(self, key: str) -> Callable[..., Any] | None:
        """Return the class or function of a name; None if there is none."""
        plain = key.rpartition(".")[2] if key.startswith(("mmengine.", "plait.")) else key
        if plain in self._table:
            return self._table[plain]
        theirs = getattr(sys.modules.get("mmengine.registry"), self._root or "", None)
        if theirs is not None and (target := theirs.get(key)) is not None:
            return target  # type: ignore[no-any-return]
        return _import_target(key) if "." in key else None

    def build(self, cfg: Any, default_args: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Return the object that a dict with a `type` describes; anything but a dict is returned unchanged."""
        if not isinstance(cfg, Mapping):
            return cfg
        options = {**(default_args or {}), **more, **cfg}
        target = options.pop("type", None)
        options.pop("_scope_", None)
        if target is None:
            message = f"{dict(cfg)!r} has no `type`"
            raise ConfigError(Problem(self.name, message, f"The names are {', '.join(self)}."))
        if isinstance(target, type) and target.__module__.startswith("mmengine."):
            target = self._table.get(target.__name__, target)  # this front end's class of the same name
        maker = self.get(target) if isinstance(target, str) else target
        if not callable(maker):
            raise ConfigError(Problem(f"{self.name}.type", f"{target!r} is not a class or a name", "Set one."))
        check_arguments(f"{self.name}.{_name(maker)}", maker, cfg)
        accepted = _accepted(maker)
        if accepted is not None:  # drop defaults that are not arguments of it
            options = {key: value for key, value in options.items() if key in accepted or key in cfg}
        return maker(**options)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._table))

    def __contains__(self, key: str) -> bool:
        return self.find(key) is not None

    def __len__(self) -> int:
        return len(self._table)


def check_arguments(path: str, maker: Callable[..., Any], cfg: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` with every key of `cfg` that is not an argument of `maker`."""
    accepted = _accepted(maker)
    if accepted is None:
        return
    unknown = [key for key in cfg if key not in accepted and key not in ("type", "_scope_")]
    remedies = {key: choose(key, accepted, "key") if accepted else "It takes no keys." for key in unknown}
    if unknown:
        raise ConfigError([Problem(f"{path}.{key}", "unknown key", remedies[key]) for key in unknown])


def _accepted(maker: Callable[..., Any]) -> list[str] | None:
    """Return the names of the arguments of `maker`; None if it accepts any."""
    if not (isinstance(maker, type) and maker.__module__.startswith("plait.frontends.mmengine.")):
        names, takes_any = _arguments(maker)
        return None if takes_any else names
    names = []
    hidden = ("self", *getattr(maker, "fixed", ()))
    for cls in maker.__mro__:
        # The classes of this package pass other arguments on to their base class.
        if cls is object or "__init__" not in vars(cls):
            continue
        named, takes_any = _arguments(vars(cls)["__init__"])
        names += [name for name in named if name not in (*hidden, *names)]
        if not takes_any:
            break
    return names


def _arguments(maker: Any) -> tuple[list[str], bool]:
    """Return the names of the arguments of `maker`, and whether it accepts others (`**kwargs`)."""
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):  # some C classes have no signature
        return [], True
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    names = [name for name, parameter in parameters.items() if parameter.kind in named]
    return names, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _import_target(key: str) -> Callable[..., Any] | None:
    """Import and return what a dotted name refers to; None if it does not exist. Errors of its module are raised."""
    module, _, attribute = key.rpartition(".")
    try:
        target = load_code(f"{module}:{attribute}", key="type")
    except ConfigError as error:
        cause = error.__cause__
        missing = isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}.")
        if missing or isinstance(cause, AttributeError):
            return None
        raise
    return target if callable(target) else None


def _qualified_name(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{_name(target)}"


def _name(target: Any) -> str:
    return str(getattr(target, "__qualname__", target))


class RunnerRegistry(Registry):
    """Builds the runner that `runner_type` of a configuration names."""

    def build(self, cfg: Any, default_args: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Return the runner of a configuration, by its `from_cfg`."""
        maker: Any = self.get(cfg.get("runner_type", "Runner"))
        return maker.from_cfg(cfg)


RUNNERS = RunnerRegistry("runner", root="RUNNERS")
LOOPS = Registry("loop", root="LOOPS")
HOOKS = Registry("hook", root="HOOKS")
STRATEGIES = Registry("strategy", root="STRATEGIES")
DATASETS = Registry("dataset", root="DATASETS")
DATA_SAMPLERS = Registry("data sampler", root="DATA_SAMPLERS")
TRANSFORMS = Registry("transform", root="TRANSFORMS")
MODELS = Registry("model", root="MODELS")
OPTIMIZERS = Registry("optimizer", root="OPTIMIZERS")
OPTIM_WRAPPERS = Registry("optim_wrapper", root="OPTIM_WRAPPERS")
OPTIM_WRAPPER_CONSTRUCTORS = Registry("optimizer wrapper constructor", root="OPTIM_WRAPPER_CONSTRUCTORS")
PARAM_SCHEDULERS = Registry("parameter scheduler", root="PARAM_SCHEDULERS")
METRICS = Registry("metric", root="METRICS")
EVALUATOR = Registry("evaluator", root="EVALUATOR")
TASK_UTILS = Registry("task util", root="TASK_UTILS")
VISUALIZERS = Registry("visualizer", root="VISUALIZERS")
VISBACKENDS = Registry("vis_backend", root="VISBACKENDS")
LOG_PROCESSORS = Registry("log_processor", root="LOG_PROCESSORS")
FUNCTIONS = Registry("function", root="FUNCTIONS")
