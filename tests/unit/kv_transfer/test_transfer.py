"""The pull's table: every state, and no way out of an end."""

import pytest

from common.errors import IllegalTransition
from kv_transfer.transfer import PULL_TRANSITIONS, PullState


def test_a_read_in_progress_cannot_be_skipped_or_abandoned() -> None:
    assert PullState.ABANDONED not in PULL_TRANSITIONS.targets(PullState.READING)
    assert PullState.DONE not in PULL_TRANSITIONS.targets(PullState.READING)
    with pytest.raises(IllegalTransition):
        PULL_TRANSITIONS.check(PullState.EXPECTED, PullState.READING)


def test_ends_are_final() -> None:
    for state in (PullState.DONE, PullState.FAILED, PullState.CANCELLED, PullState.ABANDONED):
        assert PULL_TRANSITIONS.is_final(state)
