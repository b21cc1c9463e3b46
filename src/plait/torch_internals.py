"""The only module of Plait that uses private names of torch.

Releases of torch add, rename and remove private names. Each one that Plait uses is listed here with its purpose;
`CHECKED` are the releases with which all of them were tested (`make matrix`). Differences between releases are handled
here.

[Note: private names are refused by name] The first use of a name that a release does not have raises an
`UnsupportedVersionError` with that name. Without this check, replacing a method that torch has removed would silently
have no effect. `plait doctor` lists missing names before anything needs them.

There are three groups:
- functions and classes of modules (`NAMES`): imported from here, and resolved on first use, since some of their modules
  take seconds to import;
- attributes of torch's objects (`ATTRIBUTES`): read and replaced by the functions below;
- the tables in torch's C++ libraries with which CUDA is simulated: see [Note: tables of C++].
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

    # Names that other files import from here. `_names` parses these lines; the comment above a name is its purpose.

    # the update of many tensors in a few kernels
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
    # products of 8-bit matrices
    scaled_mm = torch._scaled_mm
    # tensors inside nested tuples, lists and mappings
    TreeSpec = torch.utils._pytree.TreeSpec
    tree_flatten = torch.utils._pytree.tree_flatten
    tree_leaves = torch.utils._pytree.tree_leaves
    tree_map = torch.utils._pytree.tree_map
    tree_map_only = torch.utils._pytree.tree_map_only
    tree_unflatten = torch.utils._pytree.tree_unflatten
    # seeing every operation while a block runs
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
    disable_current_modes = torch.utils._python_dispatch._disable_current_modes
    OpOverload = torch._ops.OpOverload
    HigherOrderOperator = torch._ops.HigherOrderOperator
    # tensors without values, on which plans run
    FakeTensor = torch._subclasses.fake_tensor.FakeTensor
    FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
    unset_fake_temporarily = torch._subclasses.fake_tensor.unset_fake_temporarily
    active_fake_mode = torch._guards.active_fake_mode
    # process groups without ranks
    FakeStore = torch.testing._internal.distributed.fake_pg.FakeStore
    # batch norms of any dimension
    AnyBatchNorm = torch.nn.modules.batchnorm._BatchNorm
    # instance norms of any dimension
    AnyInstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
    # collectives that autograd knows
    functional_collectives = torch.distributed._functional_collectives
    # the two halves of a stage's backward pass
    construct_reverse_graph = torch.distributed.pipelining._backward.construct_reverse_graph
    get_param_groups = torch.distributed.pipelining._backward.get_param_groups
    # DTensor forgets the meshes of a plan
    clear_sharding_prop_cache = torch.distributed.tensor.debug._clear_sharding_prop_cache
    # what torch.compile could not do, and with which backend
    lookup_backend = torch._dynamo.lookup_backend
    # Accelerate's is_compiled_module
    OptimizedModule = torch._dynamo.eval_frame.OptimizedModule
    # what torch.compile could not do, and with which backend
    InvalidBackend = torch._dynamo.exc.InvalidBackend
    TorchDynamoException = torch._dynamo.exc.TorchDynamoException
    # plans of compiled modules
    aot_function = torch._functorch.aot_autograd.aot_function
    min_cut_rematerialization_partition = torch._functorch.partitioners.min_cut_rematerialization_partition
    select_decomp_table = torch._inductor.decomposition.select_decomp_table
    # attention by a kernel that was chosen, with the numbers that ring attention adds up
    aten_flash = torch.ops.aten._scaled_dot_product_flash_attention
    aten_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    aten_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    aten_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    aten_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    aten_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    aten_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    # what an operation takes, in a plan
    aten_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    aten_plain_flash_backward = torch.ops.aten._flash_attention_backward
    aten_plain_efficient_backward = torch.ops.aten._efficient_attention_backward
    # products that recomputing keeps
    aten_scaled_mm = torch.ops.aten._scaled_mm
    # what an operation takes, in a plan
    aten_grouped_mm = torch.ops.aten._grouped_mm
    # who asks a tensor for its value
    aten_local_scalar_dense = torch.ops.aten._local_scalar_dense
    # what an operation takes, in a plan
    aten_to_copy = torch.ops.aten._to_copy
    aten_unsafe_view = torch.ops.aten._unsafe_view
    aten_unsafe_index_put = torch.ops.aten._unsafe_index_put

CHECKED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The releases of torch with which every name was tested."""


class Internal(NamedTuple):
    """A private name of torch."""

    path: str
    """The dotted path; for an attribute of an object, that of its class and the attribute."""
    purpose: str
    versions: str = ""
    """The releases that have it; empty if all of `CHECKED` do."""


_DISPATCH = "seeing every operation while a block runs"
_FAKE = "tensors without values, on which plans run"


def _names() -> dict[str, Internal]:
    """Return the aliases of the block `if TYPE_CHECKING` above, with their paths and purposes, by parsing this file."""
    source = Path(__file__).read_text(encoding="utf-8")
    names, purpose = {}, ""
    for line in source.partition("\nif TYPE_CHECKING:\n")[2].partition("\n\nCHECKED")[0].splitlines():
        if line.startswith("    # "):
            purpose = line.removeprefix("    # ")
        elif match := re.fullmatch(r"    (\w+) = ([\w.]+)", line):
            names[match[1]] = Internal(match[2], purpose)
    return names


