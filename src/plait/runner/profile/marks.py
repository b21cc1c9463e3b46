"""Names in a trace: phases of a step, modules of the model, the waits for data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.profiler import record_function

from plait.precision import spoken_for
from plait.runner.profile.kinds import MODULE, PHASE
from plait.spec import Phase
from plait.torch_internals import compiled_call, compiled_call_set


class PhaseMarks:
    """One range for each phase as an engine tells of it."""

    def __init__(self) -> None:
        self._open: Any = None

    def enter(self, phase: Phase) -> None:
        """The phase before is over."""
        self.close()
        if phase is not Phase.IDLE:
            self._open = record_function(f"{PHASE}{phase}")
            self._open.__enter__()

    def close(self) -> None:
        """No phase any more."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class ModuleStack:
    """Which modules are being called, the innermost last; each call is a range of the trace."""

    def __init__(self) -> None:
        self._names: list[tuple[str, Any]] = []

    @property
    def innermost(self) -> str | None:
        """Its name; None outside of all modules."""
        return self._names[-1][0] if self._names else None

    def push(self, name: str) -> None:
        """A module is called."""
        mark: Any = record_function(f"{MODULE}{name}")
        mark.__enter__()
        self._names.append((name, mark))

    def pop(self, name: str) -> None:
        """A call has ended, and with it those inside of it that were cut short."""
        while self._names:
            found, mark = self._names.pop()
            mark.__exit__(None, None, None)
            if found == name:
                return


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, by its name in the whole model; the model itself by its class."""
    for name, module in model.named_modules():
        # Sharding derives a class of its own, FSDP<Name>, from the model's.
        yield name or type(module).__name__.removeprefix("FSDP"), module


@contextmanager
def module_marks(model: nn.Module, stack: ModuleStack) -> Iterator[None]:
    """The stack knows of calls until the block ends; of a compiled module it does not know those of its parts.

    Nor does it know layers that are not called: with a hook they would be, and the step would be another one.
    """
    with ExitStack() as undo:
        inside = set(map(id, spoken_for(model)))
        for name, module in named_modules(model):
            if id(module) in inside:
                continue
            if compiled_call(module) is not None:
                # Hooks would become part of what is compiled, and it would be compiled anew.
                inside.update(map(id, module.modules()))
                called = _marked(compiled_call(module), name, stack)
                undo.enter_context(compiled_call_set(module, called))
                continue
            before = module.register_forward_pre_hook(partial(_push, stack, name), prepend=True)
            # A pass that is computed again may stop in the middle, by an exception.
            after = module.register_forward_hook(partial(_pop, stack, name), always_call=True)
            undo.callback(before.remove)
            undo.callback(after.remove)
        yield


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """No module of the model is compiled until the block ends; then each is again, as it was."""
    with ExitStack() as undo:
        for _, module in named_modules(model):
            if compiled_call(module) is not None:
                undo.enter_context(compiled_call_set(module, None))
        yield


def _push(stack: ModuleStack, name: str, module: nn.Module, args: Any) -> None:
    stack.push(name)


def _pop(stack: ModuleStack, name: str, module: nn.Module, args: Any, output: Any) -> None:
    stack.pop(name)


def _marked(call: Callable[..., Any], name: str, stack: ModuleStack) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        stack.push(name)
        try:
            return call(*args, **kwargs)
        finally:
            stack.pop(name)

    return marked


def marked_batches(epoch: Callable[..., Iterator[Any]], saw: Callable[[Any], None]) -> Callable[..., Iterator[Any]]:
    """The loader's `epoch` with a range around each wait for data; `saw` is given what came."""

    def marked(*args: Any, **kwargs: Any) -> Iterator[Any]:
        batches = iter(epoch(*args, **kwargs))
        while True:
            with record_function("data loading"):
                batch = next(batches, None)
            if batch is None:
                return
            saw(batch)
            yield batch

    return marked
