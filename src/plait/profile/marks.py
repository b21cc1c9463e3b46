"""Names in a trace: phases of a step, modules of the model, the waits for data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.profiler import record_function

from plait.launch import Phase
from plait.precision import spoken_for
from plait.torch_internals import compiled_call, compiled_call_set

# What a piece of a step's time is spent on, told from the names that torch gives to operators and kernels.


IDLE = "idle"
COMMUNICATION = "communication"
COMPUTE = ("matmul", "attention", "elementwise", "optimizer", "packing")
"""Kinds of arithmetic; where one of them runs, the time is its."""
CATEGORIES = (*COMPUTE, COMMUNICATION, "copies", "update", "data", "evaluate", "save", IDLE)
"""All kinds, in the order in which they are shown. At any moment of a step there is exactly one."""

LABELS = MappingProxyType(
    {
        "matmul": "matrix products",
        "attention": "attention",
        "elementwise": "elementwise, norms, lookups, loss",
        "optimizer": "optimizer",
        "packing": "copies for messages",
        COMMUNICATION: "communication, waited for",
        "copies": "copies host ↔ device",
        "update": "optimizer, offloaded to the host",
        "data": "data loading",
        "evaluate": "validation",
        "save": "saving",
        IDLE: "Python and framework",
    }
)


def label(category: str, device: str) -> str:
    """What a kind is called in a table."""
    return "device idle" if category == IDLE and device != "cpu" else LABELS[category]


PHASE, MODULE = "phase: ", "module: "
"""How the names of phases and modules begin in a trace."""
MARKS = MappingProxyType({"data loading": "data", "validation": "evaluate", "saving": "save"})
"""The other names that a profiled run puts into its trace."""
BETWEEN_STEPS = ("evaluate", "save")
"""What happens between steps, whatever it is made of."""

_RUNNING = re.compile(r"(gloo|mpi|ucc|xccl):\w+$")
_UPDATE = re.compile(r"aten::_fused_(ada|sgd)")
_PACKING = ("FSDP::all_gather", "FSDP::post_backward_reduce", "fsdp::")
COMPILED = ("CompiledFunction", "## Call CompiledFxGraph", "Torch-Compiled Region")
"""How the names of compiled code begin; on a host it shows as one piece."""
_MATMUL_OPS = re.compile(
    r"(add|b|baddb|_scaled_|_grouped_|_scaled_grouped_)?mm_?|matmul|linear(_backward)?|einsum|(add)?mv|dot"
    r"|_?conv(olution|\dd).*|(mkldnn|cudnn|miopen)_convolution.*"
)
_FREE_OPS = re.compile(
    r"(_unsafe_)?view(_as)?|reshape|t|transpose|permute|as_strided|slice|select|narrow|expand|(un)?squeeze|(un)?flatten"
    r"|chunk|split(_with_sizes)?|unbind|detach|alias|(new_)?empty(_like|_strided)?|resize_|set_|result_type|item"
    r"|is_nonzero|_local_scalar_dense|lift_fresh"
)
"""Operators that compute nothing."""
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa|\battn", re.IGNORECASE)
_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|triton_tem|sm\d\d_|splitK|convolve|conv\dd|[dw]grad|implicit|_mm_kernel",
    re.IGNORECASE,
)


def is_update(name: str) -> bool:
    """Whether an operator is an optimizer's own."""
    return _UPDATE.match(name) is not None


def is_running_collective(name: str) -> bool:
    """Whether a span is a collective under way, as backends for the CPU record it on threads of their own."""
    return _RUNNING.match(name) is not None


def is_point_to_point(name: str) -> bool:
    """Whether such a span is a message from one rank to another: it lasts from when it was asked for to the wait."""
    return name.endswith((":send", ":recv"))


def is_collective(name: str) -> bool:
    """Whether an operator hands something to a backend of `torch.distributed`."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def category_of_op(name: str) -> str | None:
    """The kind of an operator by its own name; None where it computes nothing, or only calls others."""
    if is_collective(name):
        return COMMUNICATION
    if name.startswith(_PACKING):
        return "packing"
    if name.startswith(COMPILED):
        return "elementwise"
    space, _, op = name.partition("::")
    if not op or space == "autograd" or _FREE_OPS.fullmatch(op):
        return None
    if _ATTENTION.search(op):
        return "attention"
    return "matmul" if _MATMUL_OPS.fullmatch(op) else "elementwise"


def category_of_kernel(name: str, category: str) -> str:
    """The kind of what ran on a device, by its name alone."""
    if name.startswith("nccl"):
        return COMMUNICATION
    if category == "gpu_memcpy":
        return "copies" if "HtoD" in name or "DtoH" in name else "elementwise"
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name) else "elementwise"


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
            top, mark = self._names.pop()
            mark.__exit__(None, None, None)
            if top == name:
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
