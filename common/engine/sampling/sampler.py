"""From logits to tokens of one step, over the persistent batch.

Journey row 8. Owns: the sampler the engine core drives (one thread): membership, the step's plan, greedy and random
rows in one pass, logprobs. The order of everything that changes logits: `common.engine.sampling.pipeline`. Does not
know requests' text, KV or grammars beyond their bitmasks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import torch

from common.engine.outputs import PositionLogprobs
from common.engine.sampling.batch_state import AddedRow, BatchUpdate, LogitsRows
from common.engine.sampling.cpu_kernels.library import kernels_for
from common.engine.sampling.draw import Drawer
from common.engine.sampling.grammar_mask import allows_only, apply_bitmask
from common.engine.sampling.logprobs import position_logprobs
from common.engine.sampling.pipeline import Pipeline
from common.engine.sampling.processors.processor import LogitsProcessor, ProcessorContext
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.sampling.random import row_keys
from common.engine.sampling.row_parameters import RowParameters, StepPlan

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


NO_ROWS: frozenset[int] = frozenset()


class SampleOutput(msgspec.Struct, frozen=True):
    """What a step sampled.

    Attributes:
        token_ids: one per logits row; meaningless for rows in `failed_rows`.
        logprobs: one per logits row; None where the request asked for none or the row failed.
        failed_rows: logits rows whose masks left no token (or whose logits are not numbers): end them with
            `NoTokenAllowed`.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    failed_rows: frozenset[int]


