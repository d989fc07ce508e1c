"""Orders of `--workers N`: given to one process, carried out by all, and by those that come later."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.clock import ManualClock
from proxy.config import FleetConfig
from proxy.fleet.membership import Fleet
from proxy.fleet.worker import Role, WorkerState
from proxy.orders import AbortOrder, FleetOrder, Look, Order, Orders, Report, joined
from proxy.running_requests import RunningRequests
from proxy.siblings import Siblings

ADD = FleetOrder(action="add", role="decode", url="http://new:1")


@dataclass
class Process:
    """One of them: what it was ordered, and what it says."""

    path: Path
    ordered: list[Order] = field(default_factory=list)
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self.siblings = Siblings(self.path, self.obey)

    def obey(self, order: Order) -> Report:
        self.ordered.append(order)
        return self.report


async def test_an_order_reaches_every_other_process_and_their_reports_come_back(tmp_path: Path) -> None:
    first, *others = [Process(tmp_path / f"worker-{n}.json", report=Report(num_aborted=n)) for n in range(3)]
    order = AbortOrder(request_id="id", owner="ann")
    async with first.siblings.listening(), others[0].siblings.listening(), others[1].siblings.listening():
        reports = await first.siblings.tell(order)
    assert sorted(report.num_aborted for report in reports) == [1, 2]
    assert [process.ordered for process in (first, *others)] == [[], [order], [order]]


async def test_a_process_that_starts_later_carries_out_what_was_ordered_before_it_came(tmp_path: Path) -> None:
    first, late = Process(tmp_path / "worker-0.json"), Process(tmp_path / "worker-1.json")
    async with first.siblings.listening():
        for order in (ADD, Look(), AbortOrder(request_id="id", owner=None)):
            await first.siblings.tell(order)
        async with late.siblings.listening():
            assert late.ordered == [ADD]


async def test_a_process_that_is_gone_or_makes_no_sense_is_left_out(tmp_path: Path) -> None:
    first, second = Process(tmp_path / "worker-0.json"), Process(tmp_path / "worker-1.json")

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        writer.write(b"\xff\xff\xff\xff")
        writer.close()

    babbler = await asyncio.start_unix_server(babble, tmp_path / "worker-2.sock")
    (tmp_path / "worker-3.sock").touch()
    async with first.siblings.listening(), second.siblings.listening():
        assert await first.siblings.tell(Look()) == [Report()]
    babbler.close()


async def test_a_process_that_comes_back_takes_the_place_of_the_lost_one(tmp_path: Path) -> None:
    first, second = Process(tmp_path / "worker-0.json"), Process(tmp_path / "worker-1.json")
    lost = await asyncio.start_unix_server(lambda *_: None, tmp_path / "worker-1.sock")
    lost.close()
    (tmp_path / "worker-1.sock").touch()
    async with first.siblings.listening(), second.siblings.listening():
        assert len(await first.siblings.tell(ADD)) == 1
        assert second.ordered == [ADD]


def fleet(url: str = "http://d:1") -> tuple[Fleet, Orders]:
    made = Fleet(FleetConfig(decode=(url,)), ManualClock())
    return made, Orders(made, RunningRequests())


def test_several_views_of_one_engine_are_told_as_one_with_loads_added_and_the_worst_health() -> None:
    views = []
    for number, state in enumerate([WorkerState.READY, WorkerState.DRAINING]):
        made, orders = fleet()
        (worker,) = made.of(Role.DECODE)
        worker.move_to(state)
        worker.load(10 * (number + 1))
        views.append(msgspec.json.decode(msgspec.json.encode(orders.obey(Look())), type=Report))
    _, other = fleet("http://d:2")
    both, alone = joined([*views, other.obey(Look())]).engines
    assert (both.url, both.state, both.circuit, both.num_legs, both.outstanding_bytes) == (
        *("http://d:1", "draining", "closed"),
        *(2, 30),
    )
    assert (alone.url, alone.state) == ("http://d:2", "starting")
