"""Memory of model states alone: weights, gradients and optimizer, without activations and everything else.

The functions with long names take DeepSpeed's arguments and print DeepSpeed's table, so that numbers can be compared
with those that people have. Where DeepSpeed's table says GB it means 2³⁰ bytes; the account of bytes for each parameter
is in GB of 10⁹. Neither says what a run will need: `plait plan` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from plait.config import AdamW8bitConfig, Layout, RunConfig


def count_params(model: nn.Module) -> tuple[int, int]:
    """All parameters, shared ones once, and those of the module that has most of its own.

    Parameters are told apart by identity, not by address, so a model on the meta device is counted rightly.
    """
    total = sum(param.numel() for param in model.parameters())
    largest = max((sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()), default=0)
    return total, largest


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of a node's host memory and of one GPU, at ZeRO stage 2."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        # The GPU keeps 16-bit weights; everything in fp32, or one whole model for each process as it starts.
        host = total_params * max(4 * gpus, 16) * additional_buffer_factor
        return int(host), 2 * total_params
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), 2 * total_params + int(18 * total_params / gpus)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of a node's host memory, of one GPU, and of the largest layer, gathered with its gradient, at stage 3."""
    gpus, share = num_nodes * num_gpus_per_node, 1 / num_nodes
    layer = 4 * largest_layer_params
    if not cpu_offload:
        # The host holds a model for each process while it is built: all of it, or a layer at a time with `zero_init`.
        building = largest_layer_params if zero_init else total_params
        host = building * 4 * num_gpus_per_node * additional_buffer_factor
        return int(host), layer + int(18 * total_params / gpus), layer
    states = 18 if cpu_offload_params else 16
    bytes_per_param = states * share if zero_init else max(4 * num_gpus_per_node, states * share)
    on_gpu = 0 if cpu_offload_params else int(2 * total_params / gpus)
    return int(total_params * bytes_per_param * additional_buffer_factor), layer + on_gpu, layer


def zero2_table(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> str:
    """DeepSpeed's table for stage 2."""
    lines = [*_head(num_gpus_per_node, num_nodes), f"SW: Model with {int(total_params / 1e6)}M total params.", _COLUMNS]
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        lines.append(_row(host, gpu, f"offload_optimizer={_device_name(offload)}"))
    return "\n".join(lines)


def zero3_table(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> str:
    """DeepSpeed's table for stage 3."""
    model = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params."
    lines = [*_head(num_gpus_per_node, num_nodes), f"SW: Model with {model}", _COLUMNS]
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            offloads = f"offload_param={_device_name(offload_params)}, offload_optimizer={_device_name(offload)}"
            lines.append(_row(host, gpu, f"{offloads}, zero_init={int(zero_init)}"))
    return "\n".join(lines)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print DeepSpeed's table of a model for stage 2."""
    print(zero2_table(count_params(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print DeepSpeed's table of a number of parameters for stage 2."""
    print(zero2_table(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print DeepSpeed's table of a model for stage 3."""
    print(zero3_table(*count_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print DeepSpeed's table of a number of parameters for stage 3."""
    print(zero3_table(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor))


_COLUMNS = "  per CPU  |  per GPU |   Options"


def _head(gpus: int, nodes: int) -> list[str]:
    node, gpu = "nodes" if nodes > 1 else "node", "GPUs" if gpus > 1 else "GPU"
    title = "Estimated memory needed for params, optim states and gradients for a:"
    return [title, f"HW: Setup with {nodes} {node}, {gpus} {gpu} per node."]


def _row(host: int, gpu: int, options: str) -> str:
    return f" {host / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | {options}"


def _device_name(offload: bool) -> str:
    return "cpu " if offload else "none"


@dataclass(frozen=True, slots=True)
class StatesEstimate:
    """Bytes that each parameter costs, and what they come to. By default 16-bit training with Adam: 2 + 2 + 12."""

    params: int
    weights: float = 2
    """Bytes of the weight that computes."""
    gradients: float = 2
    optimizer: float = 12
    """Bytes of an fp32 weight beside it, and of the moments."""

    @property
    def bytes_per_param(self) -> float:
        """Of all three together."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Bytes of all parameters."""
        return self.params * self.bytes_per_param

    def rows(self) -> tuple[tuple[str, float, float], ...]:
        """What, bytes a parameter, GB (of 10⁹ bytes) in all; the sum last."""
        sizes = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        rows = [(name, size, self.params * size / 1e9) for name, size in sizes.items()]
        return (*rows, ("total", self.bytes_per_param, self.total / 1e9))


def estimate_states(config: RunConfig, params: int) -> StatesEstimate:
    """What the states of this run's parameters come to on one device, by its `precision` and `optim`.

    Gradients are counted as Plait keeps them: in the format in which they are summed, beside fp32 weights; otherwise
    in that of the weights.
    """
    precision, optim = config.precision, config.optim
    weights = 4 if precision.compute in ("fp32", "tf32") else 2
    separate = 4 if precision.master and weights == 2 else 0
    moment = 4.0 if precision.master else weights
    if isinstance(optim, AdamW8bitConfig):
        moment = 1 + 4 / 256  # a code, and a share of a block's scale
    gradients = weights if not precision.master or precision.reduce in ("bf16", "fp16") else 4
    return StatesEstimate(params, weights, gradients, separate + optim.moments * moment)


def least_gib(config: RunConfig, params: int, layout: Layout) -> float:
    """What a device needs at least: weights and optimizer where all parameters are trained, spread evenly.

    A run takes more than that, never less: gradients come on top, activations, and weights that ranks hold together.
    """
    strategy, offload = config.strategy, config.strategy.offload
    apart = layout.tp * layout.pp * layout.ep
    states, shards = estimate_states(config, params), layout.size // apart
    on_device = offload.share if offload.on else 1.0
    optimizer = states.optimizer * on_device / (shards if strategy.stage > 0 else 1)
    whole = strategy.stage == 0 or (strategy.stage < 3 and states.weights < 4 and config.precision.master)
    weights = 0.0 if offload.params != "none" else states.weights / (1 if whole else shards)
    return params / apart * (optimizer + weights) / 2**30
