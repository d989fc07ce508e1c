from enum import Enum

import pytest

from common.errors import IllegalTransition
from common.state_machine import Transitions


class Light(Enum):
    RED = "red"
    GREEN = "green"
    OFF = "off"


TABLE = Transitions({Light.RED: {Light.GREEN, Light.OFF}, Light.GREEN: {Light.RED}, Light.OFF: set()})


def test_moves_of_the_table_pass_and_others_are_a_bug() -> None:
    TABLE.check(Light.RED, Light.GREEN)
    with pytest.raises(IllegalTransition, match="GREEN -> OFF"):
        TABLE.check(Light.GREEN, Light.OFF)


def test_a_table_that_forgets_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="OFF"):
        Transitions({Light.RED: {Light.GREEN}, Light.GREEN: {Light.RED}})


def test_a_state_without_targets_is_final() -> None:
    assert [state for state in Light if TABLE.is_final(state)] == [Light.OFF]
    assert TABLE.targets(Light.RED) == {Light.GREEN, Light.OFF}
