"""Everything private of torch that Plait uses, and nothing else of Plait uses anything private of torch.

Private names come and go between releases of torch. Here stands each one, with what it is for; `CHECKED` are the
releases with which all of them were tried (`make matrix`). What differs between releases is handled here.

[Note: private names are refused by name] A name that a release does not have is an `UnsupportedVersionError` that says
which, where it is first used: a patch of a method that is gone would change nothing, and nobody would notice. `plait
doctor` lists what is missing before anything needs it.

There are three kinds:
- functions and classes of modules (`NAMES`): imported from here, found when they are first asked for, since some of
  their modules take seconds to load;
- attributes of torch's objects (`ATTRIBUTES`): read and replaced by the functions below;
- the tables in torch's C++ libraries with which CUDA is simulated: see [Note: tables of C++].
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import UnsupportedVersionError

if TYPE_CHECKING:
    import torch._dynamo
    import torch._dynamo.eval_frame
    import torch._dynamo.exc
    import torch._functorch.aot_autograd
    import torch._functorch.partitioners
    import torch._guards
    import torch._inductor.decomposition
    import torch._ops
    import torch._subclasses.fake_tensor
    import torch.distributed._functional_collectives
    import torch.distributed.pipelining._backward
    import torch.distributed.tensor.debug
    import torch.nn.modules.batchnorm
    import torch.nn.modules.instancenorm
    import torch.testing._internal.distributed.fake_pg
    import torch.utils._python_dispatch
    import torch.utils._pytree

    foreach_add_ = torch._foreach_add_
    foreach_addcmul_ = torch._foreach_addcmul_
    foreach_clamp_max_ = torch._foreach_clamp_max_
    foreach_clamp_min_ = torch._foreach_clamp_min_
    foreach_copy_ = torch._foreach_copy_
    foreach_div = torch._foreach_div
    foreach_div_ = torch._foreach_div_
    foreach_lerp = torch._foreach_lerp
    foreach_lerp_ = torch._foreach_lerp_
    foreach_mul_ = torch._foreach_mul_
    foreach_norm = torch._foreach_norm
    foreach_sign_ = torch._foreach_sign_
    foreach_sqrt = torch._foreach_sqrt
    foreach_sub_ = torch._foreach_sub_
    fused_adam_ = torch._fused_adam_
    fused_adamw_ = torch._fused_adamw_
    scaled_mm = torch._scaled_mm
    TreeSpec = torch.utils._pytree.TreeSpec
    tree_flatten = torch.utils._pytree.tree_flatten
    tree_leaves = torch.utils._pytree.tree_leaves
    tree_map = torch.utils._pytree.tree_map
    tree_map_only = torch.utils._pytree.tree_map_only
    tree_unflatten = torch.utils._pytree.tree_unflatten
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
    disable_current_modes = torch.utils._python_dispatch._disable_current_modes
    OpOverload = torch._ops.OpOverload
    HigherOrderOperator = torch._ops.HigherOrderOperator
    FakeTensor = torch._subclasses.fake_tensor.FakeTensor
    FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
    unset_fake_temporarily = torch._subclasses.fake_tensor.unset_fake_temporarily
    active_fake_mode = torch._guards.active_fake_mode
    FakeStore = torch.testing._internal.distributed.fake_pg.FakeStore
    AnyBatchNorm = torch.nn.modules.batchnorm._BatchNorm
    AnyInstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
    functional_collectives = torch.distributed._functional_collectives
    construct_reverse_graph = torch.distributed.pipelining._backward.construct_reverse_graph
    get_param_groups = torch.distributed.pipelining._backward.get_param_groups
    clear_sharding_prop_cache = torch.distributed.tensor.debug._clear_sharding_prop_cache
    lookup_backend = torch._dynamo.lookup_backend
    OptimizedModule = torch._dynamo.eval_frame.OptimizedModule
    InvalidBackend = torch._dynamo.exc.InvalidBackend
    TorchDynamoException = torch._dynamo.exc.TorchDynamoException
    aot_function = torch._functorch.aot_autograd.aot_function
    min_cut_rematerialization_partition = torch._functorch.partitioners.min_cut_rematerialization_partition
    select_decomp_table = torch._inductor.decomposition.select_decomp_table
    aten_flash = torch.ops.aten._scaled_dot_product_flash_attention
    aten_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    aten_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    aten_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    aten_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    aten_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    aten_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    aten_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    aten_plain_flash_backward = torch.ops.aten._flash_attention_backward
    aten_plain_efficient_backward = torch.ops.aten._efficient_attention_backward
    aten_scaled_mm = torch.ops.aten._scaled_mm
    aten_grouped_mm = torch.ops.aten._grouped_mm
    aten_local_scalar_dense = torch.ops.aten._local_scalar_dense
    aten_to_copy = torch.ops.aten._to_copy
    aten_unsafe_view = torch.ops.aten._unsafe_view
    aten_unsafe_index_put = torch.ops.aten._unsafe_index_put

CHECKED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The releases of torch with which every name was tried."""


class Internal(NamedTuple):
    """A private name."""

    path: str
    """Dotted; of an attribute, through the class of the object."""
    purpose: str
    versions: str = ""
    """The releases that have it, where these are not all of `CHECKED`."""


_EACH = "the update of many tensors in a few kernels"
_NESTED = "tensors inside nested tuples, lists and mappings"
_SEEN = "seeing every operation while a block runs"
_FAKE = "tensors without values, on which plans run"
_SPLIT = "the two halves of a stage's backward pass"
_COMPILED = "what torch.compile could not do, and with which backend"
_TRACED = "plans of compiled modules"
_ATTENTION = "attention by a kernel that was chosen, with the numbers that ring attention adds up"
_KERNEL = "what an operation takes, in a plan"

