"""What the server asks of the rest of the process: protocols that a role's `main.py` fills in.

Owns: the border of this room. Everything here is called on the event loop and returns at once unless it is a coroutine.
"""

from types import TracebackType
from typing import Protocol, Self

from common.engine.outputs import TokenDelta
from common.engine.request import GenerateRequest
from common.ids import LeaseId, RequestId
from common.wire.kv_params import KvReference


class TokenStream(Protocol):
    """The output of one request; leaving it ends whatever is unfinished and frees what it held."""

    async def __aenter__(self) -> Self:
        """Begin."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Abort what is unfinished."""
        ...

    async def next(self) -> TokenDelta:
        """The next delta, in step order. After every choice's last one there is none."""
        ...

    def end_choice(self, index: int) -> None:
        """The rest of this choice is of no use: free what it holds. Its last delta still comes."""
        ...


class Engine(Protocol):
    """Where requests go (`common.engine.async_engine.AsyncEngine`)."""

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Take the request on. Raises `QueueFull` when too many wait."""
        ...


class References(Protocol):
    """D's gate for KV references (`decode.references`)."""

    def admit(self, reference: KvReference) -> KvReference | None:
        """Check signature and bounds before anything of the reference is believed.

        Returns:
            The reference, or None when it must not be used and policy says to compute the prompt here.

        Raises:
            ReferenceRefused: it must not be used and policy says so.
        """
        ...

    def refuse(self, reference: KvReference) -> None:
        """The request will not be served: tell P to release, without waiting for it. Idempotent."""
        ...


class HttpReply(Protocol):
    """A status and a JSON body that somebody else has written."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def body(self) -> bytes:
        """JSON."""
        ...


class KvControl(Protocol):
    """P's answers to its readers and to the proxy over HTTP (`kv_transfer.producer.KVProducer`)."""

    def handshake_offer(self) -> HttpReply:
        """Answer GET `/kv/handshake`."""
        ...

    def handshake_answer(self, body: bytes) -> HttpReply:
        """Answer POST `/kv/handshake`."""
        ...

    def release(self, lease_id: LeaseId) -> bool:
        """Give a handoff up; False when it is over already."""
        ...

    def cancel_request(self, request_id: RequestId) -> None:
        """Give up every handoff of a request."""
        ...
