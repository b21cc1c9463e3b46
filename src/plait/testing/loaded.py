"""Importing this module imports everything that takes a test's rank seconds to import.

Ranks are forked from a process that has imported it: see `ranks.forked`.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from plait.config import parse_sections

for name in (
    "torch._dynamo",  # creating the first optimizer imports it
    "torch.distributed.tensor",
    "plait.trainer",
    "plait.models.llama",
    "plait.models.moe",
    "plait.distributed.tensor_parallel",
    "plait.testing",
):
    import_module(name)
with suppress(ImportError):
    import_module("transformers.models.llama.modeling_llama")
parse_sections(device="cpu")  # sections are compiled when they are first read
gc.freeze()  # the garbage collector does not write to these objects, so forks share their memory pages
