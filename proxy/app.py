"""The proxy's HTTP surface: paths, reading bodies, errors as OpenAI JSON (journey row 1).

Owns: the routes and the mapping request → `Call`. Does not know: what happens on a journey.
"""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, PayloadEncodingError

from common.clock import Deadline
from common.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    PayloadTooLarge,
    PDError,
)
from common.openai.error_body import error_answer
from common.tasks import only_cause
from proxy.call import Call, make_call
from proxy.fan_out import FanOut, prompts_of
from proxy.fleet.worker import Role
from proxy.journey import Journey
from proxy.metrics import CONTENT_TYPE as METRICS_TYPE
from proxy.relay import REQUEST_ID, HttpClient, passed_through
from proxy.services import Services, bounded
from proxy.upstream import EngineRefused

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = structlog.get_logger(__name__)
_JSON = "application/json"


class _ModelCard(msgspec.Struct):
    id: str = ""


class ProxyApp:
    """Answers every request, one way or another.

    Args:
        services: collaborators of the process.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._id_prefix = f"req-{secrets.token_hex(8)}-"
        self._id_numbers = itertools.count(1)
        self._fixed_headers = {"Content-Type": _JSON}
        if services.config.engine_api_key is not None:
            self._fixed_headers["Authorization"] = f"Bearer {services.config.engine_api_key}"
        # What both legs carry of the client's headers; all others, internal ones too, stay outside.
        self._forwarded = ["traceparent", "tracestate"]
        if services.config.engine_api_key is None:
            self._forwarded.append("Authorization")
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": self._generate},
            "/v1/chat/completions": {"POST": self._generate},
            "/tokenize": {"POST": self._ask_engine},
            "/detokenize": {"POST": self._ask_engine},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The one entry: finds the handler and turns whatever it raises into an answer."""
        try:
            return await self._find(request)(request)
        except ConnectionResetError:
            raise  # the client is gone; there is nobody to answer
        except Exception as error:  # noqa: BLE001 - the edge: everything becomes an answer, bugs are logged
            return self._failure(error, request)

    def _find(self, request: web.BaseRequest) -> Handler:
        methods = self._routes.get(request.path)
        if methods is None:
            raise NotFound(f"there is no {request.path}")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise MethodNotAllowed(f"{request.path} takes {', '.join(methods)}")
        return handler

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        services = self._services
        received_s = services.clock.now_s()
        request_id = request.headers.get(REQUEST_ID) or self._new_id()
        call = make_call(
            request.path,
            await self._read(request),
            headers=self._leg_headers(request, request_id),
            request_id=request_id,
            received_s=received_s,
            deadline=Deadline(services.clock, received_s + services.config.timeouts.request_s),
        )
        client = HttpClient(request, call, services.config.timeouts.stream_idle_s)
        try:
            async with services.admission.slot():
                await self._serve(call, client)
        except (PDError, BaseExceptionGroup) as error:
            await self._fail(client, error)
        if client.response is None:
            raise RuntimeError("a journey ended without an answer")
        return client.response

    async def _serve(self, call: Call, client: HttpClient) -> None:
        prompts = prompts_of(call)
        if prompts:
            await FanOut(call, prompts, self._services).run(client)
        else:
            await Journey(call, self._services).run(client)

    async def _fail(self, client: HttpClient, error: BaseException) -> None:
        """Answer with `error`, as an event where a stream has begun, as a response by raising it where none has."""
        cause = only_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if client.response is None or not isinstance(cause, PDError):
            raise cause
        await client.break_off(cause)

    def _new_id(self) -> str:
        """Unique among all proxies and over restarts."""
        return f"{self._id_prefix}{next(self._id_numbers)}"

    async def _read(self, request: web.BaseRequest) -> bytes:
        if (request.content_length or 0) > self._services.config.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._services.config.timeouts.body_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise self._too_large() from error
        except (web.RequestPayloadError, PayloadEncodingError, ContentEncodingError) as error:
            raise InvalidRequest("the body could not be read: it is cut off or not encoded as declared") from error
        except TimeoutError as error:
            raise InvalidRequest("the body did not arrive in time") from error

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body may have at most {self._services.config.max_body_bytes} bytes")

    def _leg_headers(self, request: web.BaseRequest, request_id: str) -> dict[str, str]:
        headers = {**self._fixed_headers, REQUEST_ID: request_id}
        for name in self._forwarded:
            value = request.headers.get(name)
            if value is not None:
                headers[name] = value
        return headers

    async def _ask_engine(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request)
        for role in (Role.PREFILL, Role.DECODE):
            worker = next(iter(self._services.fleet.routable(role)), None)
            if worker is not None:
                headers = self._leg_headers(request, request.headers.get(REQUEST_ID) or self._new_id())
                limit_s = self._services.config.timeouts.first_token_s
                deadline = Deadline.after(self._services.clock, limit_s)
                leg = self._services.upstream.ask(worker, request.path, body, headers)
                return passed_through(await bounded(worker, deadline, limit_s, leg))
        raise NotReady("no engine is ready")

    async def _models(self, _: web.BaseRequest) -> web.StreamResponse:
        if not self._services.fleet.is_ready():
            raise NotReady("the engines are not ready yet")
        cards: dict[str, bytes] = {}
        for worker in self._services.fleet.all():
            for raw in worker.models:
                cards.setdefault(msgspec.json.decode(raw, type=_ModelCard).id, raw)
        body = msgspec.json.encode({"object": "list", "data": [msgspec.Raw(raw) for raw in cards.values()]})
        return web.Response(body=body, content_type=_JSON)

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"status":"ok"}', content_type=_JSON)

    async def _ready(self, _: web.BaseRequest) -> web.StreamResponse:
        if not self._services.fleet.is_ready():
            raise NotReady("waiting for at least one prefill and one decode engine")
        return web.Response(body=b'{"status":"ready"}', content_type=_JSON)

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=self._services.metrics.expose(), headers={"Content-Type": METRICS_TYPE})

    def _failure(self, error: Exception, request: web.BaseRequest) -> web.Response:
        if isinstance(error, EngineRefused):
            response = passed_through(error.answer)
        else:
            answer = error_answer(error)
            if answer.status == 500:
                _log.error("request.failed", path=request.path, exc_info=error)
            response = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        request_id = request.headers.get(REQUEST_ID)
        if request_id is not None:
            response.headers[REQUEST_ID] = request_id
        return response
