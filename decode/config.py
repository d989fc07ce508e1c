"""D's settings as written in the section `decode:` (its engine: `engine:` and `decode.engine:`).

Owns: names, units, defaults. Does not know: how they are used. Reading the file: `common.config.loader`.
"""

from typing import Annotated, Literal

import msgspec

from common.config.tls import PeerTlsConfig, TlsConfig

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class DecodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One D engine.

    Attributes:
        host: address to listen on; without a secret only a loopback address is allowed.
        port: to listen on.
        secret_file: file with the secret that checks KV references and handshakes; the same on P and D.
        secret_variable: environment variable that holds it instead.
        on_pull_failure: when KV cannot be had from P: compute the prompt here (`recompute`) or answer 502 (`fail`).
        handshake_timeout_s: first connection to a P, until its first bytes are read.
        pull_timeout_s: one pull, until its last byte is confirmed.
        peer_ttl_s: a P unused this long is forgotten.
        max_pulls: most pulls that read at the same time; more wait.
        nixl_backend: NIXL plugin that moves KV.
        kv_buffer_device: where the transport finds the KV: in the pool itself (`device`); `cpu` asks for host memory,
            which is the pool of a CPU engine and is not there for a CUDA engine (refused at start-up).
        api_key: what clients must send as `Authorization: Bearer`; null lets everyone in.
        max_body_bytes: larger request bodies answer 413.
        tls: HTTPS for whoever asks this engine: the proxy, clients, scrapes.
        prefill_tls: how handshakes with P use HTTPS, for P engines with `tls`; null: they speak plain HTTP.
        drain_s: how long requests may finish after SIGTERM.
        log_json: log lines as JSON instead of for a person's eyes.
        log_level: lowest level shown.
        otlp_url: a collector's OTLP/HTTP endpoint for this engine's part of the traces that the proxy, or another
            caller, keeps; null makes no spans.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8200
    secret_file: str | None = None
    secret_variable: str | None = None
    on_pull_failure: Literal["recompute", "fail"] = "recompute"
    handshake_timeout_s: Seconds = 5.0
    pull_timeout_s: Seconds = 30.0
    peer_ttl_s: Seconds = 600.0
    max_pulls: Positive = 1024
    nixl_backend: str = "UCX"
    kv_buffer_device: Literal["device", "cpu"] = "device"
    api_key: str | None = None
    max_body_bytes: Positive = 64 << 20
    tls: TlsConfig = TlsConfig()
    prefill_tls: PeerTlsConfig | None = None
    drain_s: Seconds = 30.0
    log_json: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_url: str | None = None
