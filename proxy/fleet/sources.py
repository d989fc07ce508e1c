"""Whoever else may bring engines into the fleet: a file, DNS, a cluster.

Owns: which of them the settings ask for. Does not know: how each of them works.
"""

from typing import Protocol

from proxy.config import FleetConfig
from proxy.fleet.file_source import FileSource
from proxy.fleet.kubernetes_source import KubernetesSource
from proxy.fleet.membership import Fleet
from proxy.fleet.srv_source import SrvSource


class FleetSource(Protocol):
    """Keeps a part of the fleet up to date."""

    async def run(self) -> None:
        """Follow until cancelled."""
        ...


def make_sources(config: FleetConfig, fleet: Fleet) -> dict[str, FleetSource]:
    """Name → source.

    Raises:
        ConfigError: what a source needs is not installed or makes no sense.
    """
    sources: dict[str, FleetSource] = {}
    if config.file is not None:
        sources["fleet-file"] = FileSource(config.file, fleet, config.file_poll_s)
    if config.srv is not None:
        sources["fleet-srv"] = SrvSource(config.srv, fleet)
    if config.kubernetes is not None:
        sources["fleet-kubernetes"] = KubernetesSource(config.kubernetes, fleet)
    return sources
