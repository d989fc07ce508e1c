"""Lifecycles as an enum plus a table of legal moves.

Owns: the table type and its check. Each lifecycle's own `move_to` is the one writer of its state.
"""

from collections.abc import Mapping, Set
from enum import Enum
from typing import Generic, TypeVar

from common.errors import IllegalTransition

StateT = TypeVar("StateT", bound=Enum)


class Transitions(Generic[StateT]):
    """A total table `state -> states it may move to`.

    Raises:
        ValueError: the table leaves out a member of the enum.
    """

    def __init__(self, table: Mapping[StateT, Set[StateT]]) -> None:
        if not table:
            raise ValueError("an empty transition table")
        members = set(type(next(iter(table))))
        if set(table) != members:
            raise ValueError(f"transition table lacks {sorted(m.name for m in members - set(table))}")
        self._table = {state: frozenset(targets) for state, targets in table.items()}

    def check(self, current: StateT, target: StateT) -> None:
        """Raise `IllegalTransition` unless `current -> target` is in the table."""
        if target not in self._table[current]:
            raise IllegalTransition(f"{type(current).__name__}: {current.name} -> {target.name} is not a legal move")

    def targets(self, current: StateT) -> frozenset[StateT]:
        """States that `current` may move to."""
        return self._table[current]

    def is_final(self, state: StateT) -> bool:
        """Whether nothing follows `state`."""
        return not self._table[state]
