"""Metrics of `--workers N`: whichever process is scraped answers for all of them.

Every process keeps a file of what it has counted, at most a second old; the parent sets the file of a lost process
aside, so that counters never go back. Owns: the files. Does not know: what is counted.
"""

import asyncio
from pathlib import Path

import msgspec

from proxy.metrics import ProxyMetrics, Snapshot

_EVERY_S = 1.0
_LIVE, _LOST = "worker", "lost"


def file_of(folder: Path, number: int) -> Path:
    """Where worker `number` keeps its counts."""
    return folder / f"{_LIVE}-{number}.json"


def set_aside(folder: Path, number: int) -> None:
    """Worker `number` is lost: what it counted stays, what it held is gone. For the parent."""
    file = file_of(folder, number)
    if file.exists():
        num_lost = sum(1 for _ in folder.glob(f"{_LOST}-*.json"))
        file.rename(folder / f"{_LOST}-{num_lost}.json")


class SharedMetrics:
    """One process's part.

    Args:
        file: its own file, from `file_of`.
        metrics: what it counts.
    """

    def __init__(self, file: Path, metrics: ProxyMetrics) -> None:
        self._file = file
        self._metrics = metrics
        self._written = b""

    async def run(self) -> None:
        """Keep the file up to date until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(_EVERY_S)

    def write(self) -> None:
        """Bring the file up to date, in one piece."""
        text = msgspec.json.encode(self._metrics.snapshot())
        if text != self._written:
            new = self._file.with_suffix(".new")
            new.write_bytes(text)
            new.replace(self._file)
            self._written = text

    def others(self) -> list[Snapshot]:
        """What the other processes count, and the lost ones counted; what is about to be told here is kept first."""
        self.write()
        found = []
        for file in sorted(self._file.parent.glob("*.json")):
            if file == self._file:
                continue
            try:
                one = msgspec.json.decode(file.read_bytes(), type=Snapshot)
            except FileNotFoundError:
                continue  # set aside in this moment: the next scrape has it
            found.append(one if file.name.startswith(_LIVE) else msgspec.structs.replace(one, gauges={}))
        return found
