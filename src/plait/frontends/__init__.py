"""Other frameworks' words, translated into a run description and run by Plait's own engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.frontends.absent import Absent as Absent
    from plait.frontends.account import ABSENT as ABSENT
    from plait.frontends.account import Account as Account
    from plait.frontends.account import Answer as Answer
    from plait.frontends.account import Entry as Entry
    from plait.frontends.account import Translation as Translation
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "absent": ["Absent"],
            "account": ["ABSENT", "Account", "Answer", "Entry", "Translation"],
        },
    )