NAMES = {
    "foreach_add_": Internal("torch._foreach_add_", _EACH),
    "foreach_addcmul_": Internal("torch._foreach_addcmul_", _EACH),
    "foreach_clamp_max_": Internal("torch._foreach_clamp_max_", _EACH),
    "foreach_clamp_min_": Internal("torch._foreach_clamp_min_", _EACH),
    "foreach_copy_": Internal("torch._foreach_copy_", _EACH),
    "foreach_div": Internal("torch._foreach_div", _EACH),
    "foreach_div_": Internal("torch._foreach_div_", _EACH),
    "foreach_lerp": Internal("torch._foreach_lerp", _EACH),
    "foreach_lerp_": Internal("torch._foreach_lerp_", _EACH),
    "foreach_mul_": Internal("torch._foreach_mul_", _EACH),
    "foreach_norm": Internal("torch._foreach_norm", _EACH),
    "foreach_sign_": Internal("torch._foreach_sign_", _EACH),
    "foreach_sqrt": Internal("torch._foreach_sqrt", _EACH),
    "foreach_sub_": Internal("torch._foreach_sub_", _EACH),
    "fused_adam_": Internal("torch._fused_adam_", _EACH),
    "fused_adamw_": Internal("torch._fused_adamw_", _EACH),
    "scaled_mm": Internal("torch._scaled_mm", "products of 8-bit matrices"),
    "TreeSpec": Internal("torch.utils._pytree.TreeSpec", _NESTED),
    "tree_flatten": Internal("torch.utils._pytree.tree_flatten", _NESTED),
    "tree_leaves": Internal("torch.utils._pytree.tree_leaves", _NESTED),
    "tree_map": Internal("torch.utils._pytree.tree_map", _NESTED),
    "tree_map_only": Internal("torch.utils._pytree.tree_map_only", _NESTED),
    "tree_unflatten": Internal("torch.utils._pytree.tree_unflatten", _NESTED),
    "TorchDispatchMode": Internal("torch.utils._python_dispatch.TorchDispatchMode", _SEEN),
    "disable_current_modes": Internal("torch.utils._python_dispatch._disable_current_modes", _SEEN),
    "OpOverload": Internal("torch._ops.OpOverload", _SEEN),
    "HigherOrderOperator": Internal("torch._ops.HigherOrderOperator", _SEEN),
    "FakeTensor": Internal("torch._subclasses.fake_tensor.FakeTensor", _FAKE),
    "FakeTensorMode": Internal("torch._subclasses.fake_tensor.FakeTensorMode", _FAKE),
    "unset_fake_temporarily": Internal("torch._subclasses.fake_tensor.unset_fake_temporarily", _FAKE),
    "active_fake_mode": Internal("torch._guards.active_fake_mode", _FAKE),
    "FakeStore": Internal("torch.testing._internal.distributed.fake_pg.FakeStore", "process groups without ranks"),
    "AnyBatchNorm": Internal("torch.nn.modules.batchnorm._BatchNorm", "batch norms of any dimension"),
    "AnyInstanceNorm": Internal("torch.nn.modules.instancenorm._InstanceNorm", "instance norms of any dimension"),
    "functional_collectives": Internal("torch.distributed._functional_collectives", "collectives that autograd knows"),
    "construct_reverse_graph": Internal("torch.distributed.pipelining._backward.construct_reverse_graph", _SPLIT),
    "get_param_groups": Internal("torch.distributed.pipelining._backward.get_param_groups", _SPLIT),
    "clear_sharding_prop_cache": Internal(
        "torch.distributed.tensor.debug._clear_sharding_prop_cache", "DTensor forgets the meshes of a plan"
    ),
    "lookup_backend": Internal("torch._dynamo.lookup_backend", _COMPILED),
    "OptimizedModule": Internal("torch._dynamo.eval_frame.OptimizedModule", "Accelerate's is_compiled_module"),
    "InvalidBackend": Internal("torch._dynamo.exc.InvalidBackend", _COMPILED),
    "TorchDynamoException": Internal("torch._dynamo.exc.TorchDynamoException", _COMPILED),
    "aot_function": Internal("torch._functorch.aot_autograd.aot_function", _TRACED),
    "min_cut_rematerialization_partition": Internal(
        "torch._functorch.partitioners.min_cut_rematerialization_partition", _TRACED
    ),
    "select_decomp_table": Internal("torch._inductor.decomposition.select_decomp_table", _TRACED),
    # Operations. `torch.ops` finds each when it is asked for, from the libraries that are loaded.
    "aten_flash": Internal("torch.ops.aten._scaled_dot_product_flash_attention", _ATTENTION),
    "aten_flash_backward": Internal("torch.ops.aten._scaled_dot_product_flash_attention_backward", _ATTENTION),
    "aten_flash_cpu": Internal("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", _ATTENTION),
    "aten_flash_cpu_backward": Internal(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", _ATTENTION
    ),
    "aten_efficient": Internal("torch.ops.aten._scaled_dot_product_efficient_attention", _ATTENTION),
    "aten_efficient_backward": Internal("torch.ops.aten._scaled_dot_product_efficient_attention_backward", _ATTENTION),
    "aten_cudnn": Internal("torch.ops.aten._scaled_dot_product_cudnn_attention", _ATTENTION),
    "aten_cudnn_backward": Internal("torch.ops.aten._scaled_dot_product_cudnn_attention_backward", _KERNEL),
    "aten_plain_flash_backward": Internal("torch.ops.aten._flash_attention_backward", _KERNEL),
    "aten_plain_efficient_backward": Internal("torch.ops.aten._efficient_attention_backward", _KERNEL),
    "aten_scaled_mm": Internal("torch.ops.aten._scaled_mm", "products that recomputing keeps"),
    "aten_grouped_mm": Internal("torch.ops.aten._grouped_mm", _KERNEL),
    "aten_local_scalar_dense": Internal("torch.ops.aten._local_scalar_dense", "who asks a tensor for its value"),
    "aten_to_copy": Internal("torch.ops.aten._to_copy", _KERNEL),
    "aten_unsafe_view": Internal("torch.ops.aten._unsafe_view", _KERNEL),
    "aten_unsafe_index_put": Internal("torch.ops.aten._unsafe_index_put", _KERNEL),
}
"""What other files import from here, by the name under which they do."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, _find(NAMES[name].path))


def _refusal(path: str) -> UnsupportedVersionError:
    return UnsupportedVersionError("torch", torch.__version__, path, f"{CHECKED[0]}–{CHECKED[-1]}")


@cache
def _find(path: str) -> Any:
    """What a dotted path stands for."""
    found: Any = None
    names = path.split(".")
    for end, name in enumerate(names, 1):
        if hasattr(found, name):
            found = getattr(found, name)
            continue
        try:
            found = import_module(".".join(names[:end]))
        except ImportError:
            raise _refusal(path) from None
    return found


def _of(owner: Any, name: str) -> Any:
    """An attribute of one of torch's objects."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = owner if isinstance(owner, type) else type(owner)
        raise _refusal(f"{kind.__module__}.{kind.__qualname__}.{name}") from None