NAMES = _names()
"""Name that other files import from here → the private name of torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, _resolve(NAMES[name].path))


def _refusal(path: str) -> UnsupportedVersionError:
    return UnsupportedVersionError("torch", torch.__version__, path, f"{CHECKED[0]}–{CHECKED[-1]}")


@cache
def _resolve(path: str) -> Any:
    """Return the object at a dotted path; raise `UnsupportedVersionError` if this torch does not have it."""
    value: Any = None
    names = path.split(".")
    for end, name in enumerate(names, 1):
        if hasattr(value, name):
            value = getattr(value, name)
            continue
        try:
            value = import_module(".".join(names[:end]))
        except ImportError:
            raise _refusal(path) from None
    return value


def _get(owner: Any, name: str) -> Any:
    """Return an attribute of one of torch's objects; raise `UnsupportedVersionError` if it is missing."""
    try:
        return getattr(owner, name)
    except AttributeError:
        cls = owner if isinstance(owner, type) else type(owner)
        raise _refusal(f"{cls.__module__}.{cls.__qualname__}.{name}") from None


def _get_later(owner: Any, name: str) -> Any:
    """Return an attribute that torch sets some time after construction; None before that."""
    value = getattr(owner, name, None)
    if value is None and not _class_has_or_sets(owner.__class__, name):
        raise _refusal(f"{type(owner).__module__}.{type(owner).__qualname__}.{name}")
    return value


def _set(owner: Any, name: str, value: Any) -> None:
    """Replace an existing attribute of one of torch's objects."""
    _get(owner, name)
    setattr(owner, name, value)


