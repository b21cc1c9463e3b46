"""`plait tune`: the fastest settings, found by measuring."""
