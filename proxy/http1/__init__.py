"""HTTP/1.1 towards the engines, as little of it as a proxy needs.

Owns: answers off the wire, connections and their reuse. Used by `proxy.upstream` alone. Must never know legs or fleets.
Why not a general client: docs/decisions/0020-http-client-of-the-proxy.md.
"""
