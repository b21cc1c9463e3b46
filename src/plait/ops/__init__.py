"""Kernels, each beside its plain twin, and file I/O that does not wait.

Import from the files themselves: `ops.files`, `ops.host`, `ops.adam`.
"""
