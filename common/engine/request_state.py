"""States of a request inside an engine, and how it can end.

Owns: the two enums and the transition table. The one writer is `Request.move_to`.
"""

from enum import Enum

from common.state_machine import Transitions


class RequestState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why it ended; `value` is OpenAI's word where there is one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    REPETITION = "repetition"
    HANDED_OFF = "handed_off"
    ABORTED = "abort"
    ERROR = "error"


TRANSITIONS = Transitions(
    {
        # A grammar that is still compiling holds the request before anything is reserved or pulled for it.
        RequestState.WAITING_FOR_GRAMMAR: {RequestState.WAITING, RequestState.FINISHED},
        RequestState.WAITING: {
            RequestState.WAITING_FOR_GRAMMAR,
            RequestState.WAITING_FOR_REMOTE_KV,
            RequestState.RUNNING,
            RequestState.FINISHED,
        },
        # -> WAITING: pull failed, recompute
        RequestState.WAITING_FOR_REMOTE_KV: {RequestState.WAITING, RequestState.RUNNING, RequestState.FINISHED},
        RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.FINISHED},
        RequestState.PREEMPTED: {RequestState.RUNNING, RequestState.FINISHED},
        RequestState.FINISHED: set(),
    }
)
