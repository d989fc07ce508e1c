"""Drafts: tokens guessed before the forward, checked by it (speculative decoding without a second model).

Owns: who guesses what, and how much. A wrong guess costs time, never a token: sampling decides (docs/decisions/0022).
Must never know models, samplers or KV blocks.
"""
