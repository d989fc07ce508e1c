"""Requests that wait for room, in order of arrival.

Journey row 6. Owns: the order. A preempted request keeps its arrival and so comes back to its old place.
Does not know: what they wait for.
"""

from bisect import insort
from collections.abc import Iterator, Sequence

from common.engine.scheduling.sequence import Request


class WaitingQueue:
    """Requests sorted by `arrival`. Also used for the running ones: the last is preempted first."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Oldest first, over a snapshot: members may leave meanwhile."""
        return iter(tuple(self._requests))

    def is_exactly(self, requests: Sequence[Request]) -> bool:
        """Whether these are its members, in its order."""
        return self._requests == requests

    def __contains__(self, request: Request) -> bool:
        return any(member is request for member in self._requests)

    def push(self, request: Request) -> None:
        """Put `request` at its place."""
        insort(self._requests, request, key=lambda member: member.arrival)

    def remove(self, request: Request) -> None:
        """Take `request` out; raises ValueError when it is not here."""
        self._requests.remove(request)

    def newest(self) -> Request | None:
        """The last arrival, or None."""
        return self._requests[-1] if self._requests else None
