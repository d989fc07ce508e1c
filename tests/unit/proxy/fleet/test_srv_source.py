"""Engines from DNS, asked of a real (if tiny) DNS server on a loopback port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from common.clock import ManualClock
from common.errors import ConfigError
from proxy.config import FleetConfig, SrvConfig
from proxy.fleet.membership import Fleet
from proxy.fleet.srv_source import SrvSource
from proxy.fleet.worker import Role

P, D = "_http._tcp.p.test", "_http._tcp.d.test"


class DnsServer(asyncio.DatagramProtocol):
    """Answers SRV questions from a table; a name that is not in it does not exist."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.ttl_s = 30
        self.rcode: dns.rcode.Rcode | None = None
        self.num_asked = 0
        self.port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.num_asked += 1
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        name = query.question[0].name
        records = self.records.get(str(name).rstrip("."))
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif records is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif records:
            answer.answer.append(dns.rrset.from_text(name, self.ttl_s, "IN", "SRV", *records))
        self.transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(DnsServer, local_addr=("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()


def following(server: DnsServer, **keys: str | float) -> tuple[SrvSource, Fleet]:
    fleet = Fleet(FleetConfig(decode=("http://static:1",)), ManualClock())
    config = SrvConfig(prefill=P, decode=D, nameserver=f"127.0.0.1:{server.port}", **keys)
    return SrvSource(config, fleet), fleet


def urls(fleet: Fleet, role: Role) -> set[str]:
    return {worker.url for worker in fleet.of(role)}


async def test_the_fleet_follows_the_records_and_keeps_what_others_brought() -> None:
    async with dns_server() as server:
        source, fleet = following(server)
        server.records = {P: ["0 5 8100 p1.test.", "0 5 8101 p2.test."], D: ["10 1 8200 d1.test."]}
        await source.look()
        assert urls(fleet, Role.PREFILL) == {"http://p1.test:8100", "http://p2.test:8101"}
        assert urls(fleet, Role.DECODE) == {"http://static:1", "http://d1.test:8200"}
        server.records = {P: ["0 5 8101 p2.test."], D: []}
        await source.look()
        assert urls(fleet, Role.PREFILL) == {"http://p2.test:8101"}
        assert urls(fleet, Role.DECODE) == {"http://static:1"}


async def test_only_the_records_to_be_used_first_are_taken() -> None:
    async with dns_server() as server:
        source, fleet = following(server, scheme="https")
        server.records[P] = ["20 1 1 backup.test.", "10 1 1 a.test.", "10 9 1 b.test."]
        await source.look()
        assert urls(fleet, Role.PREFILL) == {"https://a.test:1", "https://b.test:1"}


async def test_a_name_that_is_gone_has_no_engines_but_a_server_in_trouble_takes_none_away() -> None:
    async with dns_server() as server:
        source, fleet = following(server)
        server.records = {P: ["0 5 8100 p1.test."]}
        await source.look()
        server.rcode = dns.rcode.REFUSED
        await source.look()
        assert urls(fleet, Role.PREFILL) == {"http://p1.test:8100"}
        server.rcode, server.records = None, {}
        await source.look()
        assert urls(fleet, Role.PREFILL) == set()


async def test_records_are_asked_for_again_when_the_first_of_them_is_too_old() -> None:
    async with dns_server() as server:
        source, _ = following(server, max_age_s=10.0)
        server.records = {P: ["0 5 8100 p1.test."], D: ["0 5 8200 d1.test."]}
        for ttl_s, age_s in ((30, 10), (7, 7), (0, 1)):
            server.ttl_s = ttl_s
            assert await source.look() == age_s


async def test_following_goes_on_by_itself_until_it_is_cancelled() -> None:
    async with dns_server() as server, asyncio.TaskGroup() as group:
        source, fleet = following(server)
        server.records = {P: ["0 5 8100 p1.test."], D: ["0 5 8200 d1.test."]}
        running = group.create_task(source.run())
        while not urls(fleet, Role.PREFILL):  # noqa: ASYNC110 - the source has no event
            await asyncio.sleep(0)
        running.cancel()


def test_a_nameserver_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="nameserver"):
        SrvSource(SrvConfig(prefill=P, nameserver="here:there"), Fleet(FleetConfig(), ManualClock()))
