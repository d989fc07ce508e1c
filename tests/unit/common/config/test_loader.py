from pathlib import Path

import msgspec
import pytest

from common.config.loader import load_section, role_engine_config
from common.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    weight: int = 1


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: int = 8000
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()


def write(folder: Path, text: str) -> Path:
    path = folder / "pd.yaml"
    path.write_text(text)
    return path


def failure(path: Path, section: str = "proxy") -> str:
    with pytest.raises(ConfigError) as caught:
        load_section(path, section, Outer)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_a_section_becomes_its_type_and_an_absent_one_its_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "proxy:\n  port: 9000\n  many: [{url: a}, {url: b, weight: 2}]\n")
    config = load_section(path, "proxy", Outer)
    assert (config.port, [inner.weight for inner in config.many]) == (9000, [1, 2])
    assert load_section(path, "decode", Outer) == Outer()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("proxy: {prot: 1}", ["`proxy.prot`", "`port`", "`inner`"]),
        ("proxy: {inner: {url: a, wieght: 1}}", ["`proxy.inner.wieght`", "`weight`"]),
        ("proxy: {many: [{url: a, wieght: 1}]}", ["wieght", "`weight`"]),
        ("proxy: {port: eight}", ["`proxy.port`", "int", "str"]),
        ("proxy: {inner: {}}", ["`proxy.inner.url`", "missing"]),
        ("proxy: 3", ["`proxy`", "mapping"]),
        ("prxy: {}", ["`prxy`", "`proxy`", "`engine`"]),
        ("- 1", ["mapping"]),
        ("proxy: {port: 1", ["line 1"]),
        ("proxy: {port: 1, port: 2}", ["'port'", "twice"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_key_and_what_is_allowed(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    message = failure(write(tmp_path, text))
    assert all(word in message for word in words), message


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    assert "cannot be read" in failure(tmp_path / "absent.yaml")


def test_a_role_overrides_the_shared_engine_key_by_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "engine: {model: m.gguf, block_size: 32, grammar: {backend: guidance, cache_bytes: 5}}\n"
        "decode: {port: 1, engine: {block_size: 8, grammar: {cache_bytes: 7}}}\n",
    )
    decode, prefill = role_engine_config(path, "decode"), role_engine_config(path, "prefill")
    assert (decode.block_size, decode.grammar.backend, decode.grammar.cache_bytes) == (8, "guidance", 7)
    assert (prefill.block_size, prefill.grammar.cache_bytes) == (32, 5)
    assert load_section(path, "decode", Outer).port == 1


def test_a_relative_model_starts_at_the_files_folder_and_an_absolute_one_stays(tmp_path: Path) -> None:
    assert role_engine_config(write(tmp_path, "engine: {model: ../m}"), "decode").model == str(tmp_path / ".." / "m")
    assert role_engine_config(write(tmp_path, "engine: {model: /m}"), "decode").model == "/m"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("engine: {model: m, blok_size: 8}", "`engine.blok_size`"),
        ("engine: {model: m}\ndecode: {engine: {blok_size: 8}}", "`decode.engine.blok_size`"),
        ("engine: {model: m}\ndecode: {engine: {grammar: {bakend: x}}}", "`decode.engine.grammar.bakend`"),
        ("decode: {engine: {block_size: 8}}", "`engine.model`"),
    ],
)
def test_a_wrong_engine_key_is_blamed_where_it_is_written(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        role_engine_config(write(tmp_path, text), "decode")
    assert key in str(caught.value)
