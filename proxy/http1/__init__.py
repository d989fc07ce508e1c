"""HTTP/1.1 on both sides of the proxy, as little of it as a proxy needs.

Owns: requests and answers on the wire, connections and their reuse. Must never know legs, fleets or routes.
Why not a general client and server: docs/decisions/0020-http-of-the-proxy.md.
"""
