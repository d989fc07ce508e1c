"""What P's and D's `main.py` put together alike: a loaded model with its cache, sampler and grammars.

Owns: the order of loading. Called once per process, on a thread of its own: it takes seconds and may fail.
Does not know: KV transfer, which role it is for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from common.clock import Clock
from common.config.engine import EngineConfig
from common.engine.async_engine import AsyncEngine
from common.engine.core import EngineCore
from common.engine.kv_cache.storage import KvCacheStorage, KvShape
from common.engine.model.decode_graphs import CudaRecorder, GraphedDecoder, graph_sizes
from common.engine.model.forward import DecoderModel
from common.engine.model.loaded import LoadedModel
from common.engine.model.loader import load_model
from common.engine.ports import KVSink, KVSource
from common.engine.sampling.processors.loading import build_processors, load_processors
from common.engine.sampling.processors.processor import LogitsProcessor, ProcessorContext
from common.engine.sampling.processors.thinking_budget import OutputMarkers
from common.engine.sampling.raw import RawSampling, SamplingContext, SamplingLimits
from common.engine.sampling.sampler import Sampler
from common.engine.settings import CoreSettings, PullFailurePolicy
from common.engine.structured_output.service import LocalGrammarService
from common.engine.tokenizer import Tokenizer
from common.openai.tool_calls import ToolTags
from common.serving.final_check import FinalCheck
from common.serving.intake import Intake
from common.serving.kv_intent import KvGate
from common.serving.metrics import GrammarMetrics, engine_readings
from common.serving.ports import KvControl, References
from common.serving.respond import Responder
from common.serving.sampling_fields import SamplingReader
from common.serving.served_model import ServedModel
from common.serving.shaping.reasoning import ReasoningTags, reasoning_tags
from common.serving.shaping.tool_calls import tool_tags
from common.serving.surface import Parts
from common.telemetry.metrics import Metrics
from common.wire.model_identity import ModelIdentity

_log = structlog.get_logger(__name__)


class EngineWake:
    """The engine's `wake` for collaborators that are made before the engine. Any thread."""

    def __init__(self) -> None:
        self._wake: Callable[[], None] | None = None

    def bind(self, wake: Callable[[], None]) -> None:
        """From now on calls reach the engine; those before had nothing to wake."""
        self._wake = wake

    def __call__(self) -> None:
        """Wake the engine."""
        if self._wake is not None:
            self._wake()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """Everything of an engine but its way to other engines."""

    config: EngineConfig
    loaded: LoadedModel
    decoder: DecoderModel
    storage: KvCacheStorage
    settings: CoreSettings
    grammars: LocalGrammarService
    sampler: Sampler
    processors: tuple[type[LogitsProcessor], ...]
    model: ServedModel
    clock: Clock
    metrics: Metrics

    @property
    def identity(self) -> ModelIdentity:
        """What P and D must have in common."""
        grammar = self.config.grammar
        return ModelIdentity(
            weights=self.loaded.weights_fingerprint,
            tokenizer=self.loaded.tokenizer.fingerprint,
            chat_template=self.loaded.chat_template.fingerprint,
            grammar=f"backend={grammar.backend};any_whitespace={not grammar.disable_any_whitespace};"
            f"in_reasoning={grammar.enable_in_reasoning}",
        )

    def engine(self, *, source: KVSource | None = None, sink: KVSink | None = None) -> AsyncEngine:
        """The engine, not started."""
        core = EngineCore(
            self.settings,
            model=self.decoder,
            kv_cache=self.storage,
            sampler=self.sampler,
            grammars=self.grammars,
            clock=self.clock,
            kv_source=source,
            kv_sink=sink,
        )
        engine = AsyncEngine(core, self.clock, self.config.max_queued_requests)
        self.metrics.add_source(engine_readings(engine.status))
        return engine

    def parts(
        self,
        engine: AsyncEngine,
        transfer_is_alive: Callable[[], bool],
        *,
        references: References | None = None,
        kv_control: KvControl | None = None,
    ) -> Parts:
        """What the HTTP routes use; `references` makes it a D, `kv_control` a P.

        An engine whose transfer thread has died counts as dead: it could neither hand over nor pull any more.
        """
        gate = KvGate(references, hands_off=kv_control is not None)
        sampling = SamplingReader(self._sampling_context())
        return Parts(
            model=self.model,
            engine=engine,
            kv=gate,
            intake=Intake(self.model, sampling, self.grammars, self.clock),
            responder=Responder(gate.guard(engine), self.model, self.metrics, self._final_check()),
            grammars=self.grammars,
            clock=self.clock,
            is_alive=lambda: engine.status().is_alive and transfer_is_alive(),
            kv_control=kv_control,
        )

    def _final_check(self) -> FinalCheck | None:
        if self.config.grammar.on_inexact == "refuse":
            return None
        return FinalCheck(self.grammars, self.model.reasoning)

    def _sampling_context(self) -> SamplingContext:
        recommended = self.loaded.generation
        return SamplingContext(
            tokenizer=self.loaded.tokenizer,
            vocab_size=self.loaded.tokenizer.vocab_size,
            max_model_len_tokens=self.settings.max_model_len_tokens,
            has_thinking=self.model.reasoning is not None,
            defaults=RawSampling(
                temperature=recommended.temperature,
                top_p=recommended.top_p,
                top_k=recommended.top_k,
                min_p=recommended.min_p,
                repetition_penalty=recommended.repetition_penalty,
                max_tokens=recommended.max_new_tokens,
            ),
            limits=SamplingLimits(max_logprobs=self.config.max_logprobs),
            processors=self.processors,
        )


