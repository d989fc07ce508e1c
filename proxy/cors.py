"""Cross-origin requests from browsers (Fetch standard): which origins may, and the headers that say so.

Owns: the headers. Does not know: routes, keys.
"""

from collections.abc import Mapping

_EXPOSED = "X-Request-Id, Server-Timing, Retry-After"
_MAX_AGE_S = "600"


class Cors:
    """Allowed origins; `*` allows every one.

    Args:
        origins: exact origins, e.g. `https://app.example`.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: Mapping[str, str]) -> dict[str, str]:
        """What the answer to a request with these headers (names in lower case) must carry, if its origin may."""
        origin = request.get("origin") if self._origins else None
        if origin is None or not (origin in self._origins or "*" in self._origins):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED, "Vary": "Origin"}

    def preflight(self, request: Mapping[str, str], methods: str) -> dict[str, str]:
        """The same for the browser's question before the request."""
        allowed = self.headers(request)
        if allowed:
            allowed["Access-Control-Allow-Methods"] = methods
            allowed["Access-Control-Allow-Headers"] = request.get("access-control-request-headers", "*")
            allowed["Access-Control-Max-Age"] = _MAX_AGE_S
        return allowed
