"""From the frozen `GenerateRequest` to the scheduler's `Request`s, one per choice.

Journey row 5. Owns: what is refused at the door, and how choices get their seeds. Does not know: queues.
"""

from dataclasses import replace

from common.engine.request import GenerateRequest
from common.engine.sampling.random import seed_for_choice
from common.engine.scheduling.sequence import ChoiceGroup, Request
from common.engine.settings import CoreSettings
from common.errors import ContextLengthExceeded, InvalidRequest


def check_admissible(request: GenerateRequest, settings: CoreSettings) -> None:
    """Refuse what could never be served here; thread-safe.

    Raises:
        ContextLengthExceeded: prompt plus `max_tokens` is longer than the engine's longest sequence.
        InvalidRequest: an empty prompt, or a KV reference of another prompt.
    """
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if num_prompt + max_tokens > settings.max_model_len_tokens:
        raise ContextLengthExceeded(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed the context of "
            f"{settings.max_model_len_tokens} tokens",
            param="max_tokens",
        )
    if request.reference is not None and request.reference.prompt_token_ids != request.prompt_token_ids:
        raise InvalidRequest("the KV reference belongs to another prompt", param="kv_transfer_params")
    if request.hand_off and request.sampling.n != 1:
        raise InvalidRequest("a handed-off prompt has one choice", param="n")


def make_choices(request: GenerateRequest, order: int, eos_token_ids: frozenset[int]) -> list[Request]:
    """The request's choices, leader first; more than one share a `ChoiceGroup`.

    Args:
        request: checked.
        order: of admission; older requests are served first.
        eos_token_ids: of the model.
    """
    params = request.sampling
    stop_ids = eos_token_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_token_ids
    choices = [
        Request(
            request,
            arrival=(order, index),
            sampling=replace(params, n=1) if params.n > 1 else params,
            seed=seed_for_choice(params.seed, index),
            stop_ids=stop_ids,
        )
        for index in range(params.n)
    ]
    if len(choices) > 1:
        ChoiceGroup(choices)
    return choices
