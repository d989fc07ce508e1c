"""Compiled CPU kernels: the whole decoder forward as one C++ call, weights packed for small batches.

Owns: building and loading the library (`library.available()`), packed weights, `decoder.CpuDecoder`. Called by the
model loader on `device: cpu`; without a compiler or AVX2 it stays with the torch decoder. Must never know requests,
schedulers or files of models.
"""
