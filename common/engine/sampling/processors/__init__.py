"""Logits processors: the port custom ones implement, and the built-in ones, one file each.

Owns: what each parameter does to a row of logits. Called by `common.engine.sampling.pipeline` in its order.
Must never know grammars, requests' text or the scheduler.
"""
