"""P's settings as written in the section `prefill:` (its engine: `engine:` and `prefill.engine:`).

Owns: names, units, defaults. Does not know: how they are used. Reading the file: `common.config.loader`.
"""

from typing import Annotated, Literal

import msgspec

from common.config.tls import TlsConfig

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class PrefillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One P engine.

    Attributes:
        host: address to listen on; without a secret only a loopback address is allowed.
        port: to listen on.
        advertised_host: under which D reaches this engine; null is `host`.
        secret_file: file with the secret that signs KV references and handshakes; the same on P and D.
        secret_variable: environment variable that holds it instead.
        lease_ttl_s: how long KV is held for D without a heartbeat.
        max_leases: most handoffs held at a time; one more answers 429.
        nixl_backend: NIXL plugin that moves KV.
        kv_buffer_device: where the transport finds the KV: in the pool itself (`device`); `cpu` asks for host memory,
            which is the pool of a CPU engine and is not there for a CUDA engine (refused at start-up).
        api_key: what clients must send as `Authorization: Bearer`; null lets everyone in.
        max_body_bytes: larger request bodies answer 413.
        tls: HTTPS for whoever asks this engine: the proxy, clients, scrapes, and D (`decode.prefill_tls`).
        drain_s: how long requests may finish after SIGTERM.
        log_json: log lines as JSON instead of for a person's eyes.
        log_level: lowest level shown.
        otlp_url: a collector's OTLP/HTTP endpoint for this engine's part of the traces that the proxy, or another
            caller, keeps; null makes no spans.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8100
    advertised_host: str | None = None
    secret_file: str | None = None
    secret_variable: str | None = None
    lease_ttl_s: Seconds = 30.0
    max_leases: Positive = 8192
    nixl_backend: str = "UCX"
    kv_buffer_device: Literal["device", "cpu"] = "device"
    api_key: str | None = None
    max_body_bytes: Positive = 64 << 20
    tls: TlsConfig = TlsConfig()
    drain_s: Seconds = 30.0
    log_json: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_url: str | None = None
