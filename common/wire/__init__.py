"""Data that crosses a process border: `kv_transfer_params`, handshake, constraint, prepare, timing header.

Owns: the types and their JSON. Called by every role. Must never know torch, HTTP or NIXL.
"""
