"""Paged KV cache: which block belongs to whom, which content is reusable, and where the bytes lie (DESIGN §4).

Owns: blocks, reference counts, prefix reuse, the one device tensor. Called by the scheduler and the runner. Must never
know sampling, grammars, HTTP or NIXL.
"""
