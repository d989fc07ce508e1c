"""A module whose import fails, for the loader's tests."""

raise RuntimeError("broken on purpose")
