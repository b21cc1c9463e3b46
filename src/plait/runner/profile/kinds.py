"""What a piece of a step's time is spent on, told from the names that torch gives to operators and kernels."""

from __future__ import annotations

import re
from types import MappingProxyType

IDLE = "idle"
COMMUNICATION = "communication"
COMPUTE = ("matmul", "attention", "elementwise", "optimizer", "packing")
"""Kinds of arithmetic; where one of them runs, the time is its."""
KINDS = (*COMPUTE, COMMUNICATION, "copies", "update", "data", "evaluate", "save", IDLE)
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


def label(kind: str, device: str) -> str:
    """What a kind is called in a table."""
    return "device idle" if kind == IDLE and device != "cpu" else LABELS[kind]


PHASE, MODULE = "phase: ", "module: "
"""How the names of phases and modules begin in a trace."""
MARKS = MappingProxyType({"data loading": "data", "validation": "evaluate", "saving": "save"})
"""The other names that a profiled run puts into its trace."""
ASIDE = ("evaluate", "save")
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


def is_between_two(name: str) -> bool:
    """Whether such a span is a message from one rank to another: it lasts from when it was asked for to the wait."""
    return name.endswith((":send", ":recv"))


def is_collective(name: str) -> bool:
    """Whether an operator hands something to a backend of `torch.distributed`."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def kind_of_op(name: str) -> str | None:
    """The kind of an operator by its own name; None where it computes nothing, or only calls others."""
    if is_collective(name):
        return COMMUNICATION
    if name.startswith(_PACKING):
        return "packing"
    if name.startswith(COMPILED):
        return "elementwise"
    space, _, word = name.partition("::")
    if not word or space == "autograd" or _FREE_OPS.fullmatch(word):
        return None
    if _ATTENTION.search(word):
        return "attention"
    return "matmul" if _MATMUL_OPS.fullmatch(word) else "elementwise"


def kind_of_kernel(name: str, category: str) -> str:
    """The kind of what ran on a device, by its name alone."""
    if name.startswith("nccl"):
        return COMMUNICATION
    if category == "gpu_memcpy":
        return "copies" if "HtoD" in name or "DtoH" in name else "elementwise"
    if _ATTENTION.search(name):
        return "attention"
    return "matmul" if _MATMUL.search(name) else "elementwise"
