"""KV over real NIXL between two processes: the bytes of every token, over shared memory and over tcp."""

from collections.abc import Iterator

import pytest

from kv_transfer.interface import FailureCause, TransferStatus
from tests.support.kv_real import SHARED_MEMORY, TCP, Process, Reader, holds_tokens_of, reading, running, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=[SHARED_MEMORY, TCP], ids=["sm", "tcp"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    environment: dict[str, str] = request.param
    return environment


@pytest.fixture(scope="module")
def producer(environment: dict[str, str]) -> Iterator[Process]:
    with running(environment=environment) as process:
        yield process


@pytest.fixture(scope="module")
def reader(environment: dict[str, str]) -> Iterator[Reader]:
    with reading(environment) as reader:
        yield reader


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 1000])
def test_the_bytes_of_every_token_arrive_and_p_gets_its_blocks_back(
    producer: Process, reader: Reader, num_tokens: int
) -> None:
    reader.pool[:] = 0
    num_blocks = -(-num_tokens // 16)
    scattered = [(i * 37 + 11) % 64 for i in range(num_blocks)]
    reference = producer.hold(f"r{num_tokens}", scattered, num_tokens)
    assert reader.pull(f"r{num_tokens}", reference).status is TransferStatus.DONE
    assert holds_tokens_of(reader, producer, reference)
    assert not reader.pool[num_blocks:].any()
    until(lambda: producer.stats()["held"] == 0)


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_sizes_may_differ(producer: Process, environment: dict[str, str], block_size: int) -> None:
    with reading(environment, block_size) as reader:
        reference = producer.hold(f"size{block_size}", [5, 1, 60, 61, 33], 77)
        assert reader.pull("r", reference).status is TransferStatus.DONE
        assert holds_tokens_of(reader, producer, reference)


def test_a_lease_that_p_gave_up_is_not_read(producer: Process, reader: Reader) -> None:
    reader.pool[:] = 0
    reference = producer.hold("gone", [1, 2, 3], 48)
    assert producer.ask({"do": "release", "lease_id": reference.lease_id}) is True
    assert reader.pull("gone", reference).cause is FailureCause.EXPIRED
    assert not reader.pool.any()


def test_many_pulls_at_once_each_get_their_own_bytes(producer: Process, reader: Reader) -> None:
    references = [producer.hold(f"many{i}", [i, 63 - i], 32) for i in range(16)]
    for i, reference in enumerate(references):
        reader.start(f"many{i}", reference, first_block=2 * i)
    ended = []
    until(lambda: len(ended.extend(reader.consumer.poll()) or ended) == 16)  # type: ignore[func-returns-value]
    assert all(outcome.status is TransferStatus.DONE for outcome in ended)
    assert holds_tokens_of(reader, producer, references[0])
    until(lambda: producer.stats()["held"] == 0)
