"""Engines listed in a JSON file that somebody else keeps up to date.

Owns: noticing changes and reading the file. A file that makes no sense changes nothing and is reported once.
"""

import asyncio
from pathlib import Path

import msgspec
import structlog

from common.errors import ConfigError
from proxy.fleet.membership import Fleet, Source
from proxy.fleet.worker import Role

_log = structlog.get_logger(__name__)


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


class FileSource:
    """Watches one file.

    Args:
        path: the file; it may not exist yet.
        fleet: what follows it.
        poll_s: how often to look.
    """

    def __init__(self, path: str, fleet: Fleet, poll_s: float) -> None:
        self._path = Path(path)
        self._fleet = fleet
        self._poll_s = poll_s
        self._seen: bytes | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._poll_s)

    def look(self) -> None:
        """Read the file if it differs from what was read last."""
        try:
            text = self._path.read_bytes()
        except OSError:
            return  # between two versions, or not there yet: what was read last holds
        if text == self._seen:
            return
        self._seen = text
        try:
            listed = parse(text, str(self._path))
        except ConfigError as error:
            _log.error("fleet.file_refused", reason=str(error))
            return
        self._fleet.apply(Source.FILE, {Role.PREFILL: listed.prefill, Role.DECODE: listed.decode})
        _log.info("fleet.file_read", num_prefill=len(listed.prefill), num_decode=len(listed.decode))


def parse(text: bytes, name: str) -> FleetFile:
    """The file's content.

    Raises:
        ConfigError: not what it should be.
    """
    try:
        listed = msgspec.json.decode(text, type=FleetFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {error}") from error
    for url in (*listed.prefill, *listed.decode):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{name}: {url!r} must start with http:// or https://")
    return listed
