"""Random numbers of the processes that load data."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch

from plait.frontends.mmengine.registry import FUNCTIONS


@FUNCTIONS.register_module()
def worker_init_fn(
    worker_id: int, num_workers: int, rank: int, seed: int, disable_subprocess_warning: bool = False
) -> None:
    """Give each worker of each rank a seed of its own."""
    own = (num_workers * rank + worker_id + seed) % 2**32
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    if disable_subprocess_warning and worker_id != 0:
        warnings.simplefilter("ignore")
