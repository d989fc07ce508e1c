"""`/v1/responses` without stored state, on top of chat completions.

Owns: translating requests, answers and streams. Called by `proxy.generation`. Must never know legs or engines.
"""
