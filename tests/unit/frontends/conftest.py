from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def no_group_left() -> Iterator[None]:
    """What `deepspeed.initialize` joined is left again."""
    yield
    import plait.frontends.deepspeed as deepspeed

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
