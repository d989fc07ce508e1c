"""Which parts make a P (composition root).

Owns: their construction and their end. Does not know: how any of them works.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from common.clock import Deadline, SystemClock
from common.config.engine import EngineConfig
from common.engine.async_engine import AsyncEngine
from common.ids import EngineId
from common.serving.assembly import EngineWake, LoadedEngine, load_engine
from common.serving.process import ProcessSettings
from common.serving.surface import Parts
from common.telemetry import metrics
from common.telemetry.metrics import Metrics, Reading, Source
from kv_transfer.backends.nixl_backend import NixlBackend
from kv_transfer.compatibility import Fingerprint
from kv_transfer.driver import TransferDriver
from kv_transfer.interface import EngineIdentity, ProducerSettings
from kv_transfer.producer import KVProducer
from kv_transfer.stats import ProducerStats
from prefill.config import PrefillConfig
from prefill.handoff import Handoff

LEASE_POLL_S, LEASE_GRACE_S = 0.02, 5.0
"""How often and how long a P that goes down looks whether somebody still reads from it; then D computes by itself."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProcess:
    """A running P: `common.serving.process.RunningRole`."""

    parts: Parts
    engine: AsyncEngine
    producer: KVProducer
    driver: TransferDriver
    loaded: LoadedEngine

    async def start(self) -> None:
        """Start the step loop and the transfer driver."""
        await self.engine.start()
        self.driver.start()

    async def close(self) -> None:
        """Let readers of held KV finish, then end the engine, then the agent: nothing may touch its pool any more."""
        deadline = Deadline.after(self.loaded.clock, LEASE_GRACE_S)
        while self._is_read_from() and not deadline.has_passed():  # noqa: ASYNC110 - leases end on another thread
            await asyncio.sleep(LEASE_POLL_S)
        await self.engine.close()
        self.driver.close()
        self.loaded.grammars.close()

    def _is_read_from(self) -> bool:
        return self.driver.failure is None and self.producer.stats().leases_held > 0


class PrefillRole:
    """P as `common.serving.process.serve` wants it.

    Args:
        config: the section `prefill`.
        engine: its engine section.
        secret: signs references; None leaves them unsigned.
        tls: of the HTTP port; None serves plain HTTP.
    """

    def __init__(
        self, config: PrefillConfig, engine: EngineConfig, secret: bytes | None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._config = config
        self._engine = engine
        self._secret = secret
        self.process = ProcessSettings(
            role="prefill",
            host=config.host,
            port=config.port,
            max_body_bytes=config.max_body_bytes,
            api_key=config.api_key,
            drain_s=config.drain_s,
            log_json=config.log_json,
            log_level=config.log_level,
            otlp_url=config.otlp_url,
            tls=tls,
        )

    def load(self, engine_id: str, port: int, metrics: Metrics) -> PrefillProcess:
        """Build everything; blocks for seconds.

        Raises:
            StartupError: a part cannot be had.
        """
        if self._secret is None:
            _log.warning("kv_references.unsigned", allowed="loopback hosts only")
        clock, wake = SystemClock(), EngineWake()
        loaded = load_engine(self._engine, clock, metrics)
        backend = NixlBackend(engine_id, self._config.nixl_backend, with_cuda=loaded.storage.device.type == "cuda")
        settings = ProducerSettings(
            host=self._config.advertised_host or self._config.host,
            port=port,
            secret=self._secret,
            lease_ttl_s=self._config.lease_ttl_s,
            max_leases=self._config.max_leases,
        )
        loaded.storage.take_memory()
        layout = loaded.storage.layout()
        fingerprint = Fingerprint.of(layout, loaded.identity)
        identity = EngineIdentity(engine_id=EngineId(engine_id), fingerprint=fingerprint)
        producer = KVProducer(backend, layout, identity, settings, clock, wake)
        engine = loaded.engine(sink=Handoff(producer, loaded.storage.block_size))
        wake.bind(engine.wake)
        metrics.add_source(kv_readings(producer.stats))
        driver = TransferDriver(backend, [producer])
        return PrefillProcess(
            parts=loaded.parts(engine, lambda: driver.failure is None, kv_control=producer),
            engine=engine,
            producer=producer,
            driver=driver,
            loaded=loaded,
        )


def kv_readings(stats: Callable[[], ProducerStats]) -> Source:
    """A source of P's lease metrics."""

    def read() -> Iterable[Reading]:
        """The numbers of now."""
        now = stats()
        yield Reading(metrics.LEASES_HELD, now.leases_held)
        for cause, number in now.leases_released.items():
            yield Reading(metrics.LEASES_RELEASED, number, (cause.value,))
        yield Reading(metrics.KV_NOTIFICATIONS, now.late_notifications, ("late",))
        yield Reading(metrics.KV_NOTIFICATIONS, now.unreadable_notifications, ("unreadable",))

    return read
