"""Everything of a step between the plan and the sampled tokens: rows, masks, forward, sampling.

Journey row 8. Owns: the order `inputs -> begin masks -> forward -> tell the sampler its rows -> end masks -> sample`:
the CPU fills the masks while the device computes. Does not know: policy, what becomes of the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.kv_cache.block_table import num_blocks_for
from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.model.forward import DecoderModel
from common.engine.runner.input_batch import InputBatch
from common.engine.runner.model_runner import ModelRunner
from common.engine.runner.prompt_logprobs import prompt_logprobs
from common.engine.sampling.batch_state import NO_CHANGE, BatchUpdate
from common.engine.scheduling.sequence import Request
from common.engine.settings import CoreSettings
from common.engine.step import SampledTokens, SamplerPort, ScheduledChunk, StepPlan
from common.engine.step_timer import StepPart, StepTimer
from common.engine.structured_output.grammar import GrammarService, MaskRow


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a step asks of sampler and grammars; the same object from one plain decode to the next of the same requests.

    Attributes:
        rows: persistent row of each logits row.
        drafts: tokens taken as accepted before each logits row; empty without any draft.
        masks: constrained requests.
        masked_rows: the logits rows of their masks.
    """

    rows: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    masks: tuple[MaskRow, ...]
    masked_rows: tuple[int, ...]


class StepRunner:
    """Runs plans.

    Args:
        settings: sizes of the batch.
        model: the decoder.
        storage: its paged cache.
        sampler: logits to tokens.
        grammars: fills the masks of constrained rows.
        timer: told when each part ends.
    """

    def __init__(
        self,
        settings: CoreSettings,
        model: DecoderModel,
        storage: KvCacheStorage,
        sampler: SamplerPort,
        grammars: GrammarService,
        timer: StepTimer,
    ) -> None:
        max_blocks_per_seq = num_blocks_for(settings.max_model_len_tokens, storage.block_size)
        self._batch = InputBatch(settings.max_num_seqs, max_blocks_per_seq)
        self._runner = ModelRunner(model, storage, self._batch)
        self._sampler = sampler
        self._grammars = grammars
        self._timer = timer
        self._prompt_logprobs_as_logits = settings.prompt_logprobs_as_logits
        self._asked: _Asked | None = None

    def follow(self, plan: StepPlan) -> None:
        """Take note of who left, without computing anything."""
        self._update_sampler(self._batch.update(plan))

    def run(self, plan: StepPlan) -> SampledTokens | None:
        """The forward of all chunks and a token for each sampling one, in their order; None when none samples.

        A chunk with a draft has one more token behind each drafted one, as if the draft had been accepted up to there.
        Fills `prompt_logprobs` of requests that asked; changes no other request.
        """
        update = self._batch.update(plan)
        is_unchanged = update is NO_CHANGE
        if self._asked is None or not (is_unchanged and plan.is_decode):
            self._asked = self._ask([chunk for chunk in plan.chunks if chunk.samples])
        asked = self._asked
        if not plan.is_decode:
            self._asked = None
        try:
            batch = self._runner.build(plan, is_unchanged=is_unchanged)
            # From here on until the forward has taken over, this thread had better not let the filling one have Python.
            pending = self._grammars.fill(asked.masks) if asked.masks else None
            logits = self._runner.forward(batch, plan)
        finally:  # also when the forward fails: the sampler's rows must stay the batch's rows
            self._update_sampler(update)
        self._timer.lap(StepPart.FORWARD)
        if logits.prompt is not None and logits.prompt.shape[0]:
            self._keep_prompt_logprobs(plan.chunks, logits.prompt)
        if not asked.rows:
            return None
        bitmask = pending.wait() if pending is not None else None
        self._timer.lap(StepPart.MASK_WAIT)
        sampled = self._sampler.sample(
            logits.sampling, asked.rows, bitmask, asked.masked_rows, asked.drafts, logits.highest
        )
        self._timer.lap(StepPart.SAMPLE)
        return sampled

    def record(self, accepted: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """These tokens were accepted, and their requests go on."""
        if accepted:
            rows = [self._batch.row(request) for request, token_ids in accepted for _ in token_ids]
            self._sampler.record(rows, [token_id for _, token_ids in accepted for token_id in token_ids])

    def record_all(self, token_ids: Sequence[int]) -> None:
        """Every token of the plain decode just run was accepted, and all its requests go on."""
        assert self._asked is not None  # kept from `run`
        self._sampler.record(self._asked.rows, token_ids)

    def _ask(self, sampling: Sequence[ScheduledChunk]) -> _Asked:
        rows: list[int] = []
        drafts: list[tuple[int, ...]] = []
        masks: list[MaskRow] = []
        masked_rows: list[int] = []
        for chunk in sampling:
            first, count = len(rows), chunk.num_samples
            rows += [self._batch.row(chunk.request)] * count
            drafts += [chunk.draft[:place] for place in range(count)]
            if chunk.request.matcher is not None:
                masks.append(MaskRow(first, chunk.request.matcher, chunk.draft))
                masked_rows += range(first, first + count)
        return _Asked(tuple(rows), tuple(drafts) if any(drafts) else (), tuple(masks), tuple(masked_rows))

    def _update_sampler(self, update: BatchUpdate) -> None:
        """Most steps change no row; then the sampler keeps what it worked out for the last one."""
        if update.removed or update.added or update.moved:
            self._sampler.update_batch(update)

    def _keep_prompt_logprobs(self, chunks: Sequence[ScheduledChunk], logits: torch.Tensor) -> None:
        begin = 0
        for chunk in chunks:
            request, count = chunk.request, chunk.num_prompt_logits
            num_top = request.sampling.prompt_logprobs
            if count == 0 or num_top is None or request.prompt_logprobs is None:
                continue
            targets = request.token_ids[chunk.start + 1 : chunk.start + 1 + count]
            rows, begin = logits[begin : begin + count], begin + count
            request.prompt_logprobs += prompt_logprobs(
                rows, targets, num_top, as_logits=self._prompt_logprobs_as_logits
            )
