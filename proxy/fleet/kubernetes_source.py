"""Engines named by the EndpointSlices of a Kubernetes cluster: listed once, then watched.

Owns: list, watch, starting again after either ends, turning slices into URLs. The official client is used here only.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from common.errors import ConfigError
from proxy.config import KubernetesConfig
from proxy.fleet.membership import Fleet, Source
from proxy.fleet.worker import Role

if TYPE_CHECKING:
    from kubernetes.aio.client import DiscoveryV1Api, V1EndpointSlice

_log = structlog.get_logger(__name__)
_WATCH_S = 240
"""The server ends a watch after this long; the next one begins with a fresh list."""
_SLACK_S = 30
_GONE = 410


class KubernetesSource:
    """Follows one label selector per role.

    Args:
        config: the selectors, and how the cluster is reached.
        fleet: what follows them.

    Raises:
        ConfigError: the client is not installed.
    """

    def __init__(self, config: KubernetesConfig, fleet: Fleet) -> None:
        try:
            import kubernetes.aio  # noqa: F401 - whether it is there
        except ImportError as error:
            raise ConfigError(
                "fleet.kubernetes needs the extra `kubernetes`: pip install pd-serve[kubernetes]"
            ) from error
        self._config = config
        self._fleet = fleet
        selectors = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        self._selectors = {role: selector for role, selector in selectors.items() if selector is not None}
        self._slices: dict[Role, dict[str, tuple[str, ...]]] = {}
        self._is_failing = False

    async def run(self) -> None:
        """Follow until cancelled; while the cluster does not answer, what was known holds."""
        from kubernetes.aio import client

        configuration = client.Configuration()
        await self._read_access(configuration)
        async with client.ApiClient(configuration) as connection, asyncio.TaskGroup() as group:
            api = client.DiscoveryV1Api(connection)
            for role, selector in self._selectors.items():
                group.create_task(self._follow(api, role, selector))

    async def _read_access(self, configuration: Any) -> None:
        from kubernetes.aio import config as access

        if self._config.kubeconfig is None:
            access.load_incluster_config(client_configuration=configuration)
        else:
            await access.load_kube_config(self._config.kubeconfig, client_configuration=configuration)

    async def _follow(self, api: "DiscoveryV1Api", role: Role, selector: str) -> None:
        from kubernetes.aio.client import ApiException

        while True:
            try:
                async with asyncio.timeout(_WATCH_S + _SLACK_S):
                    await self._list_and_watch(api, role, selector)
            except ApiException as error:
                if error.status == _GONE:
                    continue  # what was listed is too old to be watched from: list again
                await self._pause(selector, f"{error.status} {error.reason}")
            except Exception as error:  # noqa: BLE001 - the client raises bare ones for events it cannot read
                await self._pause(selector, repr(error))

    async def _list_and_watch(self, api: "DiscoveryV1Api", role: Role, selector: str) -> None:
        from kubernetes.aio.watch import Watch

        where = {"namespace": self._config.namespace, "label_selector": selector}
        listed = await api.list_namespaced_endpoint_slice(**where)
        self._slices[role] = {found.metadata.name: self._urls(found) for found in listed.items}
        self._apply()
        self._is_failing = False
        watch = Watch()
        version = listed.metadata.resource_version
        events = watch.stream(
            api.list_namespaced_endpoint_slice, **where, resource_version=version, timeout_seconds=_WATCH_S
        )
        async for event in events:
            changed: V1EndpointSlice = event["object"]
            if event["type"] == "DELETED":
                self._slices[role].pop(changed.metadata.name, None)
            elif event["type"] in ("ADDED", "MODIFIED"):
                self._slices[role][changed.metadata.name] = self._urls(changed)
            self._apply()

    def _apply(self) -> None:
        urls = {role: [url for found in slices.values() for url in found] for role, slices in self._slices.items()}
        self._fleet.apply(Source.KUBERNETES, urls)

    def _urls(self, found: "V1EndpointSlice") -> tuple[str, ...]:
        """Where the slice's ready endpoints listen; readiness that is not stated means ready (API reference)."""
        wanted = self._config.port
        port = next((p.port for p in found.ports or () if wanted is None or p.name == wanted), None)
        if port is None:
            return ()
        urls = []
        for endpoint in found.endpoints or ():
            if endpoint.conditions is not None and endpoint.conditions.ready is False:
                continue
            for address in endpoint.addresses[:1]:  # further ones lead to the same endpoint
                host = f"[{address}]" if found.address_type == "IPv6" else address
                urls.append(f"{self._config.scheme}://{host}:{port}")
        return tuple(urls)

    async def _pause(self, selector: str, reason: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.warning("fleet.kubernetes_unanswered", selector=selector, reason=reason)
        await asyncio.sleep(self._config.retry_s)
