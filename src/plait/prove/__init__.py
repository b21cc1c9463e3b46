"""`plait prove`: check with the user's own model and data that a strategy computes the same as one process."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.prove.certificate import Certificate as Certificate
    from plait.prove.certificate import ComparedQuantity as ComparedQuantity
    from plait.prove.certificate import compare_findings as compare_findings
    from plait.prove.compare import Rounding as Rounding
    from plait.prove.compare import compare as compare
    from plait.prove.compare import rounding_of as rounding_of
    from plait.prove.job import ProofTrace as ProofTrace
    from plait.prove.prove import prove as prove
    from plait.prove.record import DropoutSwitch as DropoutSwitch
    from plait.prove.record import perturb_weights as perturb_weights
    from plait.prove.record import running_statistics as running_statistics
else:
    from plait.lazy import attach_names

    attach_names(__name__)
