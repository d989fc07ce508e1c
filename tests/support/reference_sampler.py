"""What the sampling parameters mean, in float64 NumPy, written from their definitions and not from our pipeline."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.engine.sampling.params import SamplingParams

Row = npt.NDArray[np.float64]


def penalised(
    logits: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: frozenset[int]
) -> Row:
    """Logits that greedy sampling sees."""
    row = _masked(logits.astype(np.float64), params, output, stop_ids)
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in {*prompt, *output}:
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return row


def _masked(row: Row, params: SamplingParams, output: Sequence[int], stop_ids: frozenset[int]) -> Row:
    """-inf wherever a token is forbidden."""
    row = row.copy()
    if params.allowed_token_ids is not None:
        for token in range(len(row)):
            if token not in params.allowed_token_ids:
                row[token] = -np.inf
    for word in params.bad_words_token_ids:
        prefix = list(word[:-1])
        if not prefix or (list(output[len(output) - len(prefix) :]) == prefix and len(output) >= len(prefix)):
            row[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token in stop_ids:
            row[token] = -np.inf
    return row


def processed_distribution(
    logits: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: frozenset[int]
) -> Row:
    """Probability of each token of the vocabulary being the next one."""
    row = penalised(logits, params, prompt, output, stop_ids)
    if params.temperature == 0:
        one_hot = np.zeros_like(row)
        one_hot[int(np.argmax(row))] = 1.0
        return one_hot
    probabilities = softmax(row / params.temperature)
    if params.min_p > 0:
        probabilities = renormalise(np.where(probabilities < params.min_p * probabilities.max(), 0, probabilities))
    if 0 < params.top_k < len(row):
        kth = np.sort(probabilities)[-params.top_k]
        probabilities = renormalise(np.where(probabilities < kth, 0, probabilities))
    if params.top_p < 1:
        probabilities = renormalise(np.where(likelier_mass(probabilities) < params.top_p, probabilities, 0))
    return probabilities


def softmax(row: Row) -> Row:
    weights: Row = np.exp(row - row.max())
    return renormalise(weights)


def renormalise(weights: Row) -> Row:
    scaled: Row = weights / weights.sum()
    return scaled


def likelier_mass(probabilities: Row) -> Row:
    """For each token the total probability of the strictly likelier ones."""
    order = np.argsort(-probabilities, kind="stable")
    before = np.concatenate(([0.0], np.cumsum(probabilities[order])[:-1]))
    mass = np.empty_like(before)
    for place, token in enumerate(order):
        tied = place and probabilities[token] == probabilities[order[place - 1]]
        mass[token] = mass[order[place - 1]] if tied else before[place]
    return mass
