"""Other frameworks' words, translated into a run description and run by Plait's own engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.frontends.key_report import ABSENT as ABSENT
    from plait.frontends.key_report import KeyEntry as KeyEntry
    from plait.frontends.key_report import KeyOutcome as KeyOutcome
    from plait.frontends.key_report import KeyReport as KeyReport
    from plait.frontends.key_report import Translation as Translation
    from plait.frontends.missing_names import Absent as Absent
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "key_report": ["ABSENT", "KeyEntry", "KeyOutcome", "KeyReport", "Translation"],
            "missing_names": ["Absent"],
        },
    )
