"""`pd-prefill --config FILE`: builds a P engine and serves (composition root).

Owns: which parts make a P. Does not know: how any of them works.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from common.clock import SystemClock
from common.config.engine import EngineConfig
from common.config.loader import load_section, role_engine_config
from common.config.secret import read_secret
from common.engine.async_engine import AsyncEngine
from common.errors import ConfigError
from common.ids import EngineId
from common.serving.assembly import EngineWake, LoadedEngine, load_engine
from common.serving.process import ProcessSettings, run
from common.serving.surface import Parts
from common.telemetry import metrics
from common.telemetry.metrics import Metrics, Reading, Source
from kv_transfer.backends.nixl_backend import NixlBackend
from kv_transfer.compatibility import Fingerprint
from kv_transfer.driver import TransferDriver
from kv_transfer.interface import EngineIdentity, ProducerSettings
from kv_transfer.producer import KVProducer
from kv_transfer.reference import is_loopback
from kv_transfer.stats import ProducerStats
from prefill.config import PrefillConfig
from prefill.handoff import Handoff

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProcess:
    """A running P: `common.serving.process.RunningRole`."""

    parts: Parts
    engine: AsyncEngine
    driver: TransferDriver
    loaded: LoadedEngine

    async def start(self) -> None:
        """Start the step loop and the transfer driver."""
        await self.engine.start()
        self.driver.start()

    async def close(self) -> None:
        """End them, engine first: nothing may touch the pool when the agent goes."""
        await self.engine.close()
        self.driver.close()
        self.loaded.grammars.close()


class PrefillRole:
    """P as `common.serving.process.run` wants it.

    Args:
        config: the section `prefill`.
        engine: its engine section.
        secret: signs references; None leaves them unsigned.
    """

    def __init__(self, config: PrefillConfig, engine: EngineConfig, secret: bytes | None) -> None:
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
        identity = EngineIdentity(engine_id=EngineId(engine_id), fingerprint=_fingerprint(loaded))
        producer = KVProducer(backend, loaded.storage.layout(), identity, settings, clock, wake)
        engine = loaded.engine(sink=Handoff(producer, loaded.storage.block_size))
        wake.bind(engine.wake)
        metrics.add_source(kv_readings(producer.stats))
        return PrefillProcess(
            parts=loaded.parts(engine, kv_control=producer),
            engine=engine,
            driver=TransferDriver(backend, [producer]),
            loaded=loaded,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run("pd-prefill", argv, read_role)


def read_role(path: str) -> PrefillRole:
    """P as the config file at `path` describes it.

    Raises:
        ConfigError: the file is wrong.
    """
    config = load_section(path, "prefill", PrefillConfig)
    secret = read_secret(config.secret_file, config.secret_variable)
    for key in ("host", "advertised_host"):
        host = getattr(config, key)
        if secret is None and host is not None and not is_loopback(host):
            raise ConfigError(f"{path}: key `prefill.{key}`: without a secret only loopback addresses, not {host}")
    return PrefillRole(config, role_engine_config(path, "prefill"), secret)


def kv_readings(stats: Callable[[], ProducerStats]) -> Source:
    """A source of P's lease metrics."""

    def read() -> Iterable[Reading]:
        now = stats()
        yield Reading(metrics.LEASES_HELD, now.leases_held)
        for cause, number in now.leases_released.items():
            yield Reading(metrics.LEASES_RELEASED, number, (cause.value,))

    return read


def _fingerprint(loaded: LoadedEngine) -> Fingerprint:
    layout = loaded.storage.layout()
    return Fingerprint(
        model=loaded.loaded.weights_fingerprint,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        tokenizer=loaded.loaded.tokenizer.fingerprint,
        chat_template=loaded.loaded.chat_template.fingerprint,
        grammar=loaded.grammar_rules,
    )
