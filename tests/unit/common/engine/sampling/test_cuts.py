import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sampling.cuts import Cuts, keep, thresholds
from common.engine.sampling.device_cuts import thresholds as thresholds_on_device
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.top_values import GROUP_SIZE
from tests.support.reference_sampler import processed_distribution


def scaled(logits: torch.Tensor) -> torch.Tensor:
    """Weights whose highest is 1, in whole groups."""
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
    return torch.nn.functional.pad(weights, (0, -weights.shape[1] % GROUP_SIZE))


def edge_of(weights: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Thresholds by both ways, which must agree."""
    ours = thresholds(weights, cuts)
    assert ours.tolist() == thresholds_on_device(weights, cuts).tolist()
    return ours


def kept(logits, *, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    logits = torch.tensor([logits], dtype=torch.float32)
    weights = scaled(logits)
    cuts = Cuts(np.array([top_k]), np.array([top_p]), np.array([min_p], dtype=np.float32))
    stays = weights[0, : logits.shape[1]] >= edge_of(weights, cuts)[0]
    return set(torch.nonzero(stays).flatten().tolist())


def test_top_k_keeps_exactly_k_tokens():
    assert kept([1.0, 4.0, 2.0, 3.0], top_k=2) == {1, 3}


def test_tokens_tied_with_the_kth_all_stay():
    assert kept([1.0, 3.0, 3.0, 3.0, 0.0], top_k=2) == {1, 2, 3}


@pytest.mark.parametrize("k", [4, 5, 100])
def test_k_of_the_vocabulary_or_more_keeps_everything(k):
    assert kept([1.0, 4.0, 2.0, -90.0], top_k=min(k, 4)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert kept(logits, top_p=0.49) == {0}
    assert kept(logits, top_p=0.51) == {0, 1}
    assert kept(logits, top_p=0.81) == {0, 1, 2}
    assert kept(logits, top_p=0.96) == {0, 1, 2, 3}


def test_the_smallest_p_keeps_the_likeliest_token():
    assert kept([0.0, 1.0, 0.5], top_p=1e-9) == {1}


def test_p_of_one_keeps_even_the_unlikeliest_token():
    assert kept([0.0, -60.0, -80.0], top_p=1.0) == {0, 1, 2}


def test_tokens_tied_at_the_edge_of_the_nucleus_all_stay():
    assert kept([2.0, 1.0, 1.0, 1.0, -5.0], top_p=0.6) == {0, 1, 2, 3}


def test_all_tokens_equal_is_one_tie():
    assert kept([0.0] * 3000, top_p=0.1) == set(range(3000))
    assert kept([0.0] * 3000, top_k=5) == set(range(3000))


def test_min_p_is_relative_to_the_likeliest():
    assert kept(np.log([0.6, 0.3, 0.07, 0.03]).tolist(), min_p=0.1) == {0, 1, 2}


def test_min_p_of_one_keeps_the_likeliest_and_its_ties():
    assert kept([3.0, 3.0, 1.0], min_p=1.0) == {0, 1}


def test_top_p_counts_in_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(logits, top_k=2, top_p=0.5) == {0}
    assert kept(logits, top_p=0.5) == {0, 1}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 31),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    top_k=st.sampled_from([0, 1, 40, 1500, 2999]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_rows_of_any_shape_are_cut_as_defined_also_beyond_the_sorted_head(seed, spread, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, spread, (3, 3000)).astype(np.float32)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    weights = scaled(torch.from_numpy(logits))
    cuts = Cuts(np.full(3, top_k), np.full(3, top_p), np.full(3, min_p, dtype=np.float32))
    weights = weights.where(weights >= edge_of(weights, cuts).unsqueeze(1), 0.0)
    ours = (weights / weights.sum(dim=1, keepdim=True))[:, :3000]
    for row in range(3):
        expected = processed_distribution(logits[row], params, (), (), frozenset())
        np.testing.assert_allclose(ours[row].numpy(), expected, atol=1e-5)


def test_rows_are_cut_independently_of_their_neighbours():
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(5)) * torch.tensor(
        [[0.1], [1], [2], [4], [6], [9]]
    )
    cuts = Cuts(
        np.array([0, 0, 7, 0, 900, 0]),
        np.array([0.9, 1.0, 0.8, 0.99, 0.5, 1.0]),
        np.array([0, 0.1, 0, 0, 0.2, 0.0], dtype=np.float32),
    )
    weights = scaled(logits)
    together = edge_of(weights, cuts)
    for row in range(6):
        one = slice(row, row + 1)
        alone = edge_of(weights[one], Cuts(cuts.top_k[one], cuts.top_p[one], cuts.min_p[one]))
        assert torch.equal(alone, together[one])


def test_a_threshold_keeps_its_own_value_and_drops_the_next_one_below():
    values = torch.rand(500, generator=torch.Generator().manual_seed(1)) + 1e-6
    pairs = torch.stack((values, torch.nextafter(values, torch.tensor(0.0))), dim=1)
    kept_pairs = keep(pairs, values)
    assert kept_pairs[:, 0].tolist() == [1.0] * 500
    assert kept_pairs[:, 1].tolist() == [0.0] * 500


def test_no_threshold_keeps_everything_that_could_ever_be_drawn():
    assert (keep(torch.tensor([[1.0, 1e-17, 0.0]]), torch.zeros(1)) > 0).tolist() == [[True, True, False]]
