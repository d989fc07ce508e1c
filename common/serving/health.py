"""`/health` (the process lives), `/ready` (it can serve), `/v1/models`.

Owns: these three answers. Does not know: how readiness comes about.
"""

import msgspec
from aiohttp import web

from common.errors import EngineError
from common.openai.responses import ModelCard, ModelList
from common.serving.surface import Surface

JSON = "application/json"


class HealthRoutes:
    """Status routes of one engine.

    Args:
        surface: what is behind the routes.
        role: `prefill` or `decode`, shown to who asks.
        engine_id: of this process; a restart shows another one.
    """

    def __init__(self, surface: Surface, role: str, engine_id: str) -> None:
        self._surface = surface
        self._identity = {"role": role, "engine_id": engine_id}

    async def health(self, _: web.Request) -> web.Response:
        """200 while the process can answer and its threads live."""
        if not self._surface.is_alive:
            raise EngineError("the engine has died")
        return web.json_response({"status": "ok", **self._identity})

    async def ready(self, _: web.Request) -> web.Response:
        """200 when requests are taken, else 503 that says why."""
        parts = self._surface.require()
        return web.json_response({"status": "ready", "model": parts.model.name, **self._identity})

    async def models(self, _: web.Request) -> web.Response:
        """The one served model."""
        model = self._surface.require().model
        card = ModelCard(
            id=model.name, created=model.created_s, root=model.root, max_model_len=model.max_model_len_tokens
        )
        return web.Response(body=msgspec.json.encode(ModelList(data=[card])), content_type=JSON)
