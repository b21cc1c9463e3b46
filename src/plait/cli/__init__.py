"""The `plait` command."""
