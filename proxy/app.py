"""The proxy's HTTP surface: which path leads where, who may take it, errors as OpenAI JSON (journey row 1).

Owns: the route table and the last resort for whatever a handler raises. Does not know: what handlers do.
"""

import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import structlog
from aiohttp import web

from common.errors import MethodNotAllowed, NotFound, PermissionRefused
from common.openai.error_body import error_answer
from proxy.access import KeyRing
from proxy.admin_routes import AdminRoutes
from proxy.cors import Cors
from proxy.generation import Generation, LegHeaders
from proxy.goodbyes import Goodbyes
from proxy.incoming import REQUEST_ID, Handler, Incoming
from proxy.plain_routes import PlainRoutes
from proxy.relay import passed_through
from proxy.running_requests import RunningRequests
from proxy.services import Services
from proxy.upstream import EngineRefused

_log = structlog.get_logger(__name__)


class _Door(Enum):
    OPEN = "open"
    CLIENT = "client"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class _Route:
    door: _Door
    handlers: Mapping[str, Handler]


class ProxyApp:
    """Answers every request, one way or another.

    Args:
        services: collaborators of the process.
        clients: keys of clients.
        admins: keys of operators.
    """

    def __init__(self, services: Services, clients: KeyRing, admins: KeyRing) -> None:
        self._clients = clients
        self._admins = admins
        self._cors = Cors(services.config.cors_origins)
        self._id_prefix = f"req-{secrets.token_hex(8)}-"
        self._id_numbers = itertools.count(1)
        running = RunningRequests()
        self._goodbyes = Goodbyes()
        config = services.config
        leg_headers = LegHeaders(
            config.engine_api_key, forwards_key=clients.is_open, unique_ids=config.dialect == "vllm"
        )
        generation = Generation(services, running, leg_headers, self._goodbyes)
        plain = PlainRoutes(services, leg_headers)
        admin = AdminRoutes(services.fleet, running, services.config)
        self._routes = {
            "/v1/completions": _Route(_Door.CLIENT, {"POST": generation.handle}),
            "/v1/chat/completions": _Route(_Door.CLIENT, {"POST": generation.handle}),
            "/v1/responses": _Route(_Door.CLIENT, {"POST": generation.handle_responses}),
            "/tokenize": _Route(_Door.CLIENT, {"POST": plain.ask_engine}),
            "/detokenize": _Route(_Door.CLIENT, {"POST": plain.ask_engine}),
            "/abort": _Route(_Door.CLIENT, {"POST": admin.abort}),
            "/v1/models": _Route(_Door.CLIENT, {"GET": plain.models}),
            "/health": _Route(_Door.OPEN, {"GET": plain.health}),
            "/ready": _Route(_Door.OPEN, {"GET": plain.ready}),
            "/metrics": _Route(_Door.OPEN, {"GET": plain.metrics}),
            "/openapi.json": _Route(_Door.OPEN, {"GET": plain.openapi}),
            "/admin/fleet": _Route(_Door.ADMIN, {"GET": admin.show, "POST": admin.change}),
        }

    @property
    def paths(self) -> dict[str, frozenset[str]]:
        """Path → methods."""
        return {path: frozenset(route.handlers) for path, route in self._routes.items()}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The one entry: finds the handler and turns whatever it raises into an answer."""
        answer_headers = self._cors.headers(request.headers)
        self._goodbyes.take_back(request.protocol)
        try:
            response = await self._dispatch(request, answer_headers)
        except ConnectionResetError:
            raise  # the client is gone; there is nobody to answer
        except Exception as error:  # noqa: BLE001 - the edge: everything becomes an answer, bugs are logged
            response = self._failure(error, request)
        if not response.prepared:
            response.headers.update(answer_headers)
        return response

    async def _dispatch(self, request: web.BaseRequest, answer_headers: Mapping[str, str]) -> web.StreamResponse:
        route = self._routes.get(request.path)
        if route is None:
            raise NotFound(f"there is no {request.path}")
        if request.method == "OPTIONS" and answer_headers:
            return web.Response(status=204, headers=self._cors.preflight(request.headers, ", ".join(route.handlers)))
        handler = route.handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise MethodNotAllowed(f"{request.path} takes {', '.join(route.handlers)}")
        incoming = Incoming(
            http=request,
            owner=self._admit(route.door, request.headers),
            request_id=request.headers.get(REQUEST_ID) or f"{self._id_prefix}{next(self._id_numbers)}",
            answer_headers=answer_headers,
        )
        return await handler(incoming)

    def _admit(self, door: _Door, headers: Mapping[str, str]) -> str | None:
        if door is _Door.OPEN:
            return None
        if door is _Door.CLIENT:
            return self._clients.admit(headers)
        if self._admins.is_open:
            raise PermissionRefused("administration is off: proxy.keys.admin_file names no key file")
        return self._admins.admit(headers)

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
