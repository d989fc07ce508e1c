"""What a step costs outside the model: plan, inputs, masks, sampling, bookkeeping; early and late in long outputs.

Owns: an engine core driven without HTTP, its model's forwards timed apart. A step's rest is what is left of it.
"""

import json
import random
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.engine.client import SCHEMA
from benchmarks.roofline.machine import Machine
from common.clock import SystemClock
from common.config.engine import GrammarConfig
from common.engine.core import EngineCore
from common.engine.kv_cache.storage import KvCacheStorage, KvShape
from common.engine.model.forward import DecoderModel, ForwardBatch
from common.engine.model.loader import load_model
from common.engine.request import GenerateRequest
from common.engine.sampling.params import SamplingParams
from common.engine.sampling.sampler import Sampler
from common.engine.settings import CoreSettings
from common.engine.structured_output.service import LocalGrammarService
from common.ids import RequestId
from common.telemetry.timeline import Timeline
from common.wire.constraint import Constraint, ConstraintKind

BLOCK_SIZE = 16
PROMPT_TOKENS = 24
WINDOW = 40
"""Steps whose median is a figure."""

COMPILE_WITHIN_S = 60.0
CONSTRAINT = Constraint(kind=ConstraintKind.JSON_SCHEMA, value=json.dumps(SCHEMA))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PENALTIES = SamplingParams(
    temperature=0.8, top_p=0.95, presence_penalty=0.1, repetition_penalty=1.1, ignore_eos=True, seed=1
)
KINDS = {"greedy": GREEDY, "structured": GREEDY, "penalties, top_p": PENALTIES}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigure:
    """Medians over `WINDOW` steps. model: a dtype, or `none` for fixed logits instead of a forward."""

    model: str
    num_seqs: int
    kind: str
    num_output_tokens: int
    forward_ms: float
    outside_ms: float

    def as_row(self) -> dict[str, str | float]:
        """For JSON."""
        return asdict(self)


class TimedModel:
    """A decoder whose forwards are timed.

    Args:
        model: who computes; None answers each row with the same logits, drawn once.
        vocab_size: width of the logits.
        clock_s: what times them.
    """

    def __init__(self, model: DecoderModel | None, vocab_size: int, clock_s: Callable[[], float]) -> None:
        self._model = model
        self._clock_s = clock_s
        self._fixed = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0))
        self.spent_s = 0.0

    def forward(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """See `DecoderModel.forward`."""
        start_s = self._clock_s()
        if self._model is None:
            logits = self._fixed.repeat(batch.logits_indices.numel(), 1)
        else:
            logits = self._model.forward(batch, kv_cache)
        self.spent_s += self._clock_s() - start_s
        return logits


class StepBench:
    """Cores over one loaded model.

    Args:
        path: of the model.
        dtype: of its weights.
        machine: whose clock counts.
    """

    def __init__(self, path: Path, dtype: str, machine: Machine) -> None:
        self._dtype = dtype
        self._clock_s = machine.clock_s
        self._loaded = load_model(path, dtype=dtype, kernels="cpu", num_threads=machine.num_threads)
        width = self._loaded.config.vocab_size
        self._grammars = LocalGrammarService(self._loaded.tokenizer, GrammarConfig(), SystemClock(), logits_width=width)

    def close(self) -> None:
        """End the grammar threads."""
        self._grammars.close()

    def beside_the_forward(self, batches: Sequence[int], kinds: Sequence[str]) -> list[StepFigure]:
        """The real model, a few tokens into the outputs."""
        return [figure for kind in kinds for n in batches for figure in self._measure(n, kind, [16], is_real=True)]

    def over_time(self, batches: Sequence[int], kinds: Sequence[str], at_tokens: Sequence[int]) -> list[StepFigure]:
        """Fixed logits in the model's place, at each of these output lengths (ascending)."""
        return [
            figure for kind in kinds for n in batches for figure in self._measure(n, kind, at_tokens, is_real=False)
        ]

    def _measure(self, num_seqs: int, kind: str, at_tokens: Sequence[int], *, is_real: bool) -> list[StepFigure]:
        num_output_tokens = at_tokens[-1] + 2 * WINDOW
        model = TimedModel(self._loaded.model if is_real else None, self._loaded.config.vocab_size, self._clock_s)
        core = self._core(model, num_seqs, PROMPT_TOKENS + num_output_tokens, is_real=is_real)
        for index in range(num_seqs):
            self._add(core, index, kind, num_output_tokens)
        figures, num_done = [], 0
        for target in at_tokens:
            while num_done < target * num_seqs:  # all of them advance together once their prompts are computed
                num_done += sum(len(delta.token_ids) for delta in core.step().deltas)
            outside_s, forward_s = [], []
            with torch.inference_mode():  # as the step loop does
                for _ in range(WINDOW):
                    spent_s, start_s = model.spent_s, self._clock_s()
                    deltas = core.step().deltas
                    total_s, inside_s = self._clock_s() - start_s, model.spent_s - spent_s
                    num_done += sum(len(delta.token_ids) for delta in deltas)
                    forward_s.append(inside_s)
                    outside_s.append(total_s - inside_s)
            figures.append(
                StepFigure(
                    model=self._dtype if is_real else "none",
                    num_seqs=num_seqs,
                    kind=kind,
                    num_output_tokens=target,
                    forward_ms=statistics.median(forward_s) * 1e3,
                    outside_ms=statistics.median(outside_s) * 1e3,
                )
            )
        return figures

    def _core(self, model: TimedModel, num_seqs: int, length: int, *, is_real: bool) -> EngineCore:
        config, device = self._loaded.config, torch.device("cpu")
        num_blocks = num_seqs * (-(-length // BLOCK_SIZE) + 1)
        shape = KvShape(
            num_layers=config.num_layers if is_real else 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads if is_real else 1,
            head_dim=config.head_dim,
            dtype=self._loaded.model.dtype,
        )
        settings = CoreSettings(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=512,
            max_model_len_tokens=length,
            eos_token_ids=self._loaded.tokenizer.eos_token_ids,
        )
        return EngineCore(
            settings,
            model=model,
            kv_cache=KvCacheStorage(num_blocks, shape, device),
            sampler=Sampler(config.vocab_size, num_seqs, device),
            grammars=self._grammars,
            clock=SystemClock(),
        )

    def _add(self, core: EngineCore, index: int, kind: str, max_tokens: int) -> None:
        chance, clock = random.Random(index), SystemClock()
        request = GenerateRequest(
            request_id=RequestId(f"step-{index}"),
            prompt_token_ids=tuple(chance.randrange(1000, 9000) for _ in range(PROMPT_TOKENS)),
            sampling=replace(KINDS[kind], max_tokens=max_tokens),
            timeline=Timeline(clock),
            constraint=CONSTRAINT if kind == "structured" else None,
        )
        ticket = core.compile(request)
        if ticket is not None:
            settled = threading.Event()
            ticket.on_settled(settled.set)
            settled.wait(COMPILE_WITHIN_S)
        core.add(request, ticket)
