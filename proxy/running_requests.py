"""The requests under way, so that one can be ended by its id.

Owns: the register, and the way an abort ends a request. Does not know: what that undoes; it is the journey's part.
"""

import asyncio
from types import TracebackType

from common.errors import RequestAborted


class RunningRequests:
    """Request id → its requests (clients choose ids, so there may be several)."""

    def __init__(self) -> None:
        self._entries: dict[str, list[_Entry]] = {}

    def entered(self, request_id: str, owner: str | None) -> "_Entry":
        """A context manager that keeps the present task's request in the register.

        Raises, on leaving:
            RequestAborted: somebody asked for its end.
        """
        return _Entry(self._entries, request_id, owner)

    def abort(self, request_id: str, owner: str | None) -> int:
        """End the requests of this id that belong to `owner`; how many there were."""
        found = [entry for entry in self._entries.get(request_id, []) if entry.owner == owner]
        for entry in found:
            entry.abort()
        return len(found)


class _Entry:
    """One request. An abort cancels its task, as a disconnect does, and turns the cancellation into an error."""

    __slots__ = ("_entries", "_is_aborted", "_request_id", "_task", "owner")

    def __init__(self, entries: dict[str, list["_Entry"]], request_id: str, owner: str | None) -> None:
        self._entries = entries
        self._request_id = request_id
        self._task: asyncio.Task[object] | None = None
        self._is_aborted = False
        self.owner = owner

    def abort(self) -> None:
        """Cancel, once."""
        if not self._is_aborted and self._task is not None:
            self._is_aborted = True
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._entries.setdefault(self._request_id, []).append(self)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        entries = self._entries[self._request_id]
        entries.remove(self)
        if not entries:
            del self._entries[self._request_id]
        # As asyncio.timeout does it: if nobody else cancelled the task too, the cancellation was ours to turn.
        if self._is_aborted and self._task is not None:
            is_ours = self._task.uncancel() == 0
            if is_ours and exc_type is asyncio.CancelledError:
                raise RequestAborted("the request was aborted by its id") from exc