class Sampler:
    """Samples one token per logits row.

    Args:
        vocab_size: width of the logits.
        max_rows: persistent rows, `0 <= row < max_rows`.
        device: where the logits live.
        logprobs_mode: what `logprobs` reports.
        processors: loaded custom processors, run beside the built-in ones.
        markers: of thinking and tool calls, for `thinking_token_budget`; None when the model has no parser.
        use_kernels: the compiled path, where there is one for the device; else torch, which draws the same tokens.
    """

    def __init__(  # noqa: PLR0913 - one switch beside what an engine is made of, for machines without a compiler
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        processors: Sequence[LogitsProcessor] = (),
        *,
        markers: OutputMarkers | None = None,
        use_kernels: bool = True,
    ) -> None:
        self._device = device
        self._mode = logprobs_mode
        self._outputs: list[list[int]] = [[] for _ in range(max_rows)]
        self._parameters = RowParameters(vocab_size, max_rows, device)
        context = ProcessorContext(vocab_size=vocab_size, max_rows=max_rows, device=device)
        self._kernels = kernels_for(device) if use_kernels else None
        self._pipeline = Pipeline(context, processors, markers, self._kernels)
        self._drawer = Drawer(vocab_size, device)
        self._raw_memory = torch.empty(0, vocab_size, device=device)
        self._plan: StepPlan | None = None
        self._follows_outputs = False
        self._takes_highest = False  # all rows of the plan want their highest logit and nothing else

    def update_batch(self, update: BatchUpdate) -> None:
        """Apply membership changes (removed, added, moved) before the step that needs them."""
        self._plan = None
        for row in update.removed:
            self._outputs[row] = []
        added = tuple(self._added(entry) for entry in update.added)
        for moved in update.moved:
            self._outputs[moved.target], self._outputs[moved.source] = self._outputs[moved.source], []
            self._parameters.move(moved.source, moved.target)
        self._pipeline.update_state(replace(update, added=added))
        self._follows_outputs = self._pipeline.follows_outputs()

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        bitmask: torch.Tensor | None = None,
        masked_rows: Sequence[int] = (),
        drafts: Sequence[Sequence[int]] = (),
        highest: torch.Tensor | None = None,
    ) -> SampleOutput:
        """Sample one token per logits row. Changes `logits`, never the batch state.

        Args:
            logits: float32 [R, vocab_size]; may be overwritten.
            rows: persistent row of each logits row, length R; several may name one row (speculation).
            bitmask: int32 CPU [M, ceil(vocab_size / 32)], bit set = allowed, or None.
            masked_rows: logits row of each bitmask row, length M; all others are unconstrained.
            drafts: tokens assumed accepted before each logits row beyond the recorded ones; empty: none.
            highest: int64 CPU [R], where somebody knows: the first token with the highest of each row of `logits`, -1
                where that is no finite number or not known.
        """
        if not rows:
            return SampleOutput([], [], NO_ROWS)
        plan = self._planned(rows)
        logits = logits.contiguous()
        if not masked_rows:
            bitmask = None
        if self._takes_highest and self._kernels is not None and plan.greedy is not None:
            if bitmask is not None:
                plan.greedy.mask(masked_rows)
            plan.greedy.know(highest)
            num_failed = self._kernels.highest(logits, plan.greedy, bitmask)
            failed = _failed_rows(plan.usable) if num_failed else NO_ROWS
            return SampleOutput(plan.greedy.token_list(), [None] * plan.greedy.count, failed)
        if self._takes_highest:
            if bitmask is not None:
                self._mask(logits, bitmask, masked_rows)
            return _output(*self._highest(logits, plan))
        where = self._locate(plan, bitmask, masked_rows, drafts)
        if bitmask is not None:
            self._mask(logits, bitmask, masked_rows)
        raw = self._raw(logits, plan)
        logits = self._pipeline.change_argmax(logits, where)
        logits, token_ids, usable = self._draw(logits, where, plan)
        output = _output(token_ids, usable)
        if plan.logprob_rows is None:
            return output
        logprobs = self._report(plan, raw, logits, token_ids, output.failed_rows)
        return SampleOutput(output.token_ids, logprobs, output.failed_rows)

    def record(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Tokens were accepted: `token_ids[i]` by persistent row `rows[i]`; a row may come several times, in order."""
        outputs = self._outputs
        for row, token_id in zip(rows, token_ids, strict=True):
            outputs[row].append(token_id)
        if self._follows_outputs:
            for wave_rows, wave_tokens in _waves(rows, token_ids):
                self._pipeline.record(np.array(wave_rows, dtype=np.int64), np.array(wave_tokens, dtype=np.int64))

    def _added(self, entry: AddedRow) -> AddedRow:
        """Take the row in, and give processors a view of its output that grows."""
        outputs = list(entry.output_token_ids)
        self._outputs[entry.row] = outputs
        self._parameters.set(entry)
        return replace(entry, output_token_ids=outputs)

    def _planned(self, rows: Sequence[int]) -> StepPlan:
        if self._plan is None or self._plan.persistent != tuple(rows):
            self._plan = self._parameters.plan(rows)
            is_greedy = not self._plan.chunks and self._plan.logprob_rows is None
            self._takes_highest = is_greedy and self._pipeline.leaves_alone()
        return self._plan

    def _locate(
        self,
        plan: StepPlan,
        bitmask: torch.Tensor | None,
        masked_rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> LogitsRows:
        positions = np.array([len(self._outputs[row]) for row in plan.persistent], dtype=np.int64)
        assumed = tuple(tuple(draft) for draft in drafts) if any(drafts) else ()
        if assumed:
            positions = positions + np.array([len(draft) for draft in assumed])
        rows = LogitsRows(
            persistent=plan.persistent,
            index=plan.index,
            positions=positions,
            drafts=assumed,
            constrained=frozenset(masked_rows),
        )
        if bitmask is None or not masked_rows:
            return rows
        mask_of = {row: place for place, row in enumerate(masked_rows)}
        must_stop = frozenset(
            row
            for row, stops in self._pipeline.unfinished(rows)
            if row in mask_of and allows_only(bitmask[mask_of[row]], stops)
        )
        return replace(rows, must_stop=must_stop) if must_stop else rows

    def _mask(self, logits: torch.Tensor, bitmask: torch.Tensor, masked_rows: Sequence[int]) -> None:
        if self._kernels is None:
            apply_bitmask(logits, bitmask, masked_rows)
        else:
            self._kernels.mask(logits, bitmask, np.asarray(masked_rows, dtype=np.int64))

    def _raw(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor | None:
        """Logits float32 [n, vocab_size] to report as they are now; a copy only where something will change them."""
        if plan.logprob_rows is None or self._mode.startswith("processed"):
            return None
        rows = logits[plan.logprob_rows]
        if isinstance(plan.logprob_rows, torch.Tensor) or self._pipeline.leaves_alone():
            return rows
        if self._raw_memory.shape[0] < rows.shape[0]:
            self._raw_memory = torch.empty_like(rows)
        return self._raw_memory[: rows.shape[0]].copy_(rows)

    def _draw(
        self, logits: torch.Tensor, rows: LogitsRows, plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Processed logits float32 [R, vocab_size], tokens int64 [R], and which rows had any, bool [R]."""
        token_ids, usable = self._highest(logits, plan)
        if not plan.chunks:
            return logits, token_ids, usable
        logits, is_scaled = self._pipeline.change_random(logits, rows, plan)
        report_processed = plan.logprob_rows is not None and self._mode.startswith("processed")
        keys = row_keys(plan.seed_keys, rows.positions[plan.drawn_rows])
        if self._kernels is not None and not report_processed:
            self._kernels.draw(logits, plan.drawing, keys, (token_ids, usable), is_scaled=is_scaled)
        else:
            token_ids[plan.drawn], usable[plan.drawn] = self._drawer.draw(
                logits, plan.chunks, keys, is_scaled=is_scaled, report_processed=report_processed
            )
        return logits, token_ids, usable

    def _highest(self, logits: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [R] and which rows had any, bool [R]; those of greedy rows are written."""
        if plan.greedy_rows.size and self._kernels is not None and plan.greedy is not None:
            plan.greedy.know(None)
            self._kernels.highest(logits, plan.greedy)
        elif plan.greedy_rows.size:
            plan.token_ids[:], plan.usable[:] = _highest(logits)
        return plan.token_ids, plan.usable

    def _report(
        self,
        plan: StepPlan,
        raw: torch.Tensor | None,
        processed: torch.Tensor,
        token_ids: torch.Tensor,
        failed: frozenset[int],
    ) -> list[PositionLogprobs | None]:
        assert plan.logprob_rows is not None  # nobody reports what nobody asked for
        reported: list[PositionLogprobs | None] = [None] * len(plan.persistent)
        scores = processed[plan.logprob_rows] if raw is None else raw
        requests = [request for request in plan.logprobs if request is not None]
        asking = [row for row, request in enumerate(plan.logprobs) if request is not None]
        found = position_logprobs(
            scores,
            token_ids[plan.logprob_rows],
            requests,
            normalise=self._mode.endswith("logprobs"),
            kernels=self._kernels,
        )
        for row, logprobs in zip(asking, found, strict=True):
            reported[row] = None if row in failed else logprobs
        return reported


def _output(token_ids: torch.Tensor, usable: torch.Tensor) -> SampleOutput:
    """Tokens int64 [R] as they leave, without log probabilities; rows that are not `usable` bool [R] failed."""
    return SampleOutput(token_ids.tolist(), [None] * len(usable), _failed_rows(usable))


def _failed_rows(usable: torch.Tensor) -> frozenset[int]:
    return frozenset(row for row, is_usable in enumerate(usable.tolist()) if not is_usable)


def _waves(rows: Sequence[int], token_ids: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(rows, tokens) cut into parts in which no row comes twice, each row's tokens in order."""
    if len(set(rows)) == len(rows):
        return [(rows, token_ids)]
    waves: list[tuple[list[int], list[int]]] = []
    seen: dict[int, int] = {}
    for row, token_id in zip(rows, token_ids, strict=True):
        wave = seen[row] = seen.get(row, -1) + 1
        if wave == len(waves):
            waves.append(([], []))
        waves[wave][0].append(row)
        waves[wave][1].append(token_id)
    return list(waves)


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First highest token of each row int64 [R], and whether there is one (finite), bool [R]."""
    # On CPU numpy's argmax is vectorised; torch's is a plain loop.
    on_cpu = logits.device.type == "cpu"
    best = torch.from_numpy(logits.numpy().argmax(axis=1)) if on_cpu else logits.argmax(dim=1)
    return best, logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite()
