"""Kernels, each beside its plain twin, and file I/O that does not wait."""
