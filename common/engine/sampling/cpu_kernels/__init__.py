"""Compiled sampling on CPU: grammar mask, highest logit and draw, one pass of C++ over each row.

Owns: csrc/ and its ctypes border. Called by `common.engine.sampling.sampler` on `device: cpu`; without a compiler or
AVX2 the torch path computes the same. Must never know what a row's parameters mean: `cuts` and `race` define that.
"""
