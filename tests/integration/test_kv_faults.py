"""KV over real NIXL with a P or a D that dies, stops, restarts, hangs or is not there; each ends in time, by name."""

import signal
import socket

import msgspec
import pytest

from common.ids import EngineId, RequestId
from kv_transfer.interface import FailureCause, TransferStatus
from kv_transfer.reference import sign
from tests.support.kv_real import (
    SECRET,
    SHARED_MEMORY,
    TCP,
    Process,
    fresh_name,
    holds_tokens_of,
    reading,
    running,
    until,
)

pytestmark = pytest.mark.timeout(120)
ALL_BLOCKS = list(range(64))


@pytest.mark.parametrize("environment", [SHARED_MEMORY, TCP], ids=["sm", "tcp"])
def test_p_killed_before_the_pull_fails_it_in_seconds_and_d_reads_from_the_next_p(environment: dict[str, str]) -> None:
    with reading(environment) as reader:
        with running(environment=environment) as producer:
            assert reader.pull("warm", producer.hold("warm", [1], 16)).status is TransferStatus.DONE
            reference = producer.hold("a", ALL_BLOCKS, 1024)
            reader.consumer.expect(RequestId("a"), reference)
            producer.send(signal.SIGKILL)
            outcome = reader.pull("a", reference)
        assert outcome.status is TransferStatus.FAILED
        assert outcome.cause in (FailureCause.HANDSHAKE_FAILED, FailureCause.DISCONNECTED)
        with running(environment=environment, seed=2, port=producer.hello["port"]) as restarted:
            stale = reader.pull("stale", msgspec.structs.replace(reference))
            assert stale.cause is FailureCause.REFUSED
            reference = restarted.hold("b", [7, 8], 32)
            assert reader.pull("b", reference).status is TransferStatus.DONE
            assert holds_tokens_of(reader, restarted, reference)


def test_p_killed_during_the_pull_fails_it_and_its_blocks_are_free() -> None:
    with reading(TCP) as reader, running(environment=TCP) as producer:
        assert reader.pull("warm", producer.hold("warm", [1], 16)).status is TransferStatus.DONE
        reference = producer.hold("a", ALL_BLOCKS, 1024)
        producer.send(signal.SIGSTOP)  # so that the pull is surely under way
        reader.start("a", reference)
        until(lambda: reader.consumer.stats().pulls_running == 1)
        assert not reader.has_outcome(0.3)
        producer.send(signal.SIGKILL)
        outcome = reader.outcome()
        assert outcome.status is TransferStatus.FAILED
        assert reader.consumer.stats().pulls_running == 0


def test_a_pull_aborted_while_p_is_stopped_in_the_middle_ends_when_the_bytes_have_ended() -> None:
    with reading(TCP) as reader, running(environment=TCP) as producer:
        assert reader.pull("warm", producer.hold("warm", [1], 16)).status is TransferStatus.DONE
        reference = producer.hold("a", ALL_BLOCKS, 1024)
        reader.pool[:] = 0
        reader.start("a", reference)
        until(lambda: bool(reader.pool.any()), every_s=0.0005)  # bytes are coming in
        producer.send(signal.SIGSTOP)
        reader.consumer.cancel(RequestId("a"))
        is_early = reader.has_outcome(0.5)
        producer.send(signal.SIGCONT)
        outcome = reader.outcome()
        if not is_early:  # the pull was caught in flight: from its end on, nothing may be written any more
            assert outcome.status is TransferStatus.CANCELLED
        reader.pool[:] = 0
        assert reader.pull("b", producer.hold("b", [3], 16)).status is TransferStatus.DONE
        assert not reader.pool[1:].any()
        until(lambda: producer.stats()["held"] == 0)


