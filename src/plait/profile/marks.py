"""Named ranges (`record_function`) in a torch.profiler trace, and the category of each operator and kernel.

Ranges are the phases of a step, the modules of the model, and waits for data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.profiler import record_function

from plait.precision import bypassed_layers
from plait.torch_internals import compiled_call, compiled_call_set

# Categories of time. Those of operators and kernels follow from the names that torch gives them.


IDLE = "idle"
COMMUNICATION = "communication"
COMPUTE = ("matmul", "attention", "elementwise", "optimizer", "packing")
"""Categories of computation: a moment in which one of these and another run counts as computation."""
CATEGORIES = (*COMPUTE, COMMUNICATION, "copies", "update", "data", "evaluate", "save", IDLE)
"""All categories, in the order in which they are shown. Every moment of a step counts to exactly one."""

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
    """Return the label of a category in tables."""
    return "device idle" if category == IDLE and device != "cpu" else LABELS[category]


PHASE, MODULE = "phase: ", "module: "
"""Prefixes of the names of phases and modules in a trace."""
MARKS = MappingProxyType({"data loading": "data", "validation": "evaluate", "saving": "save"})
"""The other ranges that a profiled run puts into its trace, and their categories."""
BETWEEN_STEPS = ("evaluate", "save")
"""Categories of time between steps: operators that run in it count to these and not to their own."""

_RUNNING = re.compile(r"(gloo|mpi|ucc|xccl):\w+$")
_UPDATE = re.compile(r"aten::_fused_(ada|sgd)")
_PACKING = ("FSDP::all_gather", "FSDP::post_backward_reduce", "fsdp::")
COMPILED = ("CompiledFunction", "## Call CompiledFxGraph", "Torch-Compiled Region")
"""Prefixes of the names of compiled code, which a CPU trace shows as one operator."""
_MATMUL_OPS = re.compile(
    r"(add|b|baddb|_scaled_|_grouped_|_scaled_grouped_)?mm_?|matmul|linear(_backward)?|einsum|(add)?mv|dot"
    r"|_?conv(olution|\dd).*|(mkldnn|cudnn|miopen)_convolution.*"
)
_FREE_OPS = re.compile(
    r"(_unsafe_)?view(_as)?|reshape|t|transpose|permute|as_strided|slice|select|narrow|expand|(un)?squeeze|(un)?flatten"
    r"|chunk|split(_with_sizes)?|unbind|detach|alias|(new_)?empty(_like|_strided)?|resize_|set_|result_type|item"
    r"|is_nonzero|_local_scalar_dense|lift_fresh"
)
"""Operators that compute nothing: views, allocations and reads of a single value."""
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa|\battn", re.IGNORECASE)
_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|triton_tem|sm\d\d_|splitK|convolve|conv\dd|[dw]grad|implicit|_mm_kernel",
    re.IGNORECASE,
)


def is_update(name: str) -> bool:
    """Return whether an operator is a fused optimizer update."""
    return _UPDATE.match(name) is not None


def is_running_collective(name: str) -> bool:
    """Return whether an event of the trace is a running collective; CPU backends record it on their own threads."""
    return _RUNNING.match(name) is not None


def is_point_to_point(name: str) -> bool:
    """Return whether such an event is a send or receive, which lasts from the call until it is waited for."""
    return name.endswith((":send", ":recv"))


def is_collective(name: str) -> bool:
    """Return whether an operator starts communication of `torch.distributed`."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def category_of_op(name: str) -> str | None:
    """Return the category of an operator by its name; None where it computes nothing, or only calls others."""
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
    """Return the category of a kernel or copy on a device, by its name."""
    if name.startswith("nccl"):
        return COMMUNICATION
    if category == "gpu_memcpy":
        return "copies" if "HtoD" in name or "DtoH" in name else "elementwise"
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name) else "elementwise"


class TraceRange:
    """Consecutive ranges of the trace, such as the phases of a step: at most one is open."""

    def __init__(self) -> None:
        self._open: Any = None

    @property
    def is_open(self) -> bool:
        """Whether a range has begun and not ended."""
        return self._open is not None

    def begin(self, name: str) -> None:
        """Begin a range, and end the one before."""
        self.end()
        self._open = record_function(name)
        self._open.__enter__()

    def end(self) -> None:
        """End the range, if one is open."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class ModuleStack:
    """The stack of running modules, the innermost last; each call is a range of the trace."""

    def __init__(self) -> None:
        self._names: list[tuple[str, Any]] = []

    @property
    def innermost(self) -> str | None:
        """The name of the innermost module; None outside of all modules."""
        return self._names[-1][0] if self._names else None

    def push(self, name: str) -> None:
        """Begin the call of a module."""
        mark: Any = record_function(f"{MODULE}{name}")
        mark.__enter__()
        self._names.append((name, mark))

    def pop(self, name: str) -> None:
        """End a call, and calls inside it that an exception ended."""
        while self._names:
            top, mark = self._names.pop()
            mark.__exit__(None, None, None)
            if top == name:
                return


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, with its name in the whole model; the model itself has the name of its class."""
    for name, module in model.named_modules():
        # `fully_shard` changes the class of the model to FSDP<Name>.
        yield name or type(module).__name__.removeprefix("FSDP"), module


@contextmanager
def module_marks(model: nn.Module, stack: ModuleStack) -> Iterator[None]:
    """Push every call of a module on the stack until the block ends, except calls inside compiled modules.

    Layers whose weights a fused operation uses without calling them (`bypassed_layers`) get no hooks: the operation
    calls layers with hooks one by one.
    """
    with ExitStack() as undo:
        inside = set(map(id, bypassed_layers(model)))
        for name, module in named_modules(model):
            if id(module) in inside:
                continue
            if compiled_call(module) is not None:
                # Hooks would become part of the compiled code, which would be recompiled.
                inside.update(map(id, module.modules()))
                called = _marked(compiled_call(module), name, stack)
                undo.enter_context(compiled_call_set(module, called))
                continue
            before = module.register_forward_pre_hook(partial(_push, stack, name), prepend=True)
            # Recomputation may stop in the middle, by an exception.
            after = module.register_forward_hook(partial(_pop, stack, name), always_call=True)
            undo.callback(before.remove)
            undo.callback(after.remove)
        yield


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled modules uncompiled until the block ends."""
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
    """Return a wrapped `epoch` of a loader: with a range around each wait for data, and a call of `saw` per batch."""

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
