"""The HTTP server of an engine, shared by P and D: OpenAI's endpoints, prepare, KV routes, health, metrics.

Owns: aiohttp's server side, answers and streams. Called by the roles' `main.py`. Must never know NIXL or a role.
"""
