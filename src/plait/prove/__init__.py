"""`plait prove`: the same maths under a strategy as on one process, shown on the user's own run. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.prove.certificate import Certificate as Certificate
    from plait.prove.prove import prove as prove
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "certificate": ["Certificate"],
            "prove": ["prove"],
        },
    )