@contextmanager
def _set_meanwhile(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = _get(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---- Storages and tensors


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """Return a number that is unique among the storages alive; `data_ptr` is 0 for all fake tensors."""
    storage = of if isinstance(of, torch.UntypedStorage) else of.untyped_storage()
    return int(_get(storage, "_cdata"))


def version_of(tensor: Tensor) -> int:
    """Return autograd's version counter of a tensor: how often it was written to in place."""
    return int(_get(tensor, "_version"))


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats a tensor as a view of another."""
    return _get(tensor, "_base") is not None


# ---- Fake tensors


def has_values(tensor: object) -> bool:
    """Return whether a tensor has values: it is not a fake tensor of a plan. Every check for fake tensors asks here."""
    return not isinstance(tensor, _Fake)


_Fake = _resolve("torch._subclasses.fake_tensor.FakeTensor")  # loaded with torch itself


def claimed_device(tensor: Tensor) -> torch.device:
    """Return the device that a fake tensor claims to be on, without dispatching an operation."""
    if has_values(tensor):
        return tensor.device
    device: torch.device = _get(tensor, "fake_device")
    return device


@contextmanager
def no_gpu_context_for_fake_tensors() -> Iterator[None]:
    """Within the block, fake tensors on CUDA do not initialize a real CUDA context."""
    with _set_meanwhile(_resolve("torch._subclasses.fake_tensor"), "init_gpu_context", lambda device: None):
        yield


# ---- Operations


def schema_of(func: Any) -> Any:
    """Return the schema of an operation, with its `name`, `arguments` and `is_mutable`."""
    return _get(func, "_schema")


def has_schema(func: Any) -> bool:
    """Whether something is an operation with a signature."""
    return hasattr(func, "_schema")


def packet_of(func: Any) -> Any:
    """Return the overload packet of an operation."""
    return _get(func, "_overloadpacket")


def overload_of(func: Any) -> str:
    """Return the name of an operation's overload."""
    return str(_get(func, "_overloadname"))


def body_of_custom_op(func: Any) -> Callable[..., Any] | None:
    """Return the Python function behind a `torch.library.custom_op`; None for other operations."""
    definition = _resolve("torch._library.custom_ops.OPDEFS").get(schema_of(func).name)
    return None if definition is None else _get(definition, "_init_fn")


@cache
def _operation_interceptor() -> Any:
    class OperationInterceptor(_resolve("torch.utils._python_dispatch.TorchDispatchMode")):  # type: ignore[misc]
        def __init__(self, run: Callable[..., Any]) -> None:
            super().__init__()
            self._run = run

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # No code is compiled under this mode, and returning True would import dynamo ([Note: dynamo is loaded
            # late], `plait/optim/optimizers.py`).
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._run(func, args, kwargs or {})

    return OperationInterceptor


def intercept_operations(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Return a context in which `run(func, args, kwargs)` is called for every operation, and returns its result.

    It must not be used around compiled code.
    """
    mode: AbstractContextManager[Any] = _operation_interceptor()(run)
    return mode


def current_autograd_node() -> Any:
    """Return the autograd node that the backward pass runs now; None outside of backward passes."""
    return _resolve("torch._C._current_autograd_node")()


def in_backward_pass() -> bool:
    """Whether autograd runs a backward pass now."""
    return bool(_resolve("torch._C._current_graph_task_id")() != -1)


def next_sequence_number() -> int:
    """Return the sequence number of the next autograd node."""
    return int(_resolve("torch.autograd._get_sequence_nr")())


def sequence_number(node: Any) -> int:
    """Return the sequence number of an autograd node."""
    return int(_get(node, "_sequence_nr")())


def profile_every_thread() -> Any:
    """Return the `experimental_config` of a profiler that records all threads."""
    return _resolve("torch._C._profiler._ExperimentalConfig")(profile_all_threads=True)


FUSED_ON_CUDA = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
"""Operations of aten that a CUDA build has kernels for, and a CPU build decomposes."""


@contextmanager
def kernels_registered_for_cuda(names: Iterable[str], kernel: Callable[..., Any]) -> Iterator[None]:
    """Within the block, `kernel` is the CUDA kernel of these operations of aten."""
    library: Any = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    try:
        for name in names:
            library.impl(name, kernel)
        yield
    finally:
        _get(library, "_destroy")()


def name_of_truncated_normal() -> str:
    """Return the name of the function of `torch.nn.init` that implements `trunc_normal_`."""
    name = "_no_grad_trunc_normal_"
    _get(nn.init, name)
    return name


# ---- Modules


def forward_hooks(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of forward pre-hooks and forward hooks of a module."""
    return len(_get(module, "_forward_pre_hooks")), len(_get(module, "_forward_hooks"))


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(_get(module, name) for name in names)


def gradient_hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """Return a tensor's gradient hooks, of `register_hook` and `register_post_accumulate_grad_hook`."""
    registered = (
        _get(tensor, "_backward_hooks"),
        _get(tensor, "_post_accumulate_grad_hooks"),
    )
    return [hook for hooks in registered for hook in (hooks or {}).values()]


def any_global_hook() -> bool:
    """Whether hooks are registered for all modules."""
    return bool(_resolve("torch.nn.modules.module._has_any_global_hook")())


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled call that `Module.compile` set; None for a module that is not compiled."""
    return _get(module, "_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Set the function that is called in place of the module's own call; None undoes `Module.compile`."""
    _set(module, "_compiled_call_impl", call)


@contextmanager
def compiled_call_set(module: nn.Module, call: Any) -> Iterator[None]:
    """Apply `set_compiled_call` within the block."""
    with _set_meanwhile(module, "_compiled_call_impl", call):
        yield


def original_module_of(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given."""
    inner: nn.Module = _get(module, "_orig_mod")
    return inner


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers of one module that `state_dict` leaves out."""
    names: set[str] = _get(module, "_non_persistent_buffers_set")
    return names


@contextmanager
def module_apply_replaced(apply: Callable[..., nn.Module]) -> Iterator[None]:
    """Within the block, `apply(module, change, recurse)` replaces `Module._apply`, on which `Module.to` is built."""
    with _set_meanwhile(nn.Module, "_apply", apply):
        yield


# ---- Optimizers, schedules, samplers


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has step hooks."""
    return bool(_get(optimizer, "_optimizer_step_pre_hooks") or _get(optimizer, "_optimizer_step_post_hooks"))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as stepped, so that torch's schedulers do not warn that they step before it."""
    setattr(optimizer, "_opt_called", True)  # noqa: B010  # torch sets it on the object, too


def schedule_steps(schedule: Any) -> int | None:
    """Return how often a scheduler of torch has stepped; None for a scheduler of another library without a count."""
    if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
        return int(_get(schedule, "_step_count"))
    steps: int | None = getattr(schedule, "_step_count", None)
    return steps


def count_schedule_step(schedule: Any) -> None:
    """Increase a scheduler's step count without a step."""
    schedule._step_count += 1


def sampler_num_samples(sampler: Any) -> int | None:
    """Return `num_samples` as given to a `RandomSampler`; the public property never is None."""
    count: int | None = _get(sampler, "_num_samples")
    return count


# ---- Process groups and meshes


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group of a name."""
    group: dist.ProcessGroup = _resolve("torch.distributed.distributed_c10d._resolve_process_group")(name)
    return group


def is_group_name(name: str) -> bool:
    """Whether a process group has this name."""
    return name in _resolve("torch.distributed.distributed_c10d._world").pg_names.values()


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a one-dimensional mesh over the ranks of a mesh."""
    row: DeviceMesh = _get(mesh, "_flatten")(name)
    return row


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of several."""
    mesh: DeviceMesh = _get(DeviceMesh, "_concatenate")(meshes)
    return mesh


def flight_recorder(device: torch.device) -> Callable[[bool, bool], str] | None:
    """Return the function that dumps torch's flight recorder as JSON; None in builds without one."""
    bindings: Any = getattr(torch._C, "_distributed_c10d", None)
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json") if device.type == "cuda" else ("_dump_fr_trace_json",)
    functions = (getattr(bindings, name, None) for name in names)
    return next((function for function in functions if function is not None), None)


def set_allocator_settings(settings: str) -> None:
    """Change the settings of `PYTORCH_ALLOC_CONF`, which torch reads only once."""
    _resolve("torch._C._accelerator_setAllocatorSettings")(settings)


def enable_async_tensor_parallel(group_name: str) -> None:
    """Turn on async tensor parallelism for code that inductor compiles from now on."""
    _set(_resolve("torch._inductor.config"), "_micro_pipeline_tp", True)
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 13):  # later ones do so themselves
        _resolve("torch.distributed._symmetric_memory.enable_symm_mem_for_group")(group_name)


# ---- DTensor; see [Note: DTensor is loaded late], `plait/distributed/dtensor.py`


def dtensor_of(local: Tensor, whole: Any) -> Any:
    """Return a local tensor as a DTensor with the mesh and placements of `whole`, on the device where it is."""
    spec = "torch.distributed.tensor._dtensor_spec"
    meta = _resolve(f"{spec}.TensorMeta")(whole.shape, whole.stride(), local.dtype)
    spread = _resolve(f"{spec}.DTensorSpec")(whole.device_mesh, whole.placements, meta)
    return _resolve("torch.distributed.tensor.DTensor")(local, spread, requires_grad=False)


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's local tensor of a DTensor, without an operation that autograd or a plan would see."""
    local: Tensor = _get(tensor, "_local_tensor")
    return local


@contextmanager
def wrap_tensor_meta_propagation(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within the block, `around` wraps DTensor's method that computes output shapes, with unsharded tensors."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        yield
        return
    name = "_propagate_tensor_meta_non_cached"
    with _set_meanwhile(module.ShardingPropagator, name, around(_get(module.ShardingPropagator, name))):
        yield


# ---- fully_shard


def fsdp_state(module: object) -> Any:
    """Return the `FSDPState` of a module; None for a module that `fully_shard` did not wrap."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return _get(module, "_get_fsdp_state")()


def fsdp_param_groups(state: Any) -> list[Any]:
    """Return the `FSDPParamGroup`s of a state; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = _get(state, "_fsdp_param_group")
        groups = [] if group is None else [group]
    return list(groups)


def fsdp_param_group(module: object) -> Any:
    """Return the `FSDPParamGroup` of a module; None if it has no parameters of its own, or is not sharded.

    A module has several groups only if its parameters are on different meshes, which does not happen in Plait.
    """
    state = fsdp_state(module)
    groups = [] if state is None else fsdp_param_groups(state)
    assert len(groups) <= 1, "the parameters of a wrapped module lie on one mesh"
    return groups[0] if groups else None


def fsdp_params(group: Any) -> list[Any]:
    """Return the `FSDPParam`s of a group."""
    return list(_get(group, "fsdp_params"))


def fsdp_sharded_param(param: Any) -> nn.Parameter:
    """Return the sharded parameter, a DTensor."""
    shard: nn.Parameter = _get(param, "sharded_param")
    return shard


def fsdp_sharded_sizes(param: Any) -> tuple[torch.Size, int]:
    """Return the shape of this rank's shard, and the elements of the padded shard, equal on all ranks."""
    return _get(param, "sharded_size"), _get(param, "padded_sharded_param_size").numel()


def fsdp_is_unsharded(group: Any) -> bool:
    """Whether the modules hold the unsharded parameters of a group."""
    return bool(_get(group, "is_unsharded"))


def fsdp_is_sharded(group: Any) -> bool:
    """Whether the modules hold the sharded parameters of a group."""
    return bool(_get(group, "is_sharded"))


def fsdp_unshard(group: Any) -> None:
    """All-gather the parameters of a group, and wait for them."""
    _get(group, "unshard")()
    fsdp_wait_for_unshard(group)


def fsdp_wait_for_unshard(group: Any) -> None:
    """Wait for the pending all-gather of a group, and register the unsharded parameters on the modules."""
    _get(group, "wait_for_unshard")()


def fsdp_reshard(group: Any) -> None:
    """Free the unsharded parameters of a group, and register the sharded ones."""
    _get(group, "reshard")()


def fsdp_reduces_grads(group: Any) -> bool:
    """Whether the next backward pass of a group reduce-scatters its gradients."""
    return bool(_get(group, "reduce_grads"))


def fsdp_wrap_unshard(group: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` before the all-gather of a group, and `after` once it has been waited for."""
    unshard, wait_for_unshard = _get(group, "unshard"), _get(group, "wait_for_unshard")

    def wrapped_unshard(async_op: bool = False) -> None:
        before()
        unshard(async_op)

    def wrapped_wait() -> None:
        wait_for_unshard()
        after()

    _set(group, "unshard", wrapped_unshard)
    _set(group, "wait_for_unshard", wrapped_wait)


def fsdp_wrap_post_backward(group: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the group's `post_backward`, which reshards it and reduce-scatters its gradients."""
    _set(group, "post_backward", around(_get(group, "post_backward")))


def fsdp_fill_unused_grads(group: Any) -> None:
    """Set gradients of zeros on the parameters of a group that have none.

    If other parameters accumulate in the reduce dtype, all gradients of the group are moved to that dtype.
    """
    params = [param for param in fsdp_params(group) if fsdp_unsharded_param(param) is not None]
    params = [param for param in params if _get(param, "unsharded_param").requires_grad]
    summed = any(fsdp_unsharded_accumulated_grad(param) is not None for param in params)
    for param in params:
        unsharded = _get(param, "unsharded_param")
        if fsdp_unsharded_accumulated_grad(param) is not None or (unsharded.grad is not None and not summed):
            continue
        grad = torch.zeros_like(unsharded) if unsharded.grad is None else unsharded.grad
        unsharded.grad = None if summed else grad
        _set(param, "unsharded_accumulated_grad", grad.to(_get(param, "reduce_dtype")) if summed else None)


def fsdp_unsharded_accumulated_grad(param: Any) -> Tensor | None:
    """Return the gradient of the unsharded parameter, accumulated over micro-batches; None if there is none."""
    grad: Tensor | None = _get_later(param, "unsharded_accumulated_grad")
    return grad


def fsdp_all_gather_outputs(param: Any) -> list[Tensor]:
    """Return the buffers that a parameter was all-gathered into."""
    return list(_get_later(param, "all_gather_outputs") or ())


def fsdp_lazy_init(module: object) -> None:
    """Do the lazy initialization of a sharded module, as before its first forward pass."""
    _get(fsdp_state(module), "_lazy_init")()


def fsdp_is_root(state: Any) -> bool:
    """Whether a state is that of the FSDP root."""
    return bool(_get(state, "_is_root"))


def fsdp_in_forward_or_backward(state: Any) -> bool:
    """Whether a module is in its forward or backward pass."""
    return bool(_get(state, "_training_state").name != "IDLE")


def fsdp_root_in_forward(state: Any) -> bool:
    """Whether the FSDP root of a state is in its forward pass."""
    return _get(_get(state, "_state_ctx"), "iter_forward_root") is not None


def fsdp_register_pre_backward_hook(state: Any, output: Any) -> None:
    """Have a module all-gather its parameters when the gradient of this output is computed."""
    _get(state, "_register_pre_backward_hook")(output)


def fsdp_wrap_register_pre_backward_hook(
    state: Any, around: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
) -> None:
    """Wrap the method that receives a module's outputs, and registers the pre-backward hook on them."""
    name = "_register_pre_backward_hook"
    _set(state, name, around(_get(state, name)))


def fsdp_wrap_backward_callbacks(
    state: Any,
    begin: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
    end: Callable[[Callable[[], None]], Callable[[], None]],
) -> None:
    """Wrap a module's pre-backward with `begin`, and the root's final callback after the backward pass with `end`."""
    for name, around in (("_pre_backward", begin), ("_root_post_backward_final_callback", end)):
        _set(state, name, around(_get(state, name)))


def fsdp_register_post_backward_final_callback(state: Any) -> Callable[[], None]:
    """Return the function that, called within a backward pass, queues the root's final callback at its end."""
    finish: Callable[[], None] = _get(state, "_register_root_post_backward_final_callback")
    return finish


def fsdp_reset_pre_backward_states(root: Any) -> None:
    """Set the modules in `PRE_BACKWARD` back to `IDLE` for the next backward pass; nothing reshards."""
    context = _get(root, "_state_ctx")
    for state in _get(context, "all_states"):
        for owner in (state, *fsdp_param_groups(state)):
            training_state = _get(owner, "_training_state")
            if training_state.name == "PRE_BACKWARD":
                _set(owner, "_training_state", type(training_state).IDLE)
    _set(context, "post_backward_final_callback_queued", False)


def fsdp_has_all_gather_result(group: Any) -> bool:
    """Whether an all-gather of a group is pending."""
    return _get(group, "_all_gather_result") is not None


def fsdp_state_dict_hooks(group: Any) -> list[Any]:
    """Return the handles of the hooks that reshard a group for `state_dict` and `load_state_dict`."""
    before = ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle")
    handles = [_get(param, "_post_load_hook_handle") for param in fsdp_params(group)]
    return handles + list(chain.from_iterable(_get(group, name).values() for name in before))


def fsdp_params_in_reduce_order(group: Any) -> list[Any]:
    """Return the `FSDPParam`s of a group in the order of the reduce-scatter, which torch 2.15 chooses itself."""
    params = fsdp_params(group)
    return [params[index] for index in getattr(group, "_reduce_scatter_param_indices", range(len(params)))]


def fsdp_accumulates_mixed_dtypes() -> bool:
    """Whether `set_reduce_scatter_unused_params` works if the gradients of a group have several dtypes.

    From torch 2.15 on, micro-batches accumulate in the `.grad` of the unsharded parameter. Before, they accumulated in
    an attribute of its own (`unsharded_accumulated_grad`), in the reduce dtype, beside new gradients in another.
    """
    fsdp_param = _resolve("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam")
    return isinstance(vars(fsdp_param).get("unsharded_accumulated_grad"), property)


def fsdp_defer_reduce(root: Any) -> None:
    """Before the first of several backward passes: defer the reduction of gradients to `fsdp_reduce_deferred`."""
    root.set_is_last_backward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)
    if hasattr(root, "finalize_backward"):  # from torch 2.15 on
        root.set_manual_backward_finalization(True)


def fsdp_reduce_deferred(root: Any) -> None:
    """Reduce the gradients of the backward passes since `fsdp_defer_reduce`, and reshard."""
    if not hasattr(root, "finalize_backward"):
        stage: Any = SimpleNamespace(submod=root)  # torch's method reads only the module of its stage
        _resolve("torch.distributed.pipelining.PipelineStage").perform_reduce_grad(stage, 1)
        return
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    root.finalize_backward()
    root.set_manual_backward_finalization(False)


def fsdp_sharded_param_data(param: Any) -> Tensor:
    """Return the flat buffer of this rank's shard of a parameter, with its padding."""
    data: Tensor = _get(param, "_sharded_param_data")
    return data


def fsdp_disable_reset_sharded_param(param: Any) -> None:
    """Disable torch's check, at lazy initialization, that the sharded parameter is still the tensor it created."""
    _set(param, "reset_sharded_param", lambda: None)


def fsdp_all_gather_copy_in_stream(group: Any) -> Any:
    """Return the stream that copies the shards of a group into the all-gather; None before the first forward pass."""
    return _get_later(_get(group, "comm_ctx"), "all_gather_copy_in_stream")


def fsdp_unsharded_param(param: Any) -> Tensor | None:
    """Return the unsharded parameter; None before the first all-gather, when torch has no such attribute."""
    unsharded: Tensor | None = _get_later(param, "_unsharded_param")
    return unsharded


def fsdp_after_init_unsharded_param(param: Any, then: Callable[[Tensor, nn.Parameter], None]) -> None:
    """Call `then(sharded, unsharded)` each time that an unsharded parameter has been created."""
    init_unsharded = _get(param, "init_unsharded_param")

    def init_and_call() -> None:
        init_unsharded()
        unsharded = fsdp_unsharded_param(param)
        assert isinstance(unsharded, nn.Parameter)
        then(fsdp_sharded_param(param), unsharded)

    _set(param, "init_unsharded_param", init_and_call)


def fsdp_module_param(param: Any) -> Any:
    """Return the parameter that is registered on the module: the sharded or the unsharded one."""
    info = _get(param, "_module_info")
    return info.module._parameters[info.param_name]


def fsdp_set_module_param(param: Any, value: Any) -> None:
    """Register `value` as the parameter, on all modules that share it."""
    _get(param, "_setattr_on_modules")(value)


def module_wrap_classes(policy: Any) -> Iterable[type[nn.Module]]:
    """Return the classes of a `torch.distributed.fsdp.wrap.ModuleWrapPolicy`."""
    classes: Iterable[type[nn.Module]] = _get(policy, "_module_classes")
    return classes


# ---- FullyShardedDataParallel, which ColossalAI's `torch_fsdp` plugin wraps a model in


def flat_param_shard_info(model: Any, param: Any) -> tuple[Any, torch.Size]:
    """Return a parameter's shard info (its range in this rank's part of the model's `FlatParameter`), and its shape."""
    flat = _get(model, "_flat_param")
    index = next(index for index, other in enumerate(_get(flat, "_params")) if other is param)
    return _get(flat, "_shard_param_infos")[index], _get(flat, "_shapes")[index]


def flat_param_reshard(model: Any) -> None:
    """Free the unsharded flat parameter that a forward pass without a backward pass leaves allocated."""
    handle = _get(model, "_handle")
    if hasattr(handle.flat_param, "_local_shard"):  # not before the first forward pass
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()


# ---- Simulated CUDA, on a machine without a GPU

# [Note: tables of C++] torch lets Python implement the device guard of a custom backend (PrivateUse1), but not of CUDA:
# that backend may not be named `cuda`, and autograd calls the C++ functions. So while CUDA is simulated, two tables are
# changed: the registry of device guards, and the virtual function table of the object that reports whether CUDA is
# available. The index of a function in the latter is found in the headers that torch is installed with. The size that
# follows from them is compared with that of the table in the library; a mismatch raises before anything is written.

_HOOKS = ("AcceleratorHooksInterface", "CUDAHooksInterface")
_GUARDS_SYMBOL = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS_SYMBOL = "_ZTVN2at18CUDAHooksInterfaceE"
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


@contextmanager
def cuda_device_guard_replaced() -> Iterator[None]:
    """Within the block, a device guard that does nothing replaces that of CUDA."""
    device_type = _resolve("torch._C._autograd.DeviceType")

    class Guard(_resolve("torch._C._acc.DeviceGuard")):  # type: ignore[misc]
        def type_(self) -> Any:
            return device_type.CUDA

    guards = device_guards()
    cuda, private = int(device_type.CUDA), int(device_type.PrivateUse1)
    if not cuda < private < len(guards):
        raise _cannot_simulate(f"its list of device guards has {len(guards)} places")
    before = guards[cuda], guards[private]
    guard = Guard()
    _resolve("torch._C._acc.register_python_privateuseone_device_guard")(guard)
    guards[cuda], guards[private] = guards[private], before[1]
    try:
        yield
    finally:
        guards[cuda] = before[0]


@contextmanager
def cuda_never_initialized() -> Iterator[None]:
    """Within the block, `torch.cuda` does not load a driver."""
    with _set_meanwhile(torch.cuda, "_lazy_init", lambda: None):
        yield


def device_guards() -> Any:
    """Return torch's registry of device guards, indexed by device type."""
    address, size = _symbol_table("c10", _GUARDS_SYMBOL)
    return (ctypes.c_void_p * (size // _POINTER_BYTES)).from_address(address)


@contextmanager
def cuda_reported_available() -> Iterator[None]:
    """Within the block, torch's C++ side reports CUDA as available."""
    indices, count = cuda_hooks_layout()
    get_hooks = getattr(_library("torch_cpu"), "_ZN2at6detail12getCUDAHooksEv", None)
    if get_hooks is None:
        raise _cannot_simulate("libtorch_cpu has no at::detail::getCUDAHooks")
    get_hooks.restype = ctypes.c_void_p
    pointer = ctypes.c_void_p.from_address(get_hooks())
    before = pointer.value
    assert before is not None
    # In a C++ virtual table, two pointers (the offset to the top and the type information) precede the functions.
    table = (ctypes.c_void_p * (2 + count)).from_buffer_copy(
        (ctypes.c_void_p * (2 + count)).from_address(before - 2 * _POINTER_BYTES)
    )
    always_true = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda this: True)
    for index in indices:
        table[2 + index] = ctypes.cast(always_true, ctypes.c_void_p).value
    pointer.value = ctypes.addressof(table) + 2 * _POINTER_BYTES
    try:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != "cuda":
            raise _cannot_simulate("it still finds no CUDA")
        yield
    finally:
        pointer.value = before


def cuda_hooks_layout() -> tuple[list[int], int]:
    """Return the indices of `isBuilt`, `isAvailable`, `hasPrimaryContext` in the CUDA hooks table, and its length."""
    folder = Path(torch.__file__).parent / "include" / "ATen" / "detail"
    functions: list[str] = []
    for name in _HOOKS:
        try:
            text = (folder / f"{name}.h").read_text(encoding="utf-8")
        except OSError as error:
            raise _cannot_simulate(f"{error.filename}: {error.strerror}") from None
        functions += [function for function in _virtual_functions(text) if function not in functions]
    wanted = ("isBuilt", "isAvailable", "hasPrimaryContext")
    missing = [name for name in wanted if name not in functions]
    if missing:
        raise _cannot_simulate(f"its CUDA hooks have no {', '.join(missing)}")
    count = 2 + len(functions)  # a class with a virtual destructor has two entries for it
    _, size = _symbol_table("torch_cpu", _HOOKS_SYMBOL)
    if size != (2 + count) * _POINTER_BYTES:
        raise _cannot_simulate(
            f"its table of CUDA hooks has {size // _POINTER_BYTES - 2} functions, its headers declare {count}"
        )
    return [2 + functions.index(name) for name in wanted], count


def _virtual_functions(header: str) -> list[str]:
    """Return the names of the virtual functions that a header declares, in order."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
    if torch.version.hip is None:
        code = re.sub(r"#ifdef USE_ROCM\n.*?#endif", "", code, flags=re.DOTALL)
    return re.findall(r"\bvirtual\b[^~;{}()]*?(\w+)\s*\(", code)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, symbol))
    except ValueError:
        raise _cannot_simulate(f"its libraries have no {symbol}") from None


def _symbol_table(library: str, symbol: str) -> tuple[int, int]:
    """Return the address and the size in bytes of a symbol of one of torch's libraries; raise if it is unknown."""
    address = _address(_library(library), symbol)
    size = _size_of_symbol(address)
    if size is None:
        raise _cannot_simulate(f"this system does not say how large {symbol} is")
    return address, size


def _size_of_symbol(address: int) -> int | None:
    """Return the size in bytes of a symbol of a loaded library; None if the system cannot look it up."""

    class SymbolInfo(ctypes.Structure):
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

    dladdr = getattr(ctypes.CDLL(None), "dladdr1", None)
    if dladdr is None or _POINTER_BYTES != 8:
        return None
    info, symbol = SymbolInfo(), ctypes.POINTER(Symbol)()
    if not dladdr(ctypes.c_void_p(address), ctypes.byref(info), ctypes.byref(symbol), 1) or info.at != address:
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


# ---- The list of attributes, and which of them this torch has

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
    Internal("torch._subclasses.fake_tensor.init_gpu_context", "simulated CUDA"),
    Internal("torch._ops.OpOverload._schema", _DISPATCH),
    Internal("torch._ops.OpOverload._overloadpacket", _DISPATCH),
    Internal("torch._ops.OpOverload._overloadname", _DISPATCH),
    Internal("torch._library.custom_ops.OPDEFS", "what Plait's own operations do inside, in a plan"),
    Internal("torch._library.custom_ops.CustomOpDef._init_fn", "what Plait's own operations do inside, in a plan"),
    Internal("torch._C._current_autograd_node", "which module computes in the backward pass, in a profile"),
    Internal("torch._C._current_graph_task_id", "whether a plan sees a backward pass"),
    Internal("torch.autograd._get_sequence_nr", "which module computes in the backward pass, in a profile"),
    Internal("torch.autograd.graph.Node._sequence_nr", "which module computes in the backward pass, in a profile"),
    Internal("torch._C._profiler._ExperimentalConfig", "profiles of all threads"),
    Internal("torch.ops.aten._fused_rms_norm", "simulated CUDA"),
    Internal("torch.ops.aten._fused_rms_norm_backward", "simulated CUDA"),
    Internal("torch.library.Library._destroy", "simulated CUDA"),
    Internal("torch.cuda._lazy_init", "simulated CUDA"),
    Internal("torch._C._acc.DeviceGuard", "simulated CUDA"),
    Internal("torch._C._acc.register_python_privateuseone_device_guard", "simulated CUDA"),
    Internal("torch._C._autograd.DeviceType", "simulated CUDA"),
    Internal("torch.nn.init._no_grad_trunc_normal_", "initial values that are drawn again"),
    Internal(f"{_MODULE}._apply", _FAKE),
    Internal(f"{_MODULE}._forward_pre_hooks", "layers that may be fused"),
    Internal(f"{_MODULE}._forward_hooks", "layers that may be fused"),
    Internal(f"{_MODULE}._backward_pre_hooks", "layers that may be fused"),
    Internal(f"{_MODULE}._backward_hooks", "layers that may be fused"),
    Internal("torch.Tensor._backward_hooks", "gradient hooks that a constructor has put on parameters"),
    Internal("torch.Tensor._post_accumulate_grad_hooks", "gradient hooks that a constructor has put on parameters"),
    Internal("torch.nn.modules.module._has_any_global_hook", "layers that may be fused"),
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
    Internal("torch.distributed.device_mesh.DeviceMesh._flatten", "process groups over several axes"),
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
        "memory of DTensor's shape propagation, in a plan",
    ),
    Internal("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "sharded modules"),
    Internal(f"{_STATE}._fsdp_param_groups", "sharded modules", "2.12–2.15"),
    Internal(f"{_STATE}._fsdp_param_group", "sharded modules"),
    Internal(f"{_STATE}._lazy_init", "submodules of a sharded model that are called directly"),
    Internal(f"{_STATE}._is_root", "losses computed outside of the sharded model"),
    Internal(f"{_STATE}._training_state", "submodules of a sharded model that are called directly"),
    Internal(f"{_STATE}._state_ctx", "double backward"),
    Internal(f"{_CONTEXT}.iter_forward_root", "double backward"),
    Internal(f"{_CONTEXT}.all_states", "double backward"),
    Internal(f"{_CONTEXT}.post_backward_final_callback_queued", "double backward"),
    Internal(f"{_STATE}._pre_backward", "double backward"),
    Internal(f"{_STATE}._register_pre_backward_hook", "outputs of sharded modules that are changed in place"),
    Internal(f"{_STATE}._root_post_backward_final_callback", "double backward"),
    Internal(f"{_STATE}._register_root_post_backward_final_callback", "losses computed outside of the sharded model"),
    Internal(f"{_GROUP}._training_state", "double backward"),
    Internal(f"{_GROUP}._reduce_scatter_param_indices", "gradients that are streamed to the host", "2.15"),
    Internal(f"{_GROUP}._all_gather_result", "prefetched weights"),
    Internal(f"{_GROUP}._module_to_pre_save_state_dict_hook_handle", "weights that stay unsharded"),
    Internal(f"{_GROUP}._module_to_pre_load_state_dict_hook_handle", "weights that stay unsharded"),
    Internal(f"{_GROUP}.fsdp_params", "sharded modules"),
    Internal(f"{_GROUP}.comm_ctx", "offloaded weights"),
    Internal(f"{_GROUP}.is_sharded", "weights that stay unsharded"),
    Internal(f"{_GROUP}.is_unsharded", "submodules of a sharded model that are called directly"),
    Internal(f"{_GROUP}.unshard", "submodules of a sharded model that are called directly, offloaded weights"),
    Internal(f"{_GROUP}.wait_for_unshard", "submodules of a sharded model that are called directly, offloaded weights"),
    Internal(f"{_GROUP}.reshard", "submodules of a sharded model that are called directly"),
    Internal(f"{_GROUP}.reduce_grads", "gradients of unused weights"),
    Internal(f"{_GROUP}.post_backward", "gradients of unused weights, double backward"),
    Internal(f"{_PARAM}.sharded_param", "sharded modules"),
    Internal(f"{_PARAM}.sharded_size", "gradients that are streamed to the host"),
    Internal(f"{_PARAM}.padded_sharded_param_size", "gradients that are streamed to the host"),
    Internal(f"{_PARAM}.init_unsharded_param", "attributes of unsharded parameters"),
    Internal(f"{_PARAM}.unsharded_param", "gradients of unused weights"),
    Internal(f"{_PARAM}.unsharded_accumulated_grad", "gradients of unused weights"),
    Internal(f"{_PARAM}.reduce_dtype", "gradients of unused weights"),
    Internal(f"{_PARAM}.all_gather_outputs", "memory of unsharded parameters, in a plan"),
    Internal(f"{_PARAM}._post_load_hook_handle", "weights that stay unsharded"),
    Internal(f"{_PARAM}._module_info", "weights that stay unsharded"),
    Internal(f"{_PARAM}._setattr_on_modules", "weights that stay unsharded"),
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
"""The attributes that the functions above use."""


def missing_internals() -> list[Internal]:
    """Return the names that this torch does not have, although every release in `CHECKED` has them."""
    return [internal for internal in needed_internals() if not _exists(internal.path)]


def needed_internals() -> list[Internal]:
    """Return the names that every release in `CHECKED` has."""
    return [internal for internal in (*NAMES.values(), *ATTRIBUTES) if not internal.versions]


def _exists(path: str) -> bool:
    try:
        _resolve(path)
    except UnsupportedVersionError:
        owner, _, name = path.rpartition(".")
        try:
            cls = _resolve(owner)
        except UnsupportedVersionError:
            return False
        return isinstance(cls, type) and _class_has_or_sets(cls, name)
    return True


@cache
def _class_has_or_sets(cls: type, name: str) -> bool:
    """Return whether a class has an attribute, or code of its methods or its module names it, as to set it."""
    if hasattr(cls, name):
        return True
    scopes = [vars(base) for base in cls.__mro__] + [vars(sys.modules[cls.__module__])]
    if any(name in scope.get("__annotations__", ()) for scope in scopes):
        return True
    pending = [code for scope in scopes for value in scope.values() for code in _code_objects(value)]
    while pending:
        code = pending.pop()
        if name in code.co_names or name in code.co_consts:
            return True
        pending += [value for value in code.co_consts if isinstance(value, CodeType)]
    return False


def _code_objects(value: Any) -> Iterator[CodeType]:
    for function in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
        code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
        if isinstance(code, CodeType):
            yield code
