"""Which parts make a D (composition root).

Owns: their construction and their end. Does not know: how any of them works.
"""

import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import structlog

from common.clock import SystemClock
from common.config.engine import EngineConfig
from common.engine.async_engine import AsyncEngine
from common.ids import EngineId
from common.serving.assembly import EngineWake, LoadedEngine, load_engine
from common.serving.process import ProcessSettings
from common.serving.surface import Parts
from common.telemetry import metrics
from common.telemetry.metrics import Metrics, Reading, Source
from decode.config import DecodeConfig
from decode.references import ReferenceGate
from decode.remote_kv import RemoteKV
from kv_transfer.backends.nixl_backend import NixlBackend
from kv_transfer.compatibility import Fingerprint
from kv_transfer.consumer import KVConsumer
from kv_transfer.driver import TransferDriver
from kv_transfer.handshake_client import HttpHandshakeClient
from kv_transfer.interface import ConsumerSettings, EngineIdentity
from kv_transfer.stats import ConsumerStats

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProcess:
    """A running D: `common.serving.process.RunningRole`."""

    parts: Parts
    engine: AsyncEngine
    consumer: KVConsumer
    driver: TransferDriver
    loaded: LoadedEngine

    async def start(self) -> None:
        """Start the step loop and the transfer driver."""
        await self.engine.start()
        self.driver.start()

    async def close(self) -> None:
        """End them, engine first: nothing may touch the pool when the agent goes."""
        await self.engine.close()
        self.consumer.close()
        self.driver.close()
        self.loaded.grammars.close()


class DecodeRole:
    """D as `common.serving.process.serve` wants it.

    Args:
        config: the section `decode`.
        engine: its engine section.
        secret: checks references; None accepts unsigned ones from loopback hosts.
        tls: of the HTTP port; None serves plain HTTP.
        prefill_tls: of handshakes with P; None speaks plain HTTP.
    """

    def __init__(
        self,
        config: DecodeConfig,
        engine: EngineConfig,
        secret: bytes | None,
        *,
        tls: ssl.SSLContext | None = None,
        prefill_tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._secret = secret
        self._prefill_tls = prefill_tls
        self.process = ProcessSettings(
            role="decode",
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

    def load(self, engine_id: str, port: int, metrics: Metrics) -> DecodeProcess:  # noqa: ARG002 - P needs the port
        """Build everything; blocks for seconds.

        Raises:
            StartupError: a part cannot be had.
        """
        if self._secret is None:
            _log.warning("kv_references.unsigned", allowed="loopback hosts only")
        config, clock, wake = self._config, SystemClock(), EngineWake()
        loaded = load_engine(self._engine, clock, metrics, config.on_pull_failure, warm_grammars=True)
        backend = NixlBackend(engine_id, config.nixl_backend, with_cuda=loaded.storage.device.type == "cuda")
        settings = ConsumerSettings(
            secret=self._secret,
            handshake_timeout_s=config.handshake_timeout_s,
            pull_timeout_s=config.pull_timeout_s,
            peer_ttl_s=config.peer_ttl_s,
            max_pulls=config.max_pulls,
        )
        loaded.storage.take_memory()
        layout = loaded.storage.layout()
        fingerprint = Fingerprint.of(layout, loaded.identity)
        identity = EngineIdentity(engine_id=EngineId(engine_id), fingerprint=fingerprint)
        consumer = KVConsumer(backend, layout, identity, settings, clock, HttpHandshakeClient(self._prefill_tls))
        remote_kv = RemoteKV(consumer, wake)
        engine = loaded.engine(source=remote_kv)
        wake.bind(engine.wake)
        gate = ReferenceGate(remote_kv, EngineId(engine_id), self._secret, config.on_pull_failure)
        metrics.add_source(kv_readings(consumer.stats))
        metrics.add_source(gate.readings)
        driver = TransferDriver(backend, [consumer])
        return DecodeProcess(
            parts=loaded.parts(engine, lambda: driver.failure is None, references=gate),
            engine=engine,
            consumer=consumer,
            driver=driver,
            loaded=loaded,
        )


def kv_readings(stats: Callable[[], ConsumerStats]) -> Source:
    """A source of D's pull metrics."""

    def read() -> Iterable[Reading]:
        """The numbers of now."""
        now = stats()
        seconds = now.pull_seconds
        up_to = tuple(accumulate(seconds.counts))
        yield Reading(
            metrics.KV_PULL_SECONDS,
            seconds.total,
            count=up_to[-1],
            buckets=tuple(zip(seconds.bounds, up_to[:-1], strict=True)),
        )
        yield Reading(metrics.KV_PULL_BYTES, now.bytes_pulled)
        yield Reading(metrics.KV_PULL_DESCRIPTORS, now.descriptors)
        yield Reading(metrics.KV_HANDSHAKES, now.handshakes, ("begun",))
        yield Reading(metrics.KV_HANDSHAKES, now.handshake_failures, ("failed",))
        yield Reading(metrics.KV_PEERS, now.peers_ready)
        for cause, number in now.pulls_failed.items():
            yield Reading(metrics.KV_PULL_FAILURES, number, (cause.value,))

    return read
