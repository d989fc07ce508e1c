"""The one model an engine serves, as the HTTP side sees it.

Owns: the value `main.py` makes of the loaded model and the config. Does not know: weights, devices.
"""

from dataclasses import dataclass

from common.engine.chat_template import ChatTemplate
from common.engine.tokenizer import Tokenizer
from common.errors import NotFound
from common.openai.tool_calls import ToolTags
from common.serving.shaping.reasoning import ReasoningTags


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model.

    Attributes:
        name: what clients write in `model`.
        root: where it was loaded from, shown in `/v1/models`.
        created_s: Unix time shown there.
        max_model_len_tokens: longest prompt plus output.
        max_logprobs: most alternatives a request may ask for.
        constraint_in_prompt: the template renders `response_format` and `tool_choice` into the prompt.
    """

    name: str
    root: str
    created_s: int
    max_model_len_tokens: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    max_logprobs: int = 20
    reasoning: ReasoningTags | None = None
    tools: ToolTags | None = None
    constraint_in_prompt: bool = False

    def require(self, name: str | None) -> None:
        """Raise `NotFound` unless `name` is this model; None means whichever there is."""
        if name is not None and name != self.name:
            raise NotFound(f"the model {name!r} does not exist; this engine serves {self.name!r}", param="model")
