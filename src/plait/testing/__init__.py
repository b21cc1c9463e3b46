"""Tests of user-provided parts: compare a run on several ranks of this machine with the same run on one process.

    from plait.testing import assert_same_maths
    assert_same_maths(optim="my_package.optim:Opt")

It does not need pytest. See `docs/testing-your-own.md`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.testing.maths import assert_same_after_resume as assert_same_after_resume
    from plait.testing.maths import assert_same_maths as assert_same_maths
    from plait.testing.ranks import RankFailedError as RankFailedError
    from plait.testing.ranks import RankPool as RankPool
    from plait.testing.runs import full_tensors as full_tensors
else:
    from plait.lazy import attach_names

    attach_names(__name__)