def _later(owner: Any, name: str) -> Any:
    """An attribute that torch gives to an object after a while; None before."""
    found = getattr(owner, name, None)
    if found is None and not _mentions(owner.__class__, name):
        raise _refusal(f"{type(owner).__module__}.{type(owner).__qualname__}.{name}")
    return found


def _put(owner: Any, name: str, value: Any) -> None:
    """Give an attribute of one of torch's objects another value; it must be there."""
    _of(owner, name)
    setattr(owner, name, value)


@contextmanager
def _put_meanwhile(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = _of(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---- Storages and tensors


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """A number that storages which exist at the same time do not share; `data_ptr` is 0 for all without values."""
    storage = of if isinstance(of, torch.UntypedStorage) else of.untyped_storage()
    return int(_of(storage, "_cdata"))


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to, which tells two states of it apart."""
    return int(_of(tensor, "_version"))


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another."""
    return _of(tensor, "_base") is not None


# ---- Tensors without values


def has_values(tensor: object) -> bool:
    """Whether a tensor has values, and is not one of a plan. Whoever asks, asks here."""
    return not isinstance(tensor, _Fake)


_Fake = _find("torch._subclasses.fake_tensor.FakeTensor")  # loaded with torch itself


def claimed_device(tensor: Tensor) -> torch.device:
    """The device that a tensor without values says it is on, asked for without an operation."""
    if has_values(tensor):
        return tensor.device
    device: torch.device = _of(tensor, "fake_device")
    return device


@contextmanager
def no_gpu_context_for_fake_tensors() -> Iterator[None]:
    """Fake tensors on CUDA begin with a real one otherwise."""
    with _put_meanwhile(_find("torch._subclasses.fake_tensor"), "init_gpu_context", lambda device: None):
        yield


# ---- Operations


def schema_of(func: Any) -> Any:
    """The signature of an operation: `name`, `arguments`, `is_mutable`."""
    return _of(func, "_schema")


def has_schema(func: Any) -> bool:
    """Whether something is an operation with a signature."""
    return hasattr(func, "_schema")


def packet_of(func: Any) -> Any:
    """An operation without the choice between its overloads."""
    return _of(func, "_overloadpacket")


def overload_of(func: Any) -> str:
    """The name of an operation's overload."""
    return str(_of(func, "_overloadname"))


def body_of_custom_op(func: Any) -> Callable[..., Any] | None:
    """The function that `torch.library.custom_op` made this operation of."""
    definition = _find("torch._library.custom_ops.OPDEFS").get(schema_of(func).name)
    return None if definition is None else _of(definition, "_init_fn")


def current_autograd_node() -> Any:
    """The node of the graph that the backward pass is at; None outside of backward passes."""
    return _find("torch._C._current_autograd_node")()


def in_backward_pass() -> bool:
    """Whether autograd runs a graph."""
    return bool(_find("torch._C._current_graph_task_id")() != -1)


def next_sequence_number() -> int:
    """The number that the next node of autograd's graph gets."""
    return int(_find("torch.autograd._get_sequence_nr")())


def sequence_number(node: Any) -> int:
    """The number that a node of autograd's graph got."""
    return int(_of(node, "_sequence_nr")())


def profile_every_thread() -> Any:
    """`experimental_config` of a profiler that looks at all threads."""
    return _find("torch._C._profiler._ExperimentalConfig")(profile_all_threads=True)


FUSED_ON_CUDA = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
"""Operations of aten that a CUDA build has kernels for, and a CPU build takes apart."""


@contextmanager
def kernels_registered_for_cuda(names: Iterable[str], kernel: Callable[..., Any]) -> Iterator[None]:
    """These operations of aten have a CUDA kernel until the block ends."""
    library: Any = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    try:
        for name in names:
            library.impl(name, kernel)
        yield
    finally:
        _of(library, "_destroy")()


def name_of_truncated_normal() -> str:
    """The name of the function of `torch.nn.init` that draws for `trunc_normal_`."""
    name = "_no_grad_trunc_normal_"
    _of(nn.init, name)
    return name


# ---- Modules


def forward_hooks(module: nn.Module) -> tuple[int, int]:
    """How many hooks look at a module's forward pass: before it, after it."""
    return len(_of(module, "_forward_pre_hooks")), len(_of(module, "_forward_hooks"))


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at a module's forward or backward pass."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(_of(module, name) for name in names)


def gradient_hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """The functions that get a tensor's gradient, by `register_hook` and `register_post_accumulate_grad_hook`."""
    registered = (_of(tensor, "_backward_hooks"), _of(tensor, "_post_accumulate_grad_hooks"))
    return [hook for hooks in registered for hook in (hooks or {}).values()]


def any_global_hook() -> bool:
    """Whether somebody looks at the passes of all modules."""
    return bool(_find("torch.nn.modules.module._has_any_global_hook")())


def compiled_call(module: nn.Module) -> Any:
    """What `Module.compile` made, which is called in place of the module; None for one that is not compiled."""
    return _of(module, "_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Have something called in place of the module; None ends it. torch has nothing public that undoes `compile`."""
    _put(module, "_compiled_call_impl", call)


@contextmanager
def compiled_call_set(module: nn.Module, call: Any) -> Iterator[None]:
    """`set_compiled_call` until the block ends."""
    with _put_meanwhile(module, "_compiled_call_impl", call):
        yield


def inside_compiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given."""
    inner: nn.Module = _of(module, "_orig_mod")
    return inner


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of the buffers of one module that `state_dict` leaves out."""
    names: set[str] = _of(module, "_non_persistent_buffers_set")
    return names


@contextmanager
def module_apply_replaced(apply: Callable[..., nn.Module]) -> Iterator[None]:
    """`apply(module, change, recurse)` does what `Module.to` and its like do, until the block ends."""
    with _put_meanwhile(nn.Module, "_apply", apply):
        yield


# ---- Optimizers, schedules, samplers


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody looks at an optimizer's steps."""
    return bool(_of(optimizer, "_optimizer_step_pre_hooks") or _of(optimizer, "_optimizer_step_post_hooks"))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Else torch's schedules warn that the optimizer has not stepped before them."""
    setattr(optimizer, "_opt_called", True)  # noqa: B010  # torch sets it on the object, too


def schedule_steps(schedule: Any) -> int | None:
    """How often a schedule of torch has stepped; None for another library's."""
    if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
        return int(_of(schedule, "_step_count"))
    steps: int | None = getattr(schedule, "_step_count", None)
    return steps


def count_schedule_step(schedule: Any) -> None:
    """Count a step that the schedule did not make."""
    schedule._step_count += 1


def samples_asked_for(sampler: Any) -> int | None:
    """`num_samples` as it was given to a `RandomSampler`; the public property has the data set's length for None."""
    count: int | None = _of(sampler, "_num_samples")
    return count


# ---- Process groups and meshes


def group_by_name(name: str) -> dist.ProcessGroup:
    """The process group by whose name an operation sends."""
    group: dist.ProcessGroup = _find("torch.distributed.distributed_c10d._resolve_process_group")(name)
    return group


def is_group_name(name: str) -> bool:
    """Whether this is the name of a process group."""
    return name in _find("torch.distributed.distributed_c10d._world").pg_names.values()


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The ranks of a mesh in one row."""
    row: DeviceMesh = _of(mesh, "_flatten")(name)
    return row


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The axes of several meshes in one."""
    mesh: DeviceMesh = _of(DeviceMesh, "_concatenate")(meshes)
    return mesh


def flight_recorder(device: torch.device) -> Callable[[bool, bool], str] | None:
    """torch's record of the last collectives, as a function that gives JSON; None in builds that keep none."""
    bindings: Any = getattr(torch._C, "_distributed_c10d", None)
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json") if device.type == "cuda" else ("_dump_fr_trace_json",)
    found = (getattr(bindings, name, None) for name in names)
    return next((function for function in found if function is not None), None)


def set_allocator(settings: str) -> None:
    """What `PYTORCH_ALLOC_CONF` sets, which is read only once."""
    _find("torch._C._accelerator_setAllocatorSettings")(settings)


def split_products_around_collectives(group_name: str) -> None:
    """Async tensor parallelism, in what inductor compiles from now on."""
    _put(_find("torch._inductor.config"), "_micro_pipeline_tp", True)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):  # from then on it does so itself
        _find("torch.distributed._symmetric_memory.enable_symm_mem_for_group")(group_name)


# ---- DTensor; see [Note: DTensor is loaded late], `plait/distributed/dtensor.py`


def dtensor_of(local: Tensor, whole: Any) -> Any:
    """A local tensor as part of a whole that is spread like another, left on the device where it is."""
    spec = "torch.distributed.tensor._dtensor_spec"
    meta = _find(f"{spec}.TensorMeta")(whole.shape, whole.stride(), local.dtype)
    spread = _find(f"{spec}.DTensorSpec")(whole.device_mesh, whole.placements, meta)
    return _find("torch.distributed.tensor.DTensor")(local, spread, requires_grad=False)


def local_tensor(tensor: Any) -> Tensor:
    """The part of a DTensor that this rank holds, without an operation that autograd or a plan would see."""
    local: Tensor = _of(tensor, "_local_tensor")
    return local


@contextmanager
def around_shape_questions(asked: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """DTensor computes, on whole tensors, what shape a result would have; `asked` wraps that until the block ends."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    name = "_propagate_tensor_meta_non_cached"
    with _put_meanwhile(module.ShardingPropagator, name, asked(_of(module.ShardingPropagator, name))):
        yield


# ---- fully_shard


def fsdp_state(module: object) -> Any:
    """What `fully_shard` keeps about a module; None for one that it did not shard."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return _of(module, "_get_fsdp_state")()


def fsdp_groups(state: Any) -> list[Any]:
    """The parameters that a sharded module gathers together, as `FSDPParamGroup`s; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = _of(state, "_fsdp_param_group")
        groups = [] if group is None else [group]
    return list(groups)


def fsdp_group(module: object) -> Any:
    """The one group of a sharded module; None where it has no parameters of its own, or is not sharded.

    A module has several only where its parameters are spread over different meshes, as no parameters of Plait are.
    """
    state = fsdp_state(module)
    groups = [] if state is None else fsdp_groups(state)
    assert len(groups) <= 1, "the parameters of a unit lie on one mesh"
    return groups[0] if groups else None


def fsdp_params(group: Any) -> list[Any]:
    """The parameters of a group, as `FSDPParam`s."""
    return list(_of(group, "fsdp_params"))


def fsdp_part(param: Any) -> nn.Parameter:
    """This rank's part of a parameter."""
    part: nn.Parameter = _of(param, "sharded_param")
    return part


def fsdp_part_sizes(param: Any) -> tuple[torch.Size, int]:
    """The shape of this rank's part of a parameter, and its elements with the padding that all ranks have."""
    return _of(param, "sharded_size"), _of(param, "padded_sharded_param_size").numel()


def fsdp_is_gathered(group: Any) -> bool:
    """Whether the modules hold the whole parameters of a group."""
    return bool(_of(group, "is_unsharded"))


def fsdp_is_apart(group: Any) -> bool:
    """Whether the modules hold this rank's parts of the parameters of a group."""
    return bool(_of(group, "is_sharded"))


def fsdp_gather(group: Any) -> None:
    """Gather the parameters of a group, and wait for them."""
    _of(group, "unshard")()
    fsdp_wait(group)


def fsdp_wait(group: Any) -> None:
    """Wait for the parameters of a group that are on their way, and put them into the modules."""
    _of(group, "wait_for_unshard")()


def fsdp_let_go(group: Any) -> None:
    """Free the whole parameters of a group."""
    _of(group, "reshard")()


def fsdp_reduces(group: Any) -> bool:
    """Whether the next backward pass of a group reduces its gradients."""
    return bool(_of(group, "reduce_grads"))


def fsdp_around_gathering(group: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these before the parameters of a group are gathered, and once they have been waited for."""
    gather, wait = _of(group, "unshard"), _of(group, "wait_for_unshard")

    def begin(async_op: bool = False) -> None:
        before()
        gather(async_op)

    def finish() -> None:
        wait()
        after()

    _put(group, "unshard", begin)
    _put(group, "wait_for_unshard", finish)


def fsdp_around_reduction(group: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what a group does after its backward pass: its gradients are reduced, and whole parameters freed."""
    _put(group, "post_backward", around(_of(group, "post_backward")))


def fsdp_fill_gradients(group: Any) -> None:
    """Give zeros to the parameters of a group that have no gradient, in the format in which the others are summed."""
    params = [each for each in fsdp_params(group) if fsdp_whole(each) is not None]
    params = [each for each in params if _of(each, "unsharded_param").requires_grad]
    summed = any(fsdp_summed_gradient(each) is not None for each in params)
    for each in params:
        whole = _of(each, "unsharded_param")
        if fsdp_summed_gradient(each) is not None or (whole.grad is not None and not summed):
            continue
        grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
        whole.grad = None if summed else grad
        _put(each, "unsharded_accumulated_grad", grad.to(_of(each, "reduce_dtype")) if summed else None)


def fsdp_summed_gradient(param: Any) -> Tensor | None:
    """The gradient of the whole parameter, summed over micro-batches."""
    grad: Tensor | None = _later(param, "unsharded_accumulated_grad")
    return grad


def fsdp_gathered_memory(param: Any) -> list[Tensor]:
    """The memory that a parameter was gathered into."""
    return list(_later(param, "all_gather_outputs") or ())


def fsdp_start(module: object) -> None:
    """What a sharded module does before its first forward pass."""
    _of(fsdp_state(module), "_lazy_init")()


def fsdp_is_root(state: Any) -> bool:
    """Whether a module is the outermost that is sharded."""
    return bool(_of(state, "_is_root"))


def fsdp_in_use(state: Any) -> bool:
    """Whether a module runs, forwards or backwards."""
    return bool(_of(state, "_training_state").name != "IDLE")


def fsdp_goes_forward(state: Any) -> bool:
    """Whether the model that a module belongs to is in its forward pass."""
    return _of(_of(state, "_state_ctx"), "iter_forward_root") is not None


def fsdp_expect_backward(state: Any, output: Any) -> None:
    """Have a module gather its weights when the gradient of this output comes."""
    _of(state, "_register_pre_backward_hook")(output)


def fsdp_around_outputs(state: Any, around: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Wrap the function that gets what a module returns, and hooks its gradient."""
    name = "_register_pre_backward_hook"
    _put(state, name, around(_of(state, name)))


def fsdp_around_backward(
    state: Any,
    begin: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
    end: Callable[[Callable[[], None]], Callable[[], None]],
) -> None:
    """Wrap what a module does before its backward pass, and what the root does after the last one."""
    for name, around in (("_pre_backward", begin), ("_root_post_backward_final_callback", end)):
        _put(state, name, around(_of(state, name)))


def fsdp_end_of_backward(state: Any) -> Callable[[], None]:
    """Called within a backward pass: has the gradients of all modules completed at its end."""
    finish: Callable[[], None] = _of(state, "_register_root_post_backward_final_callback")
    return finish


def fsdp_begin_anew(root: Any) -> None:
    """The modules that have begun a backward pass begin again with the next one; nothing that was gathered goes."""
    context = _of(root, "_state_ctx")
    for state in _of(context, "all_states"):
        for part in (state, *fsdp_groups(state)):
            stage = _of(part, "_training_state")
            if stage.name == "PRE_BACKWARD":
                _put(part, "_training_state", type(stage).IDLE)
    _put(context, "post_backward_final_callback_queued", False)


def fsdp_gathers(group: Any) -> bool:
    """Whether a group's parameters are on their way."""
    return _of(group, "_all_gather_result") is not None


def fsdp_state_dict_hooks(group: Any) -> list[Any]:
    """The handles of the hooks by which `state_dict` shows parts, and `load_state_dict` looks at them."""
    before = ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle")
    handles = [_of(param, "_post_load_hook_handle") for param in fsdp_params(group)]
    return handles + list(chain.from_iterable(_of(group, name).values() for name in before))


def fsdp_reduced_in_order(group: Any) -> list[Any]:
    """The parameters of a group in the order in which their gradients are reduced; torch 2.15 chooses one."""
    params = fsdp_params(group)
    return [params[index] for index in getattr(group, "_reduce_scatter_param_indices", range(len(params)))]


def fsdp_sums_any_formats() -> bool:
    """Whether `set_reduce_scatter_unused_params` works where the gradients of a group have several formats.

    From torch 2.15 on the sum over micro-batches is the gradient of the gathered parameter itself. Before, it lay apart
    (`unsharded_accumulated_grad`), in the format of the sum, beside new gradients in another.
    """
    kind = _find("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam")
    return isinstance(vars(kind).get("unsharded_accumulated_grad"), property)


def fsdp_hold_back(root: Any) -> None:
    """Before the first of several backward passes: their gradients wait for `fsdp_reduce`."""
    root.set_is_last_backward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)
    if hasattr(root, "finalize_backward"):  # from torch 2.15 on
        root.set_manual_backward_finalization(True)


def fsdp_reduce(root: Any) -> None:
    """Reduce the gradients of the backward passes since `fsdp_hold_back`, and let go of whole parameters."""
    if not hasattr(root, "finalize_backward"):
        stage: Any = SimpleNamespace(submod=root)  # torch's own; of the stage it reads the module alone
        _find("torch.distributed.pipelining.PipelineStage").perform_reduce_grad(stage, 1)
        return
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    root.finalize_backward()
    root.set_manual_backward_finalization(False)


def fsdp_shard_data(param: Any) -> Tensor:
    """The flat memory of this rank's part of a parameter, with its padding."""
    data: Tensor = _of(param, "_sharded_param_data")
    return data


def fsdp_keep_part(param: Any) -> None:
    """Have torch not look, before a parameter's first use, whether its part is still the tensor that was cut."""
    _put(param, "reset_sharded_param", lambda: None)


def fsdp_copy_in_stream(group: Any) -> Any:
    """The stream on which the parts of a group are read to be gathered; None before the first forward pass."""
    return _later(_of(group, "comm_ctx"), "all_gather_copy_in_stream")


def fsdp_whole(param: Any) -> Tensor | None:
    """The gathered parameter; None before it is gathered for the first time, when torch has no such attribute."""
    whole: Tensor | None = _later(param, "_unsharded_param")
    return whole


def fsdp_after_gathering(param: Any, then: Callable[[Tensor, nn.Parameter], None]) -> None:
    """Call `then` with this rank's part and the whole parameter, each time that the whole has been made."""
    gather = _of(param, "init_unsharded_param")

    def gather_and_tell() -> None:
        gather()
        whole = fsdp_whole(param)
        assert isinstance(whole, nn.Parameter)
        then(fsdp_part(param), whole)

    _put(param, "init_unsharded_param", gather_and_tell)


def fsdp_shown(param: Any) -> Any:
    """What a module has in a parameter's place: the part, or the whole."""
    info = _of(param, "_module_info")
    return info.module._parameters[info.param_name]


def fsdp_show(param: Any, value: Any) -> None:
    """Put something in a parameter's place, in all modules that have it."""
    _of(param, "_setattr_on_modules")(value)


def module_wrap_classes(policy: Any) -> Iterable[type[nn.Module]]:
    """The classes of a `torch.distributed.fsdp.wrap.ModuleWrapPolicy`."""
    classes: Iterable[type[nn.Module]] = _of(policy, "_module_classes")
    return classes


# ---- FullyShardedDataParallel, which ColossalAI's `torch_fsdp` plugin wraps a model in


def flat_place(model: Any, param: Any) -> tuple[Any, torch.Size]:
    """Where a parameter lies in the flat one of its model, and its shape."""
    flat = _of(model, "_flat_param")
    index = next(index for index, each in enumerate(_of(flat, "_params")) if each is param)
    return _of(flat, "_shard_param_infos")[index], _of(flat, "_shapes")[index]


def flat_let_go(model: Any) -> None:
    """Free the whole of a flat parameter that a forward pass without a backward pass leaves behind."""
    handle = _of(model, "_handle")
    if hasattr(handle.flat_param, "_local_shard"):  # not before the first forward pass
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()


# ---- CUDA where there is none

# [Note: tables of C++] torch lets Python be the device guard of a backend of its own (PrivateUse1), and nothing else
# answers for CUDA from Python: names of CUDA are refused for that backend, and autograd asks C++. So two tables are
# changed for a while: the list of device guards, and the virtual functions of the object that says whether CUDA is
# there. Where a function stands in the latter is read from the headers that torch is installed with, and compared with
# the size that the table has in the library; whatever does not fit is refused before anything is written.

_HOOKS = ("AcceleratorHooksInterface", "CUDAHooksInterface")
_GUARDS_SYMBOL = "_ZN3c104impl26device_guard_impl_registryE"
_TABLE_SYMBOL = "_ZTVN2at18CUDAHooksInterfaceE"
_WORD = ctypes.sizeof(ctypes.c_void_p)


@contextmanager
def python_guards_cuda() -> Iterator[None]:
    """A device guard of which nothing happens takes the place of that of CUDA, until the block ends."""
    kinds = _find("torch._C._autograd.DeviceType")

    class Guard(_find("torch._C._acc.DeviceGuard")):  # type: ignore[misc]
        def type_(self) -> Any:
            return kinds.CUDA

    guards = device_guards()
    cuda, private = int(kinds.CUDA), int(kinds.PrivateUse1)
    if not cuda < private < len(guards):
        raise _cannot_simulate(f"its list of device guards has {len(guards)} places")
    before = guards[cuda], guards[private]
    guard = Guard()
    _find("torch._C._acc.register_python_privateuseone_device_guard")(guard)
    guards[cuda], guards[private] = guards[private], before[1]
    try:
        yield
    finally:
        guards[cuda] = before[0]


@contextmanager
def cuda_never_initialized() -> Iterator[None]:
    """`torch.cuda` does not load a driver until the block ends."""
    with _put_meanwhile(torch.cuda, "_lazy_init", lambda: None):
        yield


def device_guards() -> Any:
    """torch's list of device guards, by the number of the kind of device."""
    address, size = _table("c10", _GUARDS_SYMBOL)
    return (ctypes.c_void_p * (size // _WORD)).from_address(address)


@contextmanager
def cuda_hooks_say_yes() -> Iterator[None]:
    """torch's C++ side takes CUDA for there, until the block ends."""
    places, count = cuda_hooks_layout()
    find = getattr(_library("torch_cpu"), "_ZN2at6detail12getCUDAHooksEv", None)
    if find is None:
        raise _cannot_simulate("libtorch_cpu has no at::detail::getCUDAHooks")
    find.restype = ctypes.c_void_p
    shown = ctypes.c_void_p.from_address(find())
    before = shown.value
    assert before is not None
    # Before the functions are two words about the class of the object.
    words = (ctypes.c_void_p * (2 + count)).from_buffer_copy(
        (ctypes.c_void_p * (2 + count)).from_address(before - 2 * _WORD)
    )
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda this: True)
    for place in places:
        words[2 + place] = ctypes.cast(yes, ctypes.c_void_p).value
    shown.value = ctypes.addressof(words) + 2 * _WORD
    try:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != "cuda":
            raise _cannot_simulate("it still finds no CUDA")
        yield
    finally:
        shown.value = before


def cuda_hooks_layout() -> tuple[list[int], int]:
    """Where `isBuilt`, `isAvailable` and `hasPrimaryContext` stand in the table of CUDA's hooks, and its length."""
    folder = Path(torch.__file__).parent / "include" / "ATen" / "detail"
    functions: list[str] = []
    for name in _HOOKS:
        try:
            text = (folder / f"{name}.h").read_text(encoding="utf-8")
        except OSError as error:
            raise _cannot_simulate(f"{error.filename}: {error.strerror}") from None
        functions += [each for each in _virtual_functions(text) if each not in functions]
    wanted = ("isBuilt", "isAvailable", "hasPrimaryContext")
    missing = [name for name in wanted if name not in functions]
    if missing:
        raise _cannot_simulate(f"its CUDA hooks have no {', '.join(missing)}")
    count = 2 + len(functions)  # a class with a virtual destructor has two entries for it
    _, size = _table("torch_cpu", _TABLE_SYMBOL)
    if size != (2 + count) * _WORD:
        raise _cannot_simulate(
            f"its table of CUDA hooks has {size // _WORD - 2} functions, its headers declare {count}"
        )
    return [2 + functions.index(name) for name in wanted], count


def _virtual_functions(header: str) -> list[str]:
    """The names of the virtual functions that a class brings, as they stand."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
    if torch.version.hip is None:
        code = re.sub(r"#ifdef USE_ROCM\n.*?#endif", "", code, flags=re.DOTALL)
    return re.findall(r"\bvirtual\b[^~;{}()]*?(\w+)\s*\(", code)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
    except ValueError:
        raise _cannot_simulate(f"its libraries have no {symbol}") from None


def _table(library: str, symbol: str) -> tuple[int, int]:
    """Where a table of one of torch's libraries lies, and its bytes; none is changed whose size is not known."""
    address = _address(_library(library), symbol)
    size = _size_of_symbol(address)
    if size is None:
        raise _cannot_simulate(f"this system does not say how large {symbol} is")
    return address, size


def _size_of_symbol(address: int) -> int | None:
    """The bytes that a symbol of a loaded library has; None where the system does not say."""

    class Found(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("at", ctypes.c_void_p),
        )

    class Symbol(ctypes.Structure):  # of ELF with 64 bits
        _fields_ = (
            ("name", ctypes.c_uint32),
            ("kind", ctypes.c_uint32),
            ("value", ctypes.c_uint64),
            ("size", ctypes.c_uint64),
        )

    ask = getattr(ctypes.CDLL(None), "dladdr1", None)
    if ask is None or _WORD != 8:
        return None
    found, symbol = Found(), ctypes.POINTER(Symbol)()
    if not ask(ctypes.c_void_p(address), ctypes.byref(found), ctypes.byref(symbol), 1) or found.at != address:
        raise _cannot_simulate("its tables have no symbols")
    return int(symbol.contents.size)


def _library(name: str) -> ctypes.CDLL:
    ending = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.{ending}"))


def _cannot_simulate(reason: str) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        "torch",
        torch.__version__,
        f"a CUDA that can be simulated without a GPU ({reason})",
        f"{CHECKED[0]}–{CHECKED[-1]}",
        "Plan on a machine with a GPU, or for device: cpu.",
    )


# ---- What is there

_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE, _CONTEXT = f"{_FSDP}._fsdp_state.FSDPState", f"{_FSDP}._fsdp_state.FSDPStateContext"
_GROUP, _PARAM = f"{_FSDP}._fsdp_param_group.FSDPParamGroup", f"{_FSDP}._fsdp_param.FSDPParam"
_FLAT = "torch.distributed.fsdp._flat_param"
_MODULE = "torch.nn.Module"

ATTRIBUTES = (
    Internal("torch.UntypedStorage._cdata", "which storages are the same"),
    Internal("torch.Tensor._version", "which offloaded activations are the same"),
    Internal("torch.Tensor._base", "outputs that are views"),
    Internal("torch._subclasses.fake_tensor.FakeTensor.fake_device", _FAKE),
    Internal("torch._subclasses.fake_tensor.init_gpu_context", "CUDA where there is none"),
    Internal("torch._ops.OpOverload._schema", _SEEN),
    Internal("torch._ops.OpOverload._overloadpacket", _SEEN),
    Internal("torch._ops.OpOverload._overloadname", _SEEN),
    Internal("torch._library.custom_ops.OPDEFS", "what Plait's own operations do inside, in a plan"),
    Internal("torch._library.custom_ops.CustomOpDef._init_fn", "what Plait's own operations do inside, in a plan"),
    Internal("torch._C._current_autograd_node", "which module computes in the backward pass, in a profile"),
    Internal("torch._C._current_graph_task_id", "whether a plan sees a backward pass"),
    Internal("torch.autograd._get_sequence_nr", "which module computes in the backward pass, in a profile"),
    Internal("torch.autograd.graph.Node._sequence_nr", "which module computes in the backward pass, in a profile"),
    Internal("torch._C._profiler._ExperimentalConfig", "profiles of all threads"),
    Internal("torch.ops.aten._fused_rms_norm", "CUDA where there is none"),
    Internal("torch.ops.aten._fused_rms_norm_backward", "CUDA where there is none"),
    Internal("torch.library.Library._destroy", "CUDA where there is none"),
    Internal("torch.cuda._lazy_init", "CUDA where there is none"),
    Internal("torch._C._acc.DeviceGuard", "CUDA where there is none"),
    Internal("torch._C._acc.register_python_privateuseone_device_guard", "CUDA where there is none"),
    Internal("torch._C._autograd.DeviceType", "CUDA where there is none"),
    Internal("torch.nn.init._no_grad_trunc_normal_", "initial values that are drawn again"),
    Internal(f"{_MODULE}._apply", _FAKE),
    Internal(f"{_MODULE}._forward_pre_hooks", "layers that may be taken together"),
    Internal(f"{_MODULE}._forward_hooks", "layers that may be taken together"),
    Internal(f"{_MODULE}._backward_pre_hooks", "layers that may be taken together"),
    Internal(f"{_MODULE}._backward_hooks", "layers that may be taken together"),
    Internal("torch.Tensor._backward_hooks", "gradient hooks that a constructor has put on parameters"),
    Internal("torch.Tensor._post_accumulate_grad_hooks", "gradient hooks that a constructor has put on parameters"),
    Internal("torch.nn.modules.module._has_any_global_hook", "layers that may be taken together"),
    Internal(f"{_MODULE}._compiled_call_impl", "compiling that is undone"),
    Internal(f"{_MODULE}._non_persistent_buffers_set", "buffers that are not saved"),
    Internal("torch._dynamo.eval_frame.OptimizedModule._orig_mod", "Accelerate's extract_model_from_parallel"),
    Internal("torch.optim.Optimizer._optimizer_step_pre_hooks", "an optimizer's step without torch's wrapper"),
    Internal("torch.optim.Optimizer._optimizer_step_post_hooks", "an optimizer's step without torch's wrapper"),
    Internal("torch.optim.lr_scheduler.LRScheduler._opt_called", "schedules of torch that would warn"),
    Internal("torch.optim.lr_scheduler.LRScheduler._step_count", "Accelerate's schedules"),
    Internal("torch.utils.data.RandomSampler._num_samples", "Accelerate's samplers"),
    Internal("torch.distributed.distributed_c10d._resolve_process_group", "operations that name their group"),
    Internal("torch.distributed.distributed_c10d._world", "operations that name their group"),
    Internal("torch.distributed.device_mesh.DeviceMesh._flatten", "several axes as one"),
    Internal("torch.distributed.device_mesh.DeviceMesh._concatenate", "hybrid sharding"),
    Internal("torch._C._distributed_c10d._dump_fr_trace_json", "the last collective of a rank that hangs"),
    Internal("torch._C._distributed_c10d._dump_nccl_trace_json", "the same, of builds with NCCL", "CUDA builds"),
    Internal("torch._C._accelerator_setAllocatorSettings", "segments of GPU memory that grow"),
    Internal("torch._inductor.config._micro_pipeline_tp", "async tensor parallelism"),
    Internal("torch.distributed._symmetric_memory.enable_symm_mem_for_group", "async tensor parallelism", "2.11, 2.12"),
    Internal("torch.distributed.tensor._dtensor_spec.DTensorSpec", "DTensors on the host"),
    Internal("torch.distributed.tensor._dtensor_spec.TensorMeta", "DTensors on the host"),
    Internal("torch.distributed.tensor.DTensor._local_tensor", "whose memory it is, in a plan"),
    Internal(
        "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
        "memory that DTensor's questions would take, in a plan",
    ),
    Internal("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "sharded modules"),
    Internal(f"{_STATE}._fsdp_param_groups", "sharded modules", "2.12–2.15"),
    Internal(f"{_STATE}._fsdp_param_group", "sharded modules"),
    Internal(f"{_STATE}._lazy_init", "parts of a sharded model that are called by themselves"),
    Internal(f"{_STATE}._is_root", "losses of parts of a sharded model"),
    Internal(f"{_STATE}._training_state", "parts of a sharded model that are called by themselves"),
    Internal(f"{_STATE}._state_ctx", "backward passes within a forward pass"),
    Internal(f"{_CONTEXT}.iter_forward_root", "backward passes within a forward pass"),
    Internal(f"{_CONTEXT}.all_states", "backward passes within a forward pass"),
    Internal(f"{_CONTEXT}.post_backward_final_callback_queued", "backward passes within a forward pass"),
    Internal(f"{_STATE}._pre_backward", "backward passes within a forward pass"),
    Internal(f"{_STATE}._register_pre_backward_hook", "outputs of sharded modules that are changed in place"),
    Internal(f"{_STATE}._root_post_backward_final_callback", "backward passes within a forward pass"),
    Internal(f"{_STATE}._register_root_post_backward_final_callback", "losses of parts of a sharded model"),
    Internal(f"{_GROUP}._training_state", "backward passes within a forward pass"),
    Internal(f"{_GROUP}._reduce_scatter_param_indices", "gradients that are streamed to the host", "2.15"),
    Internal(f"{_GROUP}._all_gather_result", "weights that were gathered ahead"),
    Internal(f"{_GROUP}._module_to_pre_save_state_dict_hook_handle", "weights that stay gathered"),
    Internal(f"{_GROUP}._module_to_pre_load_state_dict_hook_handle", "weights that stay gathered"),
    Internal(f"{_GROUP}.fsdp_params", "sharded modules"),
    Internal(f"{_GROUP}.comm_ctx", "offloaded weights"),
    Internal(f"{_GROUP}.is_sharded", "weights that stay gathered"),
    Internal(f"{_GROUP}.is_unsharded", "parts of a sharded model that are called by themselves"),
    Internal(f"{_GROUP}.unshard", "parts of a sharded model that are called by themselves, offloaded weights"),
    Internal(f"{_GROUP}.wait_for_unshard", "parts of a sharded model that are called by themselves, offloaded weights"),
    Internal(f"{_GROUP}.reshard", "parts of a sharded model that are called by themselves"),
    Internal(f"{_GROUP}.reduce_grads", "gradients of unused weights"),
    Internal(f"{_GROUP}.post_backward", "gradients of unused weights, backward passes within a forward pass"),
    Internal(f"{_PARAM}.sharded_param", "sharded modules"),
    Internal(f"{_PARAM}.sharded_size", "gradients that are streamed to the host"),
    Internal(f"{_PARAM}.padded_sharded_param_size", "gradients that are streamed to the host"),
    Internal(f"{_PARAM}.init_unsharded_param", "attributes of weights, once they are gathered"),
    Internal(f"{_PARAM}.unsharded_param", "gradients of unused weights"),
    Internal(f"{_PARAM}.unsharded_accumulated_grad", "gradients of unused weights"),
    Internal(f"{_PARAM}.reduce_dtype", "gradients of unused weights"),
    Internal(f"{_PARAM}.all_gather_outputs", "what a gathered weight takes, in a plan"),
    Internal(f"{_PARAM}._post_load_hook_handle", "weights that stay gathered"),
    Internal(f"{_PARAM}._module_info", "weights that stay gathered"),
    Internal(f"{_PARAM}._setattr_on_modules", "weights that stay gathered"),
    Internal(f"{_PARAM}._sharded_param_data", "offloaded weights"),
    Internal(f"{_PARAM}.reset_sharded_param", "offloaded weights"),
    Internal(f"{_FSDP}._fsdp_param_group.FSDPCommContext.all_gather_copy_in_stream", "offloaded weights"),
    Internal(f"{_PARAM}._unsharded_param", "gradients of unused weights"),
    Internal("torch.distributed.fsdp.wrap.ModuleWrapPolicy._module_classes", "MMEngine's FSDP strategy"),
    Internal("torch.distributed.fsdp.FullyShardedDataParallel._flat_param", "ColossalAI's torch_fsdp"),
    Internal("torch.distributed.fsdp.FullyShardedDataParallel._handle", "ColossalAI's torch_fsdp"),
    Internal(f"{_FLAT}.FlatParameter._params", "ColossalAI's torch_fsdp"),
    Internal(f"{_FLAT}.FlatParameter._shard_param_infos", "ColossalAI's torch_fsdp"),
    Internal(f"{_FLAT}.FlatParameter._shapes", "ColossalAI's torch_fsdp"),
    Internal(f"{_FLAT}.FlatParameter._local_shard", "ColossalAI's torch_fsdp"),
)
"""What the functions above touch."""


def missing_internals() -> list[Internal]:
    """Those that this torch does not have, and that every release in `CHECKED` has."""
    return [each for each in needed_internals() if not _is_there(each.path)]


def needed_internals() -> list[Internal]:
    """Those that every release in `CHECKED` has."""
    return [each for each in (*NAMES.values(), *ATTRIBUTES) if not each.versions]


def _is_there(path: str) -> bool:
    try:
        _find(path)
    except UnsupportedVersionError:
        owner, _, name = path.rpartition(".")
        try:
            kind = _find(owner)
        except UnsupportedVersionError:
            return False
        return isinstance(kind, type) and _mentions(kind, name)
    return True


@cache
def _mentions(kind: type, name: str) -> bool:
    """Whether a class has an attribute, or its methods, or those of its module, give one to its objects."""
    if hasattr(kind, name):
        return True
    scopes = [vars(each) for each in kind.__mro__] + [vars(sys.modules[kind.__module__])]
    if any(name in scope.get("__annotations__", ()) for scope in scopes):
        return True
    pending = [code for scope in scopes for each in scope.values() for code in _codes(each)]
    while pending:
        code = pending.pop()
        if name in code.co_names or name in code.co_consts:
            return True
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return False


def _codes(value: Any) -> Iterator[CodeType]:
    for each in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
        code = getattr(getattr(each, "__wrapped__", each), "__code__", None)
        if isinstance(code, CodeType):
            yield code
