"""Collectives of flat tensors, under the names that the installed torch has for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 has them under new names and warns of the old ones, which are all that 2.11 knows.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group): every rank's input, one after another."""
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output, input, group): this rank's part of the sum of all inputs."""
