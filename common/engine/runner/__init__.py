"""From a step plan to logits: persistent batch rows, host-to-device inputs, the model call (DESIGN §4).

Owns: buffers and the forward. Called by `common.engine.core` alone. Must never know policy, grammars or text.
"""
