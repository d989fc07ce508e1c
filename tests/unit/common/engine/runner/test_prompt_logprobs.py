import math

import torch

from common.engine.runner.prompt_logprobs import prompt_logprobs

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]])


def test_each_position_reports_its_token_its_rank_and_the_best_alternatives() -> None:
    first, second = prompt_logprobs(LOGITS, [2, 0], 2, as_logits=False)
    expected = torch.log_softmax(LOGITS, dim=-1)
    assert math.isclose(first.chosen.logprob, expected[0, 2].item(), abs_tol=1e-6)
    assert (first.chosen.token_id, first.chosen.rank) == (2, 2)
    assert [top.token_id for top in first.top] == [1, 2]
    assert [top.rank for top in first.top] == [1, 2]
    assert (second.chosen.token_id, second.chosen.rank) == (0, 1)


def test_no_alternatives_and_the_whole_vocabulary_can_be_asked_for() -> None:
    assert prompt_logprobs(LOGITS, [0, 0], 0, as_logits=False)[0].top == ()
    assert len(prompt_logprobs(LOGITS, [0, 0], -1, as_logits=False)[0].top) == 4


def test_raw_logits_are_reported_as_they_are() -> None:
    (first, _) = prompt_logprobs(LOGITS, [1, 0], 1, as_logits=True)
    assert first.chosen.logprob == 2.0
