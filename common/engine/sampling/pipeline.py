"""The order in which a row's logits are changed: the contract of DESIGN §4.

    grammar mask -> (raw logprobs are taken here) -> allowed_token_ids -> bad_words -> min_tokens -> logit_bias ->
    custom processors -> penalties -> thinking budget -> greedy rows stop here;
    temperature -> argmax-invariant custom processors -> min_p, top_k, top_p -> draw

Owns: the built-in processors and that order. Does not know how a token is drawn: `common.engine.sampling.race`.
"""

from collections.abc import Sequence

import torch

from common.engine.sampling.batch_state import BatchUpdate, IntArray, LogitsRows
from common.engine.sampling.processors.allowed_tokens import AllowedTokens
from common.engine.sampling.processors.bad_words import BadWords
from common.engine.sampling.processors.logit_bias import LogitBias
from common.engine.sampling.processors.min_tokens import MinTokens
from common.engine.sampling.processors.penalties import Penalties
from common.engine.sampling.processors.processor import LogitsProcessor, ProcessorContext
from common.engine.sampling.processors.thinking_budget import OutputMarkers, ThinkingBudget
from common.engine.sampling.processors.top_k_top_p import thresholds
from common.engine.sampling.row_parameters import StepPlan


class Pipeline:
    """Every change to logits between the model and the draw.

    Args:
        context: vocabulary size, rows and device.
        processors: custom ones.
        markers: of thinking and tool calls; None when the model has no parser.
    """

    def __init__(
        self, context: ProcessorContext, processors: Sequence[LogitsProcessor], markers: OutputMarkers | None
    ) -> None:
        self._allowed = AllowedTokens()
        self._bad_words = BadWords(context.max_rows)
        self._min_tokens = MinTokens()
        self._logit_bias = LogitBias()
        self._penalties = Penalties(context.vocab_size, context.max_rows, context.device)
        self._thinking = ThinkingBudget(context.max_rows, markers) if markers else None
        self._custom = [processor for processor in processors if not processor.is_argmax_invariant()]
        self._invariant = [processor for processor in processors if processor.is_argmax_invariant()]

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the batch."""
        for processor in (self._allowed, self._bad_words, self._min_tokens, self._logit_bias, self._penalties):
            processor.update_state(update)
        if self._thinking:
            self._thinking.update_state(update)
        for custom in (*self._custom, *self._invariant):
            custom.update_state(update)

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """One token was accepted by each of the persistent `rows` (no row twice)."""
        self._bad_words.record(rows, token_ids)
        self._penalties.record(rows, token_ids)
        if self._thinking:
            self._thinking.record(rows, token_ids)

    def unfinished(self, rows: LogitsRows) -> list[tuple[int, tuple[int, ...]]]:
        """(logits row, stop ids) of rows that may not stop yet (`min_tokens`)."""
        return self._min_tokens.stop_ids(rows)

    def change_argmax(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        """Everything that greedy rows see too; float32 [R, vocab_size], may be changed in place."""
        logits = self._allowed.apply(logits, rows)
        logits = self._bad_words.apply(logits, rows)
        logits = self._min_tokens.apply(logits, rows)
        logits = self._logit_bias.apply(logits, rows)
        for processor in self._custom:
            logits = processor.apply(logits, rows)
        logits = self._penalties.apply(logits, rows)
        return self._thinking.apply(logits, rows) if self._thinking else logits

    def weigh(
        self, logits: torch.Tensor, rows: LogitsRows, plan: StepPlan, *, keep_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything between greedy and the draw.

        Args:
            logits: float32 [R, vocab_size]; may be changed in place.
            rows: whose they are.
            plan: their parameters.
            keep_logits: whether the returned logits must show the cuts too (processed logprobs).

        Returns:
            processed logits and weights to draw by, both float32 [R, vocab_size]; a row's weights need not add up to 1.
        """
        if plan.temperature is not None:
            logits = logits.div_(plan.temperature)
        for processor in self._invariant:
            logits = processor.apply(logits, rows)
        weights = torch.softmax(logits, dim=1)
        if plan.cuts is None:
            return logits, weights
        if plan.cut_rows is None:
            lowest = thresholds(weights, plan.cuts)
        else:
            lowest = torch.zeros(weights.shape[0], device=weights.device)
            lowest[plan.cut_rows] = thresholds(weights[plan.cut_rows], plan.cuts)
        dropped = weights < lowest.unsqueeze(1)
        weights.masked_fill_(dropped, 0.0)
        return (logits.masked_fill_(dropped, -torch.inf) if keep_logits else logits), weights
