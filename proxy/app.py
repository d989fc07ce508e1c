"""The proxy's HTTP surface: which path leads where, who may take it, errors as OpenAI JSON (journey row 1).

Owns: the route table and the last resort for whatever a handler raises. Does not know: what handlers do.
"""

import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import structlog

from common.errors import MethodNotAllowed, NotFound, PermissionRefused
from common.openai.error_body import error_answer
from proxy.access import KeyRing
from proxy.admin_routes import AdminRoutes
from proxy.cors import Cors
from proxy.generation import Generation, LegHeaders
from proxy.goodbyes import Goodbyes
from proxy.http1.exchange import Exchange, Reply
from proxy.incoming import REQUEST_ID, REQUEST_ID_KEY, Handler, Incoming
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
        running: where requests can be ended by their id.
        admin: what operators may ask.
    """

    def __init__(
        self, services: Services, clients: KeyRing, admins: KeyRing, running: RunningRequests, admin: AdminRoutes
    ) -> None:
        self._clients = clients
        self._admins = admins
        self._cors = Cors(services.config.cors_origins)
        self._id_prefix = f"req-{secrets.token_hex(8)}-"
        self._id_numbers = itertools.count(1)
        self._goodbyes = Goodbyes()
        config = services.config
        leg_headers = LegHeaders(
            config.engine_api_key, forwards_key=clients.is_open, unique_ids=config.dialect == "vllm"
        )
        generation = Generation(services, running, leg_headers, self._goodbyes)
        plain = PlainRoutes(services, leg_headers)
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

    async def handle(self, http: Exchange) -> None:
        """The one entry: finds the handler and turns whatever it raises into an answer.

        Raises:
            ConnectionResetError: the client is gone.
        """
        answer_headers = self._cors.headers(http.head.headers)
        self._goodbyes.take_back(http.wire)
        try:
            reply = await self._dispatch(http, answer_headers)
        except ConnectionResetError:
            raise  # there is nobody to answer
        except Exception as error:
            if http.is_begun:
                raise  # too late for an answer of its own; the server ends the connection
            reply = self._failure(error, http)
        if reply is not None:
            reply.headers.update(answer_headers)
            http.send(reply)

    async def _dispatch(self, http: Exchange, answer_headers: Mapping[str, str]) -> Reply | None:
        head = http.head
        route = self._routes.get(head.path)
        if route is None:
            raise NotFound(f"there is no {head.path}")
        if head.method == "OPTIONS" and answer_headers:
            return Reply(status=204, headers=self._cors.preflight(head.headers, ", ".join(route.handlers)))
        handler = route.handlers.get("GET" if head.method == "HEAD" else head.method)
        if handler is None:
            raise MethodNotAllowed(f"{head.path} takes {', '.join(route.handlers)}")
        incoming = Incoming(
            http=http,
            owner=self._admit(route.door, head.headers),
            request_id=head.headers.get(REQUEST_ID_KEY) or f"{self._id_prefix}{next(self._id_numbers)}",
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

    def _failure(self, error: Exception, http: Exchange) -> Reply:
        if isinstance(error, EngineRefused):
            reply = passed_through(error.answer)
        else:
            answer = error_answer(error)
            if answer.status == 500:
                _log.error("request.failed", path=http.head.path, exc_info=error)
            reply = Reply(answer.body, answer.status, dict(answer.headers))
        request_id = http.head.headers.get(REQUEST_ID_KEY)
        if request_id is not None:
            reply.headers[REQUEST_ID] = request_id
        return reply
