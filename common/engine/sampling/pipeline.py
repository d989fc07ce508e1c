"""The order in which a row's logits are changed: the contract of DESIGN §4.

    grammar mask -> (raw logprobs are taken here) -> allowed_token_ids -> bad_words -> min_tokens -> logit_bias ->
    custom processors -> penalties -> thinking budget -> greedy rows stop here;
    temperature -> argmax-invariant custom processors -> min_p, top_k, top_p -> draw

Owns: the processors and that order, but for the last line's built-in steps: `common.engine.sampling.draw`.
"""

from collections.abc import Sequence

import torch

from common.engine.sampling.batch_state import BatchUpdate, IntArray, LogitsRows
from common.engine.sampling.cpu_kernels.library import SamplingKernels
from common.engine.sampling.processors.allowed_tokens import AllowedTokens
from common.engine.sampling.processors.bad_words import BadWords
from common.engine.sampling.processors.logit_bias import LogitBias
from common.engine.sampling.processors.min_tokens import MinTokens
from common.engine.sampling.processors.penalties import Penalties
from common.engine.sampling.processors.processor import LogitsProcessor, ProcessorContext
from common.engine.sampling.processors.thinking_budget import OutputMarkers, ThinkingBudget
from common.engine.sampling.row_parameters import StepPlan


class Pipeline:
    """Every change to logits between the model and the draw.

    Args:
        context: vocabulary size, rows and device.
        processors: custom ones.
        markers: of thinking and tool calls; None when the model has no parser.
        kernels: for built-in steps that have one; None: torch does them.
    """

    def __init__(
        self,
        context: ProcessorContext,
        processors: Sequence[LogitsProcessor],
        markers: OutputMarkers | None,
        kernels: SamplingKernels | None = None,
    ) -> None:
        self._allowed = AllowedTokens(kernels)
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

    def follows_outputs(self) -> bool:
        """Whether any row of the batch has something that must know every token, so that `record` is needed."""
        is_thinking = self._thinking is not None and self._thinking.is_used()
        return is_thinking or self._bad_words.is_used() or self._penalties.is_used()

    def leaves_alone(self) -> bool:
        """Whether no row of the batch has anything that changes its logits before the temperature."""
        built_in = (self._allowed, self._bad_words, self._min_tokens, self._logit_bias, self._penalties)
        is_thinking = self._thinking is not None and self._thinking.is_used()
        return not (self._custom or self._invariant or is_thinking or any(each.is_used() for each in built_in))

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
            logits = processor.apply(logits, rows).contiguous()
        logits = self._penalties.apply(logits, rows)
        return self._thinking.apply(logits, rows) if self._thinking else logits

    def change_random(self, logits: torch.Tensor, rows: LogitsRows, plan: StepPlan) -> tuple[torch.Tensor, bool]:
        """Argmax-invariant custom processors, after the temperature, which they are entitled to see.

        Returns:
            logits float32 [R, vocab_size], and whether temperature has been applied to them.
        """
        if not self._invariant:
            return logits, False
        if plan.temperature is not None:
            logits = logits.div_(plan.temperature)
        for processor in self._invariant:
            logits = processor.apply(logits, rows)
        return logits, True
