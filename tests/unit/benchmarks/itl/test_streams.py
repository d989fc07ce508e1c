"""Which gaps count."""

from benchmarks.itl.streams import gaps_in_window


def test_gaps_count_while_every_stream_is_being_decoded() -> None:
    measured = [0.0, 1.0, 3.0, 4.0, 9.0]
    beside = [1.0, 2.0, 5.0]
    assert gaps_in_window([measured, beside], 1) == [2.0, 1.0]


def test_streams_that_are_never_decoded_together_have_no_gaps() -> None:
    assert gaps_in_window([[0.0, 1.0], [2.0, 3.0]], 2) == []
