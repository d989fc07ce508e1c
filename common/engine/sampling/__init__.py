"""From logits to tokens: parameters, persistent batch state, the pipeline whose order is the contract (DESIGN §4).

Owns: every number that changes a distribution. Called by the runner and `common.serving` (parameters only).
Must never know requests' text, KV or HTTP.
"""
