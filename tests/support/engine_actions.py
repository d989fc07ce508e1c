"""What may happen to an engine, for property tests: requests come, constrained or not, leave, and steps go by."""

import hypothesis.strategies as st

ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 20)),
    st.tuples(st.just("constrained"), st.integers(1, 9), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 8), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 7), st.just(0)),
)
"""(`add` or `constrained`, tokens of the prompt, tokens of the answer), (`step`, how many, 0), (`abort`, whom, 0)."""
