"""KV blocks from P's memory into D's: references, leases, handshakes, one-sided reads (journey rows 4 and 7).

Owns: who may read which bytes of whom, and for how long. Called by `prefill.handoff` and `decode.remote_kv`.
Must never know: torch, requests' text, the engine, HTTP servers. Memory is addresses and lengths here.
"""
