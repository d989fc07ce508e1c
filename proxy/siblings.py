"""`--workers N`: an order that reaches one process reaches all of them, and those that are started later.

Every process listens on a Unix socket in the folder that the processes share (only their user may enter it); changes of
the fleet are also kept in a file there, which a process reads when it starts. Owns: the sockets and that file.
Does not know: what orders do.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog

from common.errors import PDError, StartupError
from proxy.orders import FleetOrder, Order, Report

_log = structlog.get_logger(__name__)
_ANSWER_WITHIN_S = 2.0
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 16 << 20

_order = msgspec.json.Decoder(Order)
_report = msgspec.json.Decoder(Report)


class Siblings:
    """One process's part.

    Args:
        file: what the process is known by in the shared folder; its socket has the same name.
        obey: carries out an order here.
    """

    def __init__(self, file: Path, obey: Callable[[Order], Report]) -> None:
        self._socket = file.with_suffix(".sock")
        self._kept = file.with_name("orders.jsonl")
        self._obey = obey

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Take orders while the block runs; those given before this process was there are carried out first.

        Raises:
            StartupError: the socket cannot be had.
        """
        self._socket.unlink(missing_ok=True)  # of a process that was lost
        try:
            server = await asyncio.start_unix_server(self._answer, self._socket)
        except OSError as error:
            raise StartupError(f"cannot listen on {self._socket}: {error.strerror or error}") from error
        try:
            if self._kept.exists():
                for line in self._kept.read_bytes().splitlines():
                    self._obey_quietly(_order.decode(line))
            yield
        finally:
            server.close()
            self._socket.unlink(missing_ok=True)

    async def tell(self, order: Order) -> list[Report]:
        """Have every other process carry out `order`; what they say. One that does not answer is left out."""
        if isinstance(order, FleetOrder):
            with self._kept.open("ab") as kept:
                kept.write(msgspec.json.encode(order) + b"\n")
        others = [path for path in self._socket.parent.glob("*.sock") if path != self._socket]
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(self._ask(path, order)) for path in others]
        return [report for task in asking if (report := task.result()) is not None]

    async def _ask(self, path: Path, order: Order) -> Report | None:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    await _send(writer, msgspec.json.encode(order))
                    return _report.decode(await _receive(reader))
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            _log.warning("sibling.silent", sibling=path.stem, reason=repr(error))
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                order = _order.decode(await _receive(reader))
                await _send(writer, msgspec.json.encode(self._obey_quietly(order)))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            _log.warning("sibling.misunderstood", reason=repr(error))
        finally:
            writer.close()

    def _obey_quietly(self, order: Order) -> Report:
        """Whoever gave the order has heard what is wrong with it; here it may have been carried out already."""
        try:
            return self._obey(order)
        except PDError:
            return Report()


async def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(_LENGTH_BYTES) + message)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> bytes:
    num_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if num_bytes > _MAX_MESSAGE_BYTES:
        raise OSError("the message is too long")
    return await reader.readexactly(num_bytes)
