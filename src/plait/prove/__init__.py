"""`plait prove`: the same maths under a strategy as on one process, shown on the user's own run."""
