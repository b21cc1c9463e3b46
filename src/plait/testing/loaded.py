"""What takes a process seconds to load. Ranks are copies of a process that has it: see `ranks.forked`."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from plait.config import parse_sections

for name in (
    "torch._dynamo",  # the first optimizer loads it
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
gc.freeze()  # what is never looked at again is never copied
