"""The proxy's settings as written in the section `proxy:`.

Owns: names, units, defaults. Does not know: how they are used. Reading the file: `common.config.loader`.
"""

from typing import Annotated, Literal

import msgspec

from common.config.tls import PeerTlsConfig, TlsConfig

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Policy = Literal["round_robin", "least_loaded", "prefix_affinity", "grammar_warm"]


class SrvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines named by DNS SRV records; needs the extra `dns`.

    Attributes:
        prefill: name whose SRV records are the P engines, e.g. `_http._tcp.prefill.example.org`; null: none.
        decode: the same for the D engines.
        scheme: of the engines' URLs.
        nameserver: `host` or `host:port` to ask; null asks the machine's.
        max_age_s: records are asked for again after this long, or after their own time to live where that is shorter.
    """

    prefill: str | None = None
    decode: str | None = None
    scheme: Literal["http", "https"] = "http"
    nameserver: str | None = None
    max_age_s: Seconds = 10.0


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines named by the EndpointSlices of a cluster; needs the extra `kubernetes`.

    Attributes:
        prefill: label selector of the P engines' slices, e.g. `kubernetes.io/service-name=prefill`; null: none.
        decode: the same for the D engines.
        namespace: where the slices are.
        port: name of the port; null takes a slice's first one.
        scheme: of the engines' URLs.
        kubeconfig: file that says how to reach the cluster; null is for a proxy that runs inside it.
        retry_s: pause after a failure.
    """

    prefill: str | None = None
    decode: str | None = None
    namespace: str = "default"
    port: str | None = None
    scheme: Literal["http", "https"] = "http"
    kubeconfig: str | None = None
    retry_s: Seconds = 2.0


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines, and how their health is watched.

    Attributes:
        prefill: base URLs of the P engines.
        decode: base URLs of the D engines.
        file: JSON file `{"prefill": [...], "decode": [...]}` with further engines, read again when it changes.
        file_poll_s: how often to look whether it has.
        srv: engines from DNS; null: none.
        kubernetes: engines from a cluster; null: none.
        probe_interval_s: pause between two `/ready` probes of one engine.
        calm_probe_interval_s: the same while every engine is ready and has nothing to do.
        probe_timeout_s: a probe without an answer after this long has failed.
        failures_until_dead: failed probes in a row that take an engine out; a refused connection does so at once.
        breaker_failures: failed legs in a row that open an engine's circuit.
        breaker_cooldown_s: how long an open circuit stays open before one leg may try.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    file: str | None = None
    file_poll_s: Seconds = 1.0
    srv: SrvConfig | None = None
    kubernetes: KubernetesConfig | None = None
    probe_interval_s: Seconds = 0.5
    calm_probe_interval_s: Seconds = 2.0
    probe_timeout_s: Seconds = 1.5
    failures_until_dead: Positive = 3
    breaker_failures: Positive = 5
    breaker_cooldown_s: Seconds = 5.0


class TimeoutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who waits how long for what; `request_s` is shared by all tries of a request.

    Attributes:
        body_s: reading the client's body.
        connect_s: opening a connection to an engine.
        prefill_s: one prefill leg, until P's whole answer.
        first_token_s: one decode leg, until D's first byte.
        warm_up_s: a warm-up request (`dialect: vllm`) after the head of D's answer; a refusal comes within it, and the
            compilation goes on without the request.
        stream_idle_s: longest silence between two pieces of D's answer.
        request_s: everything until the first byte to the client.
        release_s: telling P to let go of KV.
    """

    body_s: Seconds = 60.0
    connect_s: Seconds = 2.0
    prefill_s: Seconds = 300.0
    first_token_s: Seconds = 300.0
    warm_up_s: Seconds = 0.03
    stream_idle_s: Seconds = 120.0
    request_s: Seconds = 600.0
    release_s: Seconds = 2.0


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many requests at once, and how many may wait for a slot (429 beyond)."""

    max_concurrent: Positive = 8192
    max_queued: Count = 1024
    queue_timeout_s: Seconds = 30.0


class RetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tries per leg while no byte has reached the client; see `proxy.retry` for what is tried again.

    Attributes:
        prefill_tries: most prefill legs of one request.
        decode_tries: most decode legs of one request.
        on_prefill_failure: after the last try, let D prefill by itself (`local`) or answer the failure (`fail`).
        on_no_prefill: what to do when every P that once was ready is gone.
    """

    prefill_tries: Positive = 3
    decode_tries: Positive = 3
    on_prefill_failure: Literal["local", "fail"] = "local"
    on_no_prefill: Literal["local", "fail"] = "local"


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine gets a leg.

    Attributes:
        prefill: policy among the P engines.
        decode: policy among the D engines.
        min_prefill_bytes: prompts of which D has to compute less than this skip P, and D prefills by itself; what D
            served before counts as kept. 0 always disaggregates.
    """

    prefill: Policy = "least_loaded"
    decode: Policy = "least_loaded"
    min_prefill_bytes: Count = 0


class KeysConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Key files: one key per line, `name sha256-of-the-key-in-hex [requests-per-minute]`; read again on SIGHUP.

    Attributes:
        client_file: keys of clients; null lets everyone in.
        admin_file: keys of operators; null turns `/admin` off.
    """

    client_file: str | None = None
    admin_file: str | None = None


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces.

    Attributes:
        otlp_url: a collector's OTLP/HTTP endpoint, e.g. `http://localhost:4318/v1/traces`; null traces nothing and
            passes the client's `traceparent` on as it is.
        service_name: under which the proxy appears.
        sample_ratio: share of the requests without a caller's decision that are traced.
    """

    otlp_url: str | None = None
    service_name: str = "pd-proxy"
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The proxy.

    Attributes:
        structured_output: `prepare`: P does no grammar work and D compiles meanwhile; `strip`: P does none, D compiles
            when the decode leg arrives; `naive`: both legs carry the constraint, as other proxies do.
        constraint_in_prompt: whether the model's chat template renders `response_format` or `tool_choice`; then they
            stay on the prefill leg, which is marked so that P renders them without compiling.
        dialect: what the engines speak: ours (`pd`) or plain vLLM (`vllm`).
        warm_up_min_bytes: `vllm` only: a smaller constraint gets no warm-up request, which costs D more than compiling.
        max_body_bytes: larger request bodies answer 413; counted after decompression.
        tracing: where traces go.
        keys: who may come in.
        tls: HTTPS towards clients.
        engine_tls: HTTPS towards engines whose URL says so.
        cors_origins: browser origins that may call, `*` for all.
        engine_api_key: sent to the engines instead of the client's `Authorization`; null forwards the client's.
        keepalive_s: idle connections to engines are closed after this long; below the engines' own limit.
        log_json: log lines as JSON instead of for a person's eyes.
        drain_s: how long requests may finish after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    fleet: FleetConfig = FleetConfig()
    structured_output: Literal["prepare", "strip", "naive"] = "prepare"
    constraint_in_prompt: bool = False
    dialect: Literal["pd", "vllm"] = "pd"
    warm_up_min_bytes: Count = 4096
    timeouts: TimeoutConfig = TimeoutConfig()
    admission: AdmissionConfig = AdmissionConfig()
    retries: RetryConfig = RetryConfig()
    routing: RoutingConfig = RoutingConfig()
    max_body_bytes: Positive = 64 << 20
    tracing: TracingConfig = TracingConfig()
    keys: KeysConfig = KeysConfig()
    tls: TlsConfig = TlsConfig()
    engine_tls: PeerTlsConfig = PeerTlsConfig()
    cors_origins: tuple[str, ...] = ()
    engine_api_key: str | None = None
    keepalive_s: Seconds = 4.0
    log_json: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_s: Seconds = 30.0
