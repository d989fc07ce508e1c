"""The config file: one YAML document with the sections `engine`, `prefill`, `decode`, `proxy`.

Owns: the only YAML reader, strict checking, and the merge of `prefill.engine` / `decode.engine` over `engine`.
Every failure is a `ConfigError` of one line that names file, key and what is allowed.
Does not know: what the settings mean.
"""

import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from common.config.engine import EngineConfig
from common.errors import ConfigError

T = TypeVar("T")

SECTIONS = ("engine", "prefill", "decode", "proxy")
ROLES = ("prefill", "decode")
OVERRIDES = "engine"
"""Key of a role's section that holds its overrides of the top-level `engine`."""

_AT_PATH = re.compile(r" - at `(?P<path>\$[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<key>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<key>[^`]*)`")


def load_section(path: str | Path, section: str, type: type[T]) -> T:  # noqa: A002 - the border's agreed name
    """One section of the file as `type` (a msgspec struct); an absent section is an empty one.

    Raises:
        ConfigError: unreadable file, unknown section, unknown, missing or mistyped key.
    """
    values = dict(_mapping(path, _read(path), section))
    if section in ROLES:
        values.pop(OVERRIDES, None)
    return _convert(path, section, values, type)


def role_engine_config(path: str | Path, role: str) -> EngineConfig:
    """The engine of one role: `engine` with `<role>.engine` over it, nested sections merged key by key.

    A relative `model` is resolved against the folder of the config file.

    Raises:
        ConfigError: as `load_section`; keys of the override are checked where they are written.
    """
    document = _read(path)
    shared = _mapping(path, document, OVERRIDES)
    override = _mapping(path, _mapping(path, document, role), OVERRIDES, within=role)
    # The override alone must be right too, so that a wrong key is blamed on the line that holds it.
    for name, part in ((OVERRIDES, shared), (f"{role}.{OVERRIDES}", override)):
        _convert(path, name, {"model": "", **part}, EngineConfig)
    config = _convert(path, OVERRIDES, _merged(shared, override), EngineConfig)
    model = Path(config.model).expanduser()
    if not model.is_absolute():
        model = Path(path).resolve().parent / model
    return msgspec.structs.replace(config, model=str(model))


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the base class, after the check."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"the key {key_node.value!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        # A subclass of SafeLoader: no object construction from the document.
        document = yaml.load(text, Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {_yaml_problem(error)}") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping with the sections {_names(SECTIONS)}")
    for name in document:
        if name not in SECTIONS:
            raise ConfigError(f"{path}: unknown section `{name}`; allowed: {_names(SECTIONS)}")
    return document


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "syntax error"
    return f"line {mark.line + 1}: {problem}" if mark else str(problem)


def _mapping(path: str | Path, parent: dict[str, Any], key: str, within: str = "") -> dict[str, Any]:
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        name = f"{within}.{key}" if within else key
        raise ConfigError(f"{path}: `{name}` must be a mapping of keys, not {value!r}")
    return value


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _convert(path: str | Path, section: str, values: dict[str, Any], type_: type[T]) -> T:
    try:
        return msgspec.convert(values, type_, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(section, str(error), type_)}") from error


def _explain(section: str, message: str, type_: Any) -> str:
    """The message of msgspec as `key: what is wrong; allowed: ...`."""
    found = _AT_PATH.search(message)
    steps = found["path"][1:].lstrip(".") if found else ""
    reason = message[: found.start()] if found else message
    where = f"{section}.{steps}" if steps else section
    if unknown := _UNKNOWN.match(reason):
        allowed = _names(_fields_at(type_, steps)) or "nothing"
        return f"unknown key `{where}.{unknown['key']}`; allowed: {allowed}"
    if missing := _MISSING.match(reason):
        return f"key `{where}.{missing['key']}` is missing"
    return f"key `{where}`: {reason[0].lower()}{reason[1:]}"


def _fields_at(type_: Any, steps: str) -> tuple[str, ...]:
    """Field names of the struct that `steps` (as in `fleet.prefill[...]`) leads to from `type_`."""
    for step in steps.replace("[", ".[").split("."):
        struct = _struct_in(type_)
        if not step:
            continue
        if struct is None:
            return ()
        if not step.startswith("["):
            type_ = next((f.type for f in msgspec.structs.fields(struct) if f.encode_name == step), None)
    struct = _struct_in(type_)
    return tuple(f.encode_name for f in msgspec.structs.fields(struct)) if struct else ()


def _struct_in(type_: Any) -> type[msgspec.Struct] | None:
    """The struct that `type_` is, or holds (`X | None`, `tuple[X, ...]`, `Annotated[X, ...]`)."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct) and not isinstance(type_, types.GenericAlias):
        return type_
    return next((found for part in typing.get_args(type_) if (found := _struct_in(part)) is not None), None)


def _names(names: typing.Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
