"""`checkpoint` and `datastates_ckpt`: how state is saved."""

from __future__ import annotations

from typing import Any

from plait.frontends.deepspeed.config.keys import group, only, to, unneeded
from plait.frontends.deepspeed.config.kinds import ANY, COUNT, FLAG, SIZE, one_of
from plait.frontends.deepspeed.config.work import Key, Table, Work

_WRITING = "each rank writes its own shards, at the speed of the disk"
_BACKGROUND = "checkpoint.async_save: true (state is copied, and written while training goes on)"


def _decoupled(work: Work, key: str, value: bool) -> None:
    if value:
        work.put("checkpoint.async_save", True, key)
        work.map(key, value, _BACKGROUND)
    else:
        work.leave(key, value, "checkpoints are written before training goes on")


def _datastates(work: Work, key: str, value: Any) -> None:
    if value is False:
        work.leave(key, value, "it is off")
    else:
        work.put("checkpoint.async_save", True, key)
        work.map(key, value, _BACKGROUND)


_WRITER: Table = {
    "type": only(("python", "fast"), one_of("mock", "python", "fast"), _WRITING, "mock would write nothing"),
    "decoupled": Key(FLAG, _decoupled),
    "io_buffer_size": unneeded(SIZE, _WRITING),
    "io_buffer_double": unneeded(FLAG, _WRITING),
    "io_multiplier": unneeded(COUNT, _WRITING),
    "show_statistics": unneeded(FLAG, "the log says how long a checkpoint took"),
    "data_parallel": unneeded(one_of("replica", "socket", "machine"), _WRITING),
}
_CHECKPOINT: Table = {
    "tag_validation": unneeded(one_of("ignore", "warn", "fail"), "ranks always agree on the name of a checkpoint"),
    "load_universal": unneeded(FLAG, "every checkpoint can be resumed in any other layout"),
    "use_node_local_storage": to("checkpoint.node_local", FLAG),
    "checkpoint_serialization": unneeded(FLAG, _WRITING),
    "parallel_write": group({"pipeline_stage": unneeded(FLAG, _WRITING)}),
    "writer": group(_WRITER),
}

TABLE: Table = {"checkpoint": group(_CHECKPOINT), "datastates_ckpt": Key(ANY, _datastates)}
