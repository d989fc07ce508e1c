"""Engines named by DNS SRV records (RFC 2782), asked for again as they grow old.

Owns: the questions, turning records into URLs, what an answer that fails means. dnspython is used here only.
"""

import asyncio
from typing import TYPE_CHECKING

import structlog

from common.errors import ConfigError
from proxy.config import SrvConfig
from proxy.fleet.membership import Fleet, Source
from proxy.fleet.worker import Role

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.resolver import Answer

_log = structlog.get_logger(__name__)
_LEAST_AGE_S = 1.0
_ANSWER_WITHIN_S = 5.0
_DNS_PORT = 53


class SrvSource:
    """Follows one SRV name per role.

    Args:
        config: the names, and whom to ask.
        fleet: what follows them.

    Raises:
        ConfigError: dnspython is not installed, or the nameserver is no address.
    """

    def __init__(self, config: SrvConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._resolver = _resolver(config.nameserver)
        names = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        self._names = {role: name for role, name in names.items() if name is not None}
        self._known: dict[Role, tuple[str, ...]] = {}
        self._is_failing = False

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            age_s = await self.look()
            await asyncio.sleep(age_s)

    async def look(self) -> float:
        """Ask once for every name; the seconds until the first answer is too old.

        A name that does not exist has no engines; while nobody answers, what was known holds.
        """
        from dns.exception import DNSException
        from dns.resolver import NXDOMAIN, NoAnswer

        age_s = self._config.max_age_s
        for role, name in self._names.items():
            try:
                answer = await self._resolver.resolve(name, "SRV", lifetime=_ANSWER_WITHIN_S)
            except (NXDOMAIN, NoAnswer):
                self._known[role] = ()
            except (DNSException, OSError) as error:
                self._report(name, error)
                continue
            else:
                self._known[role] = self._urls(answer)
                age_s = min(age_s, answer.rrset.ttl if answer.rrset is not None else age_s)
            self._is_failing = False
        self._fleet.apply(Source.SRV, self._known)
        return max(_LEAST_AGE_S, age_s)

    def _urls(self, answer: "Answer") -> tuple[str, ...]:
        """Of the records that are to be used first (lowest priority number); weights are the routing policy's part."""
        best = min(record.priority for record in answer)
        hosts = [(str(r.target).rstrip("."), r.port) for r in answer if r.priority == best]
        return tuple(sorted(f"{self._config.scheme}://{host}:{port}" for host, port in hosts))

    def _report(self, name: str, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.warning("fleet.srv_unanswered", name=name, reason=str(error) or type(error).__name__)


def _resolver(nameserver: str | None) -> "Resolver":
    try:
        from dns.asyncresolver import Resolver
    except ImportError as error:
        raise ConfigError("fleet.srv needs the extra `dns`: pip install pd-serve[dns]") from error
    if nameserver is None:
        resolver = Resolver()
    else:
        resolver = Resolver(configure=False)
        host, _, port = nameserver.partition(":")
        try:
            resolver.nameservers = [host]
            resolver.port = int(port or _DNS_PORT)
        except ValueError as error:
            raise ConfigError(f"fleet.srv.nameserver: {nameserver!r} is no address") from error
    resolver.cache = None
    return resolver
