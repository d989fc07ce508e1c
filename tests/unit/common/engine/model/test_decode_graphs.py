import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.engine.model.decode_graphs import graph_sizes

REPOSITORY = Path(__file__).parents[5]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_every_number_of_sequences_finds_a_size_that_is_not_much_larger(
    max_num_seqs: int, sizes: tuple[int, ...]
) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_padded_decodes_give_the_plain_ones_logits_and_cache_and_others_are_not_replayed() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_graphs"],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"triton", "flashinfer"}
    for kernels, tolerance in (("triton", 1e-5), ("flashinfer", 2e-2)):
        assert found[kernels]["logits"] < tolerance
        assert found[kernels]["cache"] < tolerance
        assert (found[kernels]["replays"], found[kernels]["replays_of_others"]) == (7, 0)
    # Seven steps run plainly and the one that is no plain decode; recording and replaying plan nothing.
    assert found["flashinfer"]["plans"] == 8
