"""The small routes: models, tokenize, health, readiness, metrics.

Owns: their answers. Does not know: generation.
"""

import msgspec

from common.clock import Deadline
from common.errors import NotReady
from proxy import openapi
from proxy.fleet.worker import Role
from proxy.generation import LegHeaders
from proxy.http1.exchange import Reply
from proxy.incoming import Incoming, json_response, read_body
from proxy.metrics import CONTENT_TYPE as METRICS_TYPE
from proxy.relay import passed_through
from proxy.services import Services


class _ModelCard(msgspec.Struct):
    id: str = ""


class PlainRoutes:
    """Their handlers.

    Args:
        services: collaborators of the process.
        leg_headers: what a request to an engine carries.
    """

    def __init__(self, services: Services, leg_headers: LegHeaders) -> None:
        self._services = services
        self._leg_headers = leg_headers
        self._description = openapi.description()

    async def ask_engine(self, incoming: Incoming) -> Reply:
        """Pass a short request to any engine and its answer back."""
        services = self._services
        body = await read_body(incoming.http, services.config)
        for role in Role:
            worker = next(iter(services.fleet.routable(role)), None)
            if worker is not None:
                headers = self._leg_headers.for_request(incoming.http.head.headers, incoming.request_id)
                limit_s = services.config.timeouts.first_token_s
                leg = services.upstream.ask(worker, incoming.http.head.path, body, headers)
                return passed_through(
                    await services.bounded(worker, Deadline.after(services.clock, limit_s), limit_s, leg)
                )
        raise NotReady("no engine is ready")

    async def models(self, _: Incoming) -> Reply:
        """Every model that any engine serves, as the engine describes it."""
        if not self._services.fleet.is_ready():
            raise NotReady("the engines are not ready yet")
        cards: dict[str, bytes] = {}
        for worker in self._services.fleet.all():
            for raw in worker.models:
                cards.setdefault(msgspec.json.decode(raw, type=_ModelCard).id, raw)
        return json_response(b'{"object":"list","data":[' + b",".join(cards.values()) + b"]}")

    async def health(self, _: Incoming) -> Reply:
        """The process lives."""
        return json_response(b'{"status":"ok"}')

    async def ready(self, _: Incoming) -> Reply:
        """Requests can be served."""
        if self._services.admission.is_closed:
            raise NotReady("the proxy is shutting down")
        if not self._services.fleet.is_ready():
            raise NotReady("waiting for at least one prefill and one decode engine")
        return json_response(b'{"status":"ready"}')

    async def openapi(self, _: Incoming) -> Reply:
        """What this surface looks like."""
        return json_response(self._description)

    async def metrics(self, _: Incoming) -> Reply:
        """Prometheus text."""
        shared = self._services.shared_metrics
        text = self._services.metrics.expose(() if shared is None else shared.others())
        return Reply(text, headers={"Content-Type": METRICS_TYPE})