def load_engine(
    config: EngineConfig,
    clock: Clock,
    metrics: Metrics,
    on_pull_failure: PullFailurePolicy = "recompute",
    *,
    warm_grammars: bool = False,
) -> LoadedEngine:
    """Load the model and allocate what serves it. Blocks for seconds.

    Args:
        config: the role's engine section.
        clock: of timelines, caches, templates.
        metrics: told about grammar compilations.
        on_pull_failure: D's policy.
        warm_grammars: import the grammar libraries now; D does, P compiles nothing.

    Raises:
        StartupError: the model, the device, the pool or a processor cannot be had.
    """
    reasoning = reasoning_tags(config.reasoning_parser) if config.reasoning_parser else None
    tools = tool_tags(config.tool_parser) if config.tool_parser else None
    processors = load_processors(config.logits_processors)
    loaded = _load_model(config, clock)
    storage = _allocate(config, loaded)
    settings = CoreSettings.resolve(
        config,
        storage,
        model_context_tokens=loaded.config.max_positions,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        on_pull_failure=on_pull_failure,
    )
    model = _served(config, loaded, settings, (reasoning, tools), clock)
    return LoadedEngine(
        config=config,
        loaded=loaded,
        decoder=_decoder(config, loaded, storage, settings),
        storage=storage,
        settings=settings,
        grammars=_grammars(config, loaded, clock, GrammarMetrics(metrics), reasoning, warm=warm_grammars),
        sampler=_sampler(loaded, settings, processors, config, _markers(loaded.tokenizer, reasoning, tools)),
        processors=processors,
        model=model,
        clock=clock,
        metrics=metrics,
    )


def _served(
    config: EngineConfig,
    loaded: LoadedModel,
    settings: CoreSettings,
    tags: tuple[ReasoningTags | None, ToolTags | None],
    clock: Clock,
) -> ServedModel:
    reasoning, tools = tags
    return ServedModel(
        name=config.served_model_name,
        root=Path(config.model).name,
        created_s=int(clock.wall_s()),
        max_model_len_tokens=settings.max_model_len_tokens,
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        reasoning=reasoning,
        tools=tools,
        constraint_in_prompt=config.constraint_in_prompt,
    )


def _load_model(config: EngineConfig, clock: Clock) -> LoadedModel:
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(
        Path(config.model),
        dtype=config.dtype,
        device=config.device,
        kernels=config.attention_backend,
        num_threads=config.num_threads,
        clock=clock,
    )
    if loaded.kernels_note is not None:
        _log.info("model.kernels", kernels=loaded.kernels, because=loaded.kernels_note)
    return loaded


def _allocate(config: EngineConfig, loaded: LoadedModel) -> KvCacheStorage:
    shape = KvShape(
        num_layers=loaded.config.num_layers,
        block_size=config.block_size,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        dtype=loaded.kv_cache_dtype(config.kv_cache_dtype),
    )
    return KvCacheStorage.allocate(config, shape, loaded.model.device)


def _decoder(
    config: EngineConfig, loaded: LoadedModel, storage: KvCacheStorage, settings: CoreSettings
) -> DecoderModel:
    """The model, or graphs of its decode steps."""
    if not config.decode_graphs or not loaded.can_record_decodes:
        return loaded.model
    return GraphedDecoder(
        loaded.model,
        CudaRecorder(storage.device),
        storage.tensor,
        graph_sizes(settings.max_num_seqs),
        settings.max_model_len_tokens,
    )


def _grammars(
    config: EngineConfig,
    loaded: LoadedModel,
    clock: Clock,
    observer: GrammarMetrics,
    reasoning: ReasoningTags | None,
    *,
    warm: bool,
) -> LocalGrammarService:
    return LocalGrammarService(
        loaded.tokenizer,
        config.grammar,
        clock,
        logits_width=loaded.config.vocab_size,
        pin_memory=loaded.model.device.type == "cuda",
        observer=observer,
        thinking_marks=(reasoning.start, reasoning.end) if reasoning is not None else None,
        warm=warm,
    )


def _sampler(
    loaded: LoadedModel,
    settings: CoreSettings,
    processors: tuple[type[LogitsProcessor], ...],
    config: EngineConfig,
    markers: OutputMarkers | None,
) -> Sampler:
    width, device = loaded.config.vocab_size, loaded.model.device
    context = ProcessorContext(vocab_size=width, max_rows=settings.max_num_seqs, device=device)
    built = build_processors(processors, context)
    return Sampler(width, settings.max_num_seqs, device, config.logprobs_mode, built, markers=markers)


def _markers(tokenizer: Tokenizer, reasoning: ReasoningTags | None, tools: ToolTags | None) -> OutputMarkers | None:
    """The tags as the tokenizer spells them; None for a model that does not think."""
    if reasoning is None:
        return None

    def ids(tag: str) -> tuple[int, ...]:
        """Token ids of a tag, and of nothing else."""
        return tuple(tokenizer.encode(tag, add_special_tokens=False))

    return OutputMarkers(
        think_start=ids(reasoning.start),
        think_end=ids(reasoning.end),
        tool_start=ids(tools.start) if tools else (),
        tool_end=ids(tools.end) if tools else (),
    )
