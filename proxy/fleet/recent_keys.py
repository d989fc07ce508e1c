"""The last few things an engine was seen to know, as keys. Owns: forgetting. Does not know: what the keys stand for."""

from collections import OrderedDict


class RecentKeys:
    """A set that forgets its least recently used keys.

    Args:
        max_keys: how many it remembers.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        return True

    def add(self, key: int) -> None:
        """Remember `key`."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
