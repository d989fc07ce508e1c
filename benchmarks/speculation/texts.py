"""What is asked: texts that can be guessed well, hardly, and not at all.

Owns: the bodies. Does not know: who answers them.
"""

from collections.abc import Mapping
from typing import Any

_ADDRESS = {
    "type": "object",
    "properties": {
        "street_address": {"type": "string", "maxLength": 20},
        "postal_code": {"type": "string", "maxLength": 8},
        "country_name": {"type": "string", "maxLength": 12},
        "is_residential": {"type": "boolean"},
        "number_of_rooms": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["street_address", "postal_code", "country_name", "is_residential", "number_of_rooms"],
    "additionalProperties": False,
}
_PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "occupation": {"type": "string", "maxLength": 20},
    },
    "required": ["first_name", "last_name", "age", "occupation"],
    "additionalProperties": False,
}
_PEOPLE = {"type": "array", "minItems": 4, "maxItems": 4, "items": _PERSON}
_LOOKUP = {
    "type": "function",
    "function": {"name": "look_up_an_address", "parameters": _ADDRESS},
}
_CODE = """def add_numbers(first_value, second_value):
    result = first_value + second_value
    return result

def multiply_numbers(first_value, second_value):
    result = first_value * second_value
    return result
"""
_FACT = (
    "The lighthouse on the northern cape was built of grey stone in the spring of the year after the flood, and the "
    "keeper's daughter lit its lamp for the first time while the whole village stood on the shore."
)


def _asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0.7, **fields}


def _form(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


TEXTS: Mapping[str, Mapping[str, Any]] = {
    "story": _asked("Write a story about a fox and a lighthouse."),
    "answer out of a text": _asked(
        f"{_FACT}\nWho lit the lamp, and when? Answer in the words of the text.", temperature=0
    ),
    "code edit": _asked(f"Repeat this code and rename result to total:\n{_CODE}", temperature=0),
    "json object": _asked("Give an address.", response_format=_form(_ADDRESS)),
    "json, no white space": _asked(
        "Give an address.", structured_outputs={"json": _ADDRESS, "disable_any_whitespace": True}
    ),
    "json array of objects": _asked("List four people.", response_format=_form(_PEOPLE)),
    "tool call": _asked("Where does Mrs. Miller live?", tools=[_LOOKUP], tool_choice="required"),
}
"""Name → fields of a chat request. The model is small: what counts is the shape of its answers, not their sense."""
