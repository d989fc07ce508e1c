"""The requests under way, so that one can be ended by its id.

Owns: the register. Does not know: what ending a request undoes; that is its journey's part.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Entry:
    owner: str | None
    scope: asyncio.Timeout


class RunningRequests:
    """Request id → its requests (clients choose ids, so there may be several)."""

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry]] = {}

    @contextmanager
    def entered(self, request_id: str, owner: str | None, scope: asyncio.Timeout) -> Iterator[None]:
        """Keep a request in the register while the block runs; `scope` is what an abort lets run out."""
        entry = _Entry(owner, scope)
        entries = self._entries.setdefault(request_id, [])
        entries.append(entry)
        try:
            yield
        finally:
            entries.remove(entry)
            if not entries:
                self._entries.pop(request_id, None)

    def abort(self, request_id: str, owner: str | None) -> int:
        """End the requests of this id that belong to `owner`; how many there were."""
        found = [entry for entry in self._entries.get(request_id, []) if entry.owner == owner]
        for entry in found:
            if not entry.scope.expired():
                entry.scope.reschedule(0.0)
        return len(found)
