"""Memory of model states alone: weights, gradients and optimizer, without activations and everything else.

The functions with long names take DeepSpeed's arguments and print DeepSpeed's table, so that numbers can be compared
with DeepSpeed's. GB in these tables are 2³⁰ bytes; in `StatesEstimate` they are 10⁹ bytes. Neither is the memory that a
run needs: `plait plan` predicts that.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from plait.config import AdamW8bitConfig, Layout, RunConfig


def count_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters, shared ones once, and that of the module with the most parameters of its own.

    Parameters are distinguished by object, not by address, so a model on the meta device is counted correctly.
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
    """Return (bytes of a node's host memory, bytes of one GPU) at ZeRO stage 2."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        # The GPU has 16-bit weights; the host all fp32 states, or at the start a model per process if that is more.
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
    """Return bytes of (a node's host memory, one GPU, the largest layer gathered with its gradient) at stage 3."""
    gpus, share = num_nodes * num_gpus_per_node, 1 / num_nodes
    layer = 4 * largest_layer_params
    if not cpu_offload:
        # While models are built, the host has one per process: all of it, or one layer at a time with `zero_init`.
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
    """Return DeepSpeed's table for stage 2 as text."""
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
    """Return DeepSpeed's table for stage 3 as text."""
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
    """Bytes of model states, per parameter and in total. By default 16-bit training with Adam: 2 + 2 + 12."""

    params: int
    weights: float = 2
    """Bytes of a weight in the format of the computation."""
    gradients: float = 2
    optimizer: float = 12
    """Bytes of the separate fp32 weight, and of the moments."""

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient and optimizer state together."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Bytes of the states of all parameters."""
        return self.params * self.bytes_per_param

    def rows(self) -> tuple[tuple[str, float, float], ...]:
        """Return rows of (name, bytes per parameter, GB of 10⁹ bytes in total); the last row is the sum."""
        sizes = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        rows = [(name, size, self.params * size / 1e9) for name, size in sizes.items()]
        return (*rows, ("total", self.bytes_per_param, self.total / 1e9))


def estimate_states(config: RunConfig, params: int) -> StatesEstimate:
    """Return the bytes of the states of `params` parameters on one device, by the run's `precision` and `optim`.

    Gradients have the format that Plait stores them in: that of the reduction if there are fp32 master weights, else
    that of the weights.
    """
    precision, optim = config.precision, config.optim
    weights = 4 if precision.compute in ("fp32", "tf32") else 2
    separate = 4 if precision.master and weights == 2 else 0
    moment = 4.0 if precision.master else weights
    if isinstance(optim, AdamW8bitConfig):
        moment = 1 + 4 / 256  # an 8-bit code, and 1/256 of the fp32 scale of its block
    gradients = weights if not precision.master or precision.reduce in ("bf16", "fp16") else 4
    return StatesEstimate(params, weights, gradients, separate + optim.moments * moment)


def least_gib(config: RunConfig, params: int, layout: Layout) -> float:
    """Return the GiB that a device needs at least: weights and optimizer state, if all parameters are trained.

    It is a lower bound: gradients, activations, and weights that are replicated or gathered are not counted.
    """
    strategy, offload = config.strategy, config.strategy.offload
    apart = layout.tp * layout.pp * layout.ep
    states, shards = estimate_states(config, params), layout.size // apart
    on_device = offload.share if offload.on else 1.0
    optimizer = states.optimizer * on_device / (shards if strategy.stage > 0 else 1)
    whole = strategy.stage == 0 or (strategy.stage < 3 and states.weights < 4 and config.precision.master)
    weights = 0.0 if offload.params != "none" else states.weights / (1 if whole else shards)
    return params / apart * (optimizer + weights) / 2**30
