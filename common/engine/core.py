"""One step of the engine: plan, forward with the masks filling meanwhile, sample, accept, apply.

Journey rows 5 to 8. Owns: every request, block, row and matcher of one engine, on one thread. Commands come in by `add`
and `abort`, answers go out as `TokenDelta`s of `step`. Does not know: threads, text, HTTP, NIXL, its role.
"""

from collections.abc import Sequence

import torch

from common.clock import Clock
from common.engine.acceptance import Kept, as_engine_error, keep_sampled
from common.engine.admission import check_admissible, make_choices
from common.engine.kv_cache.block_table import num_blocks_for
from common.engine.kv_cache.manager import KvCacheManager
from common.engine.kv_cache.storage import KvCacheStorage
from common.engine.model.forward import DecoderModel
from common.engine.outputs import TokenDelta
from common.engine.ports import KVSink, KVSource, PullOutcome, PullStatus
from common.engine.request import GenerateRequest
from common.engine.request_state import FinishReason
from common.engine.runner.step_runner import StepRunner
from common.engine.scheduling.scheduler import Scheduler
from common.engine.scheduling.sequence import Request
from common.engine.settings import CoreSettings
from common.engine.snapshot import take_snapshot
from common.engine.speculation.drafter import Drafter
from common.engine.status import EngineStatus
from common.engine.step import SampledTokens, SamplerPort, StepPlan, StepResult
from common.engine.step_timer import StepPart, StepTimer
from common.engine.structured_output.grammar import CompileState, GrammarService, GrammarTicket
from common.errors import EngineError, NotSupported, PDError, TransferError
from common.ids import RequestId
from common.telemetry.timeline import Event
from common.wire.kv_params import KvReference


