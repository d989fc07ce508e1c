"""What moves the bytes: one protocol, NIXL behind it, and a shipped in-memory one for tests.

Owns: the only imports of `nixl`. Called by producer, consumer and driver. Must never know: leases, references.
"""
