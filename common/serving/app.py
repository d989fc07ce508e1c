"""The aiohttp application of an engine: routes, one place for errors, one for API keys.

Owns: paths and middleware. Does not know: what is behind a route; while the model loads there is nothing.
"""

import hmac
from dataclasses import dataclass

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.errors import (
    AuthenticationFailed,
    Bug,
    ClientError,
    MethodNotAllowed,
    NotFound,
    OverloadError,
    PayloadTooLarge,
    PDError,
)
from common.openai.error_body import error_answer
from common.serving.chat import ChatRoute
from common.serving.completions import CompletionRoute
from common.serving.health import HealthRoutes
from common.serving.kv_routes import KvRoutes
from common.serving.metrics import MetricsRoute
from common.serving.prepare import PrepareRoute
from common.serving.surface import Surface
from common.serving.tokenize import TokenizeRoutes
from common.serving.tracing import EngineTraces, announce
from common.telemetry import metrics
from common.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/kv/handshake"})
"""Answered without an API key: probes, scrapes, and the handshake, which has its own secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What differs between engines.

    Attributes:
        role: `prefill` or `decode`.
        engine_id: of this process.
        max_body_bytes: larger bodies answer 413.
        api_key: what `Authorization: Bearer` must hold; None lets everyone in.
    """

    role: str
    engine_id: str
    max_body_bytes: int = 64 << 20
    api_key: str | None = None


def build_app(
    surface: Surface, registry: Metrics, settings: AppSettings, traces: EngineTraces | None = None
) -> web.Application:
    """The application; its routes answer 503 until `surface` is open."""
    middlewares = [_answering_errors(registry), _checking_key(settings.api_key)]
    if traces is not None:
        middlewares.insert(0, traces.middleware())
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_bytes)
    if traces is not None:
        app.on_response_prepare.append(announce)
    health = HealthRoutes(surface, settings.role, settings.engine_id)
    kv, tokenize = KvRoutes(surface), TokenizeRoutes(surface)
    app.add_routes(
        [
            web.get("/health", health.health),
            web.get("/ready", health.ready),
            web.get("/metrics", MetricsRoute(registry).scrape),
            web.get("/v1/models", health.models),
            web.post("/v1/completions", CompletionRoute(surface).complete),
            web.post("/v1/chat/completions", ChatRoute(surface).complete),
            web.post("/prepare", PrepareRoute(surface).prepare),
            web.post("/tokenize", tokenize.tokenize),
            web.post("/detokenize", tokenize.detokenize),
            web.get("/kv/handshake", kv.offer),
            web.post("/kv/handshake", kv.answer),
            web.post("/kv/release", kv.release),
        ]
    )
    return app


def _answering_errors(registry: Metrics) -> Middleware:
    """Every exception becomes its status and OpenAI body; every answer is counted."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Have the request handled; its answer, or what its exception says."""
        try:
            response = await handler(request)
        except ConnectionError:
            raise  # the client has gone: there is nobody to answer
        except Exception as error:  # noqa: BLE001 - the one place where exceptions become HTTP
            response = _error_response(_named(error, request))
        if request.path not in OPEN_PATHS:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "unknown"
            registry.count(metrics.REQUESTS, route, str(response.status))
        return response

    return answer


def _named(error: Exception, http: web.Request) -> Exception:
    """The server's own refusals as ours; what nobody expected goes to the log with its trace."""
    match error:
        case web.HTTPNotFound():
            return NotFound(f"there is no {http.path} here")
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowed(f"{http.path} does not take {http.method}")
        case web.HTTPRequestEntityTooLarge():
            return PayloadTooLarge("the body is larger than this engine takes")
        case ClientError() | OverloadError():
            return error
        case PDError() if not isinstance(error, Bug):
            _log.warning("request.failed", path=http.path, error=str(error))
        case _:
            _log.error("request.crashed", path=http.path, error=repr(error), exc_info=error)
    return error


def _error_response(error: Exception) -> web.Response:
    answer = error_answer(error)
    return web.Response(status=answer.status, body=answer.body, headers=dict(answer.headers))


def _checking_key(api_key: str | None) -> Middleware:
    """Refuse requests without the key, in time that does not depend on how wrong it is."""
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle the request if it brings the key or needs none."""
        if expected is not None and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                raise AuthenticationFailed("a valid API key is needed: Authorization: Bearer <key>")
        return await handler(request)

    return check
