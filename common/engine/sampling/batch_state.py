"""What changed in the persistent batch, and which logits row belongs to which of its rows.

Journey row 8. Owns: the frozen values the engine core hands to the sampler and to every logits processor.
A persistent row belongs to one choice of one request from `added` to `removed`. Does not know tensors of parameters:
`common.engine.sampling.row_parameters`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.sampling.params import SamplingParams
from common.ids import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRow:
    """One choice of one request enters the batch (admitted, resumed after preemption, or forked).

    Attributes:
        row: persistent row, `0 <= row < max_rows`, free when this is applied.
        request_id: for error texts only.
        params: normalised parameters.
        prompt_token_ids: the whole prompt, on D too (repetition penalty and thinking state need it).
        output_token_ids: tokens already accepted: empty on admission, all of them after preemption. Processors get a
            live view in its place, which grows with `Sampler.record`.
        stop_ids: EOS ids and `stop_token_ids`; never sampled before `min_tokens`.
        seed: 64 bits, either sign; `common.engine.sampling.random.seed_for_choice` makes it.
    """

    row: int
    request_id: RequestId
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: frozenset[int]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRow:
    """Everything of row `source` now lives in row `target`, which is free when this is applied."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUpdate:
    """Changes since the last step, applied in this order: all of `removed`, then `added`, then `moved` one by one.

    So an added row may take a row removed in the same update, and a move may fill one that is still free.
    Source: vLLM 0.32 `v1/sample/logits_processor/interface.py` (the order); swaps are not needed here.
    """

    removed: tuple[int, ...] = ()
    added: tuple[AddedRow, ...] = ()
    moved: tuple[MovedRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsRows:
    """Which persistent row each logits row belongs to; several may belong to one (speculation).

    Attributes:
        persistent: persistent row of each logits row, length R.
        index: the same, int64 [R] on the sampler's device.
        drafts: tokens assumed accepted before each logits row, beyond those recorded; empty without speculation.
    """

    persistent: tuple[int, ...]
    index: torch.Tensor
    drafts: tuple[tuple[int, ...], ...] = ()
