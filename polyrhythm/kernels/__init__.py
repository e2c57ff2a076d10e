"""Kernels in C: compiled for this machine when they are first needed, and kept in the user's cache.

One file binds one C file of `c/`: `packed_attention` and `elementwise` for training, `decoding_attention`, `products` and
`elementwise` for the embedded engine. They take and return tensors; nothing else of the package knows C. Without a C compiler,
or where POLYRHYTHM_KERNELS switches a kernel off, there is none, and callers use torch operators.
"""
