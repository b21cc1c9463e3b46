"""Kernels of the decoder on one GPU: a token of few rows costs reading the weights once, and little else.

`skinny_gemm` multiplies few rows by a large matrix, `embed_sample` looks the last token up and draws the next one,
`attention` reads the cache, `sampling` draws without writing logits, `tokens` counts what was written, and
`dependent_launch` lets a kernel begin before the one ahead of it has ended. Other rooms import from `plait.kernels`.
"""