def test_a_pull_whose_p_stops_in_the_middle_is_told_late_in_time_and_ends_when_the_bytes_have_ended() -> None:
    with reading(TCP, pull_timeout_s=1.0) as reader, running(environment=TCP) as producer:
        assert reader.pull("warm", producer.hold("warm", [1], 16)).status is TransferStatus.DONE
        reference = producer.hold("a", ALL_BLOCKS, 1024)
        reader.pool[:] = 0
        reader.start("a", reference)
        until(lambda: bool(reader.pool.any()), every_s=0.0005)  # bytes are coming in
        producer.send(signal.SIGSTOP)
        outcome = reader.outcome(limit_s=5.0)
        if outcome.status is TransferStatus.DONE:  # too fast to be caught
            producer.send(signal.SIGCONT)
            return
        assert outcome.cause is FailureCause.TIMEOUT
        was_reading = outcome.status is TransferStatus.LATE
        assert reader.consumer.stats().pulls_running == int(was_reading)
        producer.send(signal.SIGCONT)
        if was_reading:
            assert reader.outcome().status is TransferStatus.CANCELLED
        reader.pool[:] = 0
        assert reader.pull("b", producer.hold("b", [3], 16)).status is TransferStatus.DONE
        assert not reader.pool[1:].any()
        until(lambda: producer.stats()["held"] == 0)


def test_a_stopped_p_is_read_all_the_same_over_shared_memory() -> None:
    """Mostly: UCX sends messages over tcp there, too, and a P that stops just after it was met may hold a read up."""
    for _ in range(4):
        with reading(SHARED_MEMORY) as reader, running(environment=SHARED_MEMORY) as producer:
            assert reader.pull("warm", producer.hold("warm", [1], 16)).status is TransferStatus.DONE
            reference = producer.hold("a", ALL_BLOCKS, 1024)
            producer.send(signal.SIGSTOP)
            reader.start("a", reference)
            was_read = reader.has_outcome(2.0)
            producer.send(signal.SIGCONT)
            assert reader.outcome().status is TransferStatus.DONE
            assert holds_tokens_of(reader, producer, reference)
            if was_read:
                return
    raise AssertionError("a stopped P was never read from")


def test_a_p_stopped_before_the_read_times_the_pull_out_over_tcp() -> None:
    with reading(TCP, pull_timeout_s=1.0) as reader, running(environment=TCP) as producer:
        assert reader.pull("warm", producer.hold("warm", [1], 16)).status is TransferStatus.DONE
        reference = producer.hold("a", ALL_BLOCKS, 1024)
        producer.send(signal.SIGSTOP)
        outcome = reader.pull("a", reference)
        producer.send(signal.SIGCONT)
        assert outcome.cause is FailureCause.TIMEOUT
        until(lambda: producer.stats()["released"]["aborted"] == 1)


def test_a_wrong_port_and_a_port_that_never_answers_fail_in_their_time() -> None:
    with (
        reading(SHARED_MEMORY, handshake_timeout_s=1.0) as reader,
        running() as producer,
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.socket() as closed,
    ):
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        for other in (silent, closed):
            unsigned = msgspec.structs.replace(
                producer.hold("a", [1], 16),
                signature=None,
                remote_port=other.getsockname()[1],
                remote_engine_id=EngineId(fresh_name("P")),
            )
            outcome = reader.pull(f"port{unsigned.remote_port}", sign(unsigned, SECRET.encode()))
            assert outcome.cause is FailureCause.HANDSHAKE_FAILED
        reference = producer.hold("b", [1], 16)
        assert reader.pull("b", reference).status is TransferStatus.DONE


def test_heartbeats_outlive_a_long_grammar_wait_and_a_killed_ds_lease_expires() -> None:
    with running(lease_ttl_s=0.6) as producer:
        reader = Process(engine_id=fresh_name("D"), reads=True)
        reference = producer.hold("a", [1, 2], 32)
        assert reader.ask(reference.to_json()) is True
        with pytest.raises(AssertionError):  # three times the lease's length later it is still held
            until(lambda: producer.stats()["held"] == 0, limit_s=1.8)
        reader.end()
        until(lambda: producer.stats()["held"] == 0)
        assert producer.stats()["released"]["expired"] == 1


def test_an_abandoned_request_frees_p_without_a_read() -> None:
    with reading(SHARED_MEMORY) as reader, running() as producer:
        for i in range(20):
            reader.consumer.expect(RequestId(f"r{i}"), producer.hold(f"r{i}", [i], 16))
            reader.consumer.abandon(RequestId(f"r{i}"))
        until(lambda: producer.stats()["held"] == 0)
        assert producer.stats()["released"]["aborted"] == 20
        assert not reader.pool.any()
