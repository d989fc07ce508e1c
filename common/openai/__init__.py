"""OpenAI's HTTP forms: request bodies, answers, SSE framing, error bodies.

Owns: their types and codecs. Called by the engines' server and the proxy. Must never know torch, schedulers or NIXL.
"""
