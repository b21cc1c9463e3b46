"""`plait prove`: the same maths under a strategy as on one process, shown on the user's own run. Imports no torch."""

from plait.prove.certificate import Certificate, Finding
from plait.prove.prove import prove

__all__ = ["Certificate", "Finding", "prove"]
