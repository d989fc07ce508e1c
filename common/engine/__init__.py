"""The engine both roles run: scheduling, paged KV cache, model, sampler, grammars (DESIGN §4).

Owns: what happens in a step. Called by `common.serving` and the roles. Must never know HTTP, NIXL or its own role:
those come in as ports (`common.engine.ports`).
"""
