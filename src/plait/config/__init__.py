"""The frozen, closed description of a run. Imports no torch."""
