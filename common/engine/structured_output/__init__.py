"""Grammars: compile a constraint off the step loop, follow it token by token, mask what it forbids.

Owns: backends, compile limits and cache, matchers, bitmask filling. Called by the engine core and `common.serving`.
Must never know roles, KV or HTTP.
"""
