from common.engine.admission import make_choices
from common.engine.scheduling.queue import WaitingQueue
from tests.support.fake_engine import ask


def test_requests_come_in_order_of_arrival_whenever_they_were_pushed() -> None:
    queue = WaitingQueue()
    requests = [make_choices(ask(str(order), [1]), order, frozenset())[0] for order in (2, 0, 1)]
    for request in requests:
        queue.push(request)
    assert [request.key for request in queue] == ["0", "1", "2"]
    assert queue.newest() is requests[0]


def test_members_may_leave_while_it_is_walked() -> None:
    queue = WaitingQueue()
    for order in range(3):
        queue.push(make_choices(ask(str(order), [1]), order, frozenset())[0])
    for request in queue:
        queue.remove(request)
    assert len(queue) == 0
    assert queue.newest() is None