class EngineCore:
    """The engine without its thread.

    Args:
        settings: limits and policies.
        model: the decoder.
        kv_cache: its paged cache.
        sampler: logits to tokens.
        grammars: structured output.
        clock: of timelines and step times.
        kv_source: where remote KV comes from (D); None refuses references.
        kv_sink: who takes finished prompts over (P); None refuses handoffs.
    """

    def __init__(  # noqa: PLR0913 - the one list of an engine's collaborators, written once in each main.py
        self,
        settings: CoreSettings,
        *,
        model: DecoderModel,
        kv_cache: KvCacheStorage,
        sampler: SamplerPort,
        grammars: GrammarService,
        clock: Clock,
        kv_source: KVSource | None = None,
        kv_sink: KVSink | None = None,
    ) -> None:
        self.settings = settings
        self._storage = kv_cache
        self._grammars = grammars
        self._clock = clock
        self._source = kv_source
        self._sink = kv_sink
        self.kv = KvCacheManager(
            kv_cache.num_blocks, kv_cache.block_size, enable_prefix_cache=settings.enable_prefix_cache
        )
        speculation = settings.speculation
        self.scheduler = Scheduler(
            self.kv,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            None if speculation is None else Drafter(speculation, settings.max_model_len_tokens),
        )
        self._timer = StepTimer(clock)
        self._runner = StepRunner(settings, model, kv_cache, sampler, grammars, self._timer)
        self._choices: dict[RequestId, list[Request]] = {}
        self._num_admitted = 0
        self._deltas: list[TokenDelta] = []

    # -- commands ----------------------------------------------------------------------------------------------------

    def check(self, request: GenerateRequest) -> None:
        """Refuse at the door what could never be served here; thread-safe.

        Raises:
            ContextLengthExceeded, InvalidRequest: see `check_admissible`.
            NotSupported: this engine neither pulls nor hands over.
        """
        check_admissible(request, self.settings)
        if request.reference is not None and self._source is None:
            raise NotSupported("this engine does not read KV of other engines", param="kv_transfer_params")
        if request.hand_off and self._sink is None:
            raise NotSupported("this engine does not hand KV over", param="kv_transfer_params")

    def compile(self, request: GenerateRequest) -> GrammarTicket | None:
        """Ask for the request's grammar; thread-safe and quick, so it is asked before the step loop is free."""
        return None if request.constraint is None else self._grammars.compile(request.constraint)

    def add(self, request: GenerateRequest, ticket: GrammarTicket | None = None) -> None:
        """Take a checked request in. `ticket` is what `compile` gave for it."""
        request.timeline.mark(Event.ADMITTED)
        choices = make_choices(request, self._num_admitted, self.settings.eos_token_ids)
        self._num_admitted += 1
        self._choices[request.request_id] = choices
        leader = choices[0]
        leader.ticket = ticket if ticket is not None else self.compile(request)
        self.scheduler.add(leader)
        if leader.reference is not None and self._source is not None:
            try:
                self._source.expect(leader.key, leader.reference)
            except TransferError as error:
                self._source.abandon(leader.key)
                leader.reference = None
                self._fall_back(leader, "reference_refused", error)

    def refuse(self, request: GenerateRequest, error: Exception) -> None:
        """`add` broke on this request: end it, whether it got in or not."""
        reason = as_engine_error(error, "the request could not be admitted")
        if request.request_id in self._choices:
            for choice in self._choices[request.request_id]:
                if not choice.is_finished:
                    self._end(choice, FinishReason.ERROR, reason)
            return
        for index in range(request.sampling.n):
            self._deltas.append(
                TokenDelta(request_id=request.request_id, index=index, finish=FinishReason.ERROR, error=reason)
            )

    def abort(self, request_id: RequestId, index: int | None = None) -> None:
        """End one choice of a request, or every one (None); unknown and ended ones are left alone.

        A request that was handed over in the very step its reader left in gives its lease up: nobody has the reference.
        """
        if index is None and request_id not in self._choices and self._sink is not None:
            self._sink.give_up(request_id)
        for request in self._choices.get(request_id, ()):
            if not request.is_finished and index in (None, request.index):
                self._end(request, FinishReason.ABORTED)

    def fail_all(self, error: PDError) -> None:
        """End every live request with `error`: a step broke in a way that belongs to no single one."""
        for choices in list(self._choices.values()):
            for request in choices:
                if not request.is_finished:
                    self._end(request, FinishReason.ERROR, error)
        self._choices.clear()

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Do one step; returns at once when there is nothing to compute. Many steps share one `inference_mode`."""
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.step()
        self._poll()
        self._timer.start()
        plan = self.scheduler.plan()
        has_refused = self._transfer(plan)
        self._timer.lap(StepPart.PLAN)
        if plan.chunks:
            self._compute(plan)
        elif plan.left:
            self._runner.follow(plan)
        deltas, self._deltas = tuple(self._deltas), []
        return StepResult(deltas=deltas, started=plan.started, did_work=bool(plan.chunks or plan.left or has_refused))

    def _poll(self) -> None:
        """Take in what happened elsewhere: ended leases, ended pulls, settled grammars."""
        if self._sink is not None:
            for lease_id in self._sink.poll_released():
                self.kv.unpin(lease_id)
        if self._source is not None:
            for outcome in self._source.poll():
                self._settle_pull(outcome)
        for request in list(self.scheduler.grammar_pending.values()):
            self._settle_grammar(request)

    def _settle_pull(self, outcome: PullOutcome) -> None:
        failed = self.scheduler.settle_pull(outcome)
        if failed is not None:
            error = TransferError(outcome.reason or f"the KV pull ended as {outcome.status.value}")
            self._fall_back(failed, outcome.cause or outcome.status.value, error)

    def _fall_back(self, request: Request, reason: str, error: PDError) -> None:
        """The peer's KV will not come: compute the prompt here, or end the request, as the policy says."""
        if self.settings.on_pull_failure == "recompute":
            self.scheduler.counters.fell_back(reason)
        else:
            self._end(request, FinishReason.ERROR, error)

    def _settle_grammar(self, request: Request) -> None:
        ticket = request.ticket
        assert ticket is not None  # a constrained request is never without one
        if ticket.state is CompileState.COMPILING:
            return
        if ticket.state is CompileState.FAILED:
            self._end(request, FinishReason.ERROR, ticket.error or EngineError("the grammar failed without a reason"))
            return
        try:
            for member in self._choices[request.request_id]:
                member.matcher = self._grammars.start_matcher(ticket, member.stop_ids, member.thinking)
        except Exception as error:  # noqa: BLE001 - grammar libraries raise anything; it is this request's failure
            self._end(request, FinishReason.ERROR, as_engine_error(error, "no matcher for the grammar"))
            return
        self.scheduler.grammar_ready(request)

    def _transfer(self, plan: StepPlan) -> bool:
        """Carry out what the plan decided about blocks and peers; copies first, they read what pulls may overwrite.

        Returns:
            Whether a pull was refused at once, so that the next plan has something new to decide.
        """
        self._storage.copy_blocks(plan.copies)
        if self._source is None:
            return False
        for key in plan.cancelled:
            self._source.cancel(key)
        for key in plan.abandoned:
            self._source.abandon(key)
        if plan.pulls:
            self._storage.finish_pending_work()
        has_refused = False
        for pull in plan.pulls:
            try:
                self._source.start_pull(pull)
            except TransferError as error:
                has_refused = True
                failed = PullOutcome(
                    request_id=pull.request_id, status=PullStatus.FAILED, cause="refused", reason=str(error)
                )
                self._settle_pull(failed)
        return has_refused

    def _compute(self, plan: StepPlan) -> None:
        try:
            sampled = self._runner.run(plan)
        except Exception as error:  # noqa: BLE001 - whatever broke the forward ends its requests, never the loop
            for chunk in plan.chunks:
                self._end(chunk.request, FinishReason.ERROR, as_engine_error(error, "the forward failed"))
            return
        self.scheduler.apply(plan)
        if sampled is not None:
            self._keep(plan, sampled)
        self._timer.lap(StepPart.APPLY)

    # -- what a step gave --------------------------------------------------------------------------------------------

    def _keep(self, plan: StepPlan, sampled: SampledTokens) -> None:
        """Accept the sampled tokens, one request at a time; an error is that request's alone."""
        going_on: list[tuple[Request, Sequence[int]]] = []
        first_row = num_tokens = 0
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            request, kept = chunk.request, keep_sampled(chunk, first_row, sampled, self.settings)
            first_row += chunk.num_samples
            num_tokens += len(kept.token_ids)
            if chunk.draft:
                self.scheduler.settle_draft(request, len(chunk.draft), max(len(kept.token_ids) - 1, 0))
            if kept.error is None and kept.ending is None:
                going_on.append((request, kept.token_ids))
            if kept.token_ids:
                self._emit(request, kept)
            if kept.error is not None:
                self._end(request, FinishReason.ERROR, kept.error)
        self.scheduler.counters.num_generated_tokens += num_tokens
        if plan.is_decode and len(going_on) == len(plan.chunks):
            self._runner.record_all(sampled.token_ids)
        else:
            self._runner.record(going_on)

    def _emit(self, request: Request, kept: Kept) -> None:
        ending = kept.ending
        is_first = request.num_output_tokens == len(kept.token_ids)
        if ending is None and not is_first:  # nearly always
            name, index = request.request_id, request.index
            delta = TokenDelta(request_id=name, index=index, token_ids=kept.token_ids, logprobs=kept.logprobs)
            self._deltas.append(delta)
            return
        if is_first:
            request.timeline.mark(Event.FIRST_TOKEN)
        handoff = None
        if ending is not None and ending.reason is FinishReason.HANDED_OFF:
            try:
                handoff = self._hand_off(request)
            except PDError as error:
                self._end(request, FinishReason.ERROR, error)
                return
        if ending is not None:
            self.scheduler.finish(request, ending.reason)
            self._forget(request)
        has_prompt_logprobs = is_first and request.prompt_logprobs is not None
        self._deltas.append(
            TokenDelta(
                request_id=request.request_id,
                index=request.index,
                token_ids=kept.token_ids,
                logprobs=kept.logprobs,
                finish=None if ending is None else ending.reason,
                stop_reason=None if ending is None else ending.stop_reason,
                handoff=handoff,
                prompt_logprobs=tuple(request.prompt_logprobs or ()) if has_prompt_logprobs else None,
                num_cached_tokens=request.num_prefix_tokens + request.num_pulled_tokens if is_first else 0,
                num_pulled_tokens=request.num_pulled_tokens if is_first else 0,
            )
        )

    def _hand_off(self, request: Request) -> KvReference:
        """Leave the prompt's blocks under a lease; they stay pinned until the lease is reported as released."""
        if self._sink is None:
            raise NotSupported("this engine does not hand KV over", param="kv_transfer_params")
        block_ids = request.holding.table.slice(0, num_blocks_for(request.num_prompt_tokens, self.kv.block_size))
        reference = self._sink.hand_off(request.key, block_ids, request.prompt_token_ids)
        self.kv.pin(reference.lease_id, block_ids)
        self.scheduler.counters.num_handoffs += 1
        return reference

    def _end(self, request: Request, reason: FinishReason, error: PDError | None = None) -> None:
        """End a request without a new token, and every choice that still waited for it."""
        for ended in self.scheduler.finish(request, reason, error):
            self._deltas.append(TokenDelta(request_id=ended.request_id, index=ended.index, finish=reason, error=error))
            self._forget(ended)

    def _forget(self, request: Request) -> None:
        choices = self._choices.get(request.request_id)
        if choices is not None and all(choice.is_finished for choice in choices):
            del self._choices[request.request_id]

    def status(self) -> EngineStatus:
        """A picture of the engine between two steps; step-loop thread only."""
        return take_snapshot(self.scheduler, self._timer)
