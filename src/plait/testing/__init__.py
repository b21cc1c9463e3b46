"""For people who bring their own part: hold it against one process, on real ranks of this machine.

    from plait.testing import assert_same_maths
    assert_same_maths(optim="my_package.optim:Opt")

Needs no pytest. `docs/testing-your-own.md` has the rest.
"""

from plait.testing.maths import STRATEGIES, assert_same_after_resume, assert_same_maths
from plait.testing.ranks import RankFailedError, RankPool
from plait.testing.runs import whole

__all__ = [
    "STRATEGIES",
    "RankFailedError",
    "RankPool",
    "assert_same_after_resume",
    "assert_same_maths",
    "whole",
]
