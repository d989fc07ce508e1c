import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.engine.model.cpu_kernels.build import (
    NEEDED_CPU_FLAGS,
    CannotBuild,
    build_key,
    cpu_flags,
    ensure_built,
)

pytestmark = pytest.mark.skipif(not cpu_flags() >= NEEDED_CPU_FLAGS, reason="the kernels need AVX2, FMA and F16C")


def counting_compiler(folder: Path, exit_status: int = 0) -> Path:
    """A compiler that takes a moment, writes what `-o` names and a line into `calls`."""
    script = folder / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        f"echo call >> {folder}/calls\n"
        "for last; do :; done\n"
        f"sleep 0.2; echo library > \"$last\"; echo 'no such header' >&2; exit {exit_status}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler = counting_compiler(tmp_path)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: ensure_built([cache], [str(compiler)]), range(4)))
    assert len(set(built)) == 1
    assert built[0].read_text() == "library\n"
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_library_that_is_there_needs_no_compiler(tmp_path: Path) -> None:
    built = ensure_built([tmp_path / "cache"], [str(counting_compiler(tmp_path))])
    assert ensure_built([tmp_path / "empty", tmp_path / "cache"], []) == built


def test_without_a_compiler_the_reason_names_those_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match=r"none of no-such-compiler is installed"):
        ensure_built([tmp_path], ["no-such-compiler"])


def test_a_failing_compiler_is_quoted_and_leaves_no_library(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match="no such header"):
        ensure_built([tmp_path / "cache"], [str(counting_compiler(tmp_path, exit_status=1))])
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    built = ensure_built([blocked / "cache", tmp_path / "cache"], [str(counting_compiler(tmp_path))])
    assert built.parent == tmp_path / "cache"
    with pytest.raises(CannotBuild, match="no writable folder"):
        ensure_built([blocked / "cache"], [str(counting_compiler(tmp_path))])


def test_another_machine_or_source_has_another_key() -> None:
    assert build_key(frozenset({"avx2"})) != build_key(frozenset({"avx2", "avx512f"}))
    assert build_key(frozenset({"avx2", "fma"})) == build_key(frozenset({"fma", "avx2"}))


def test_a_shared_header_that_changes_makes_another_key(tmp_path: Path) -> None:
    sources, shared = tmp_path / "csrc", tmp_path / "shared"
    for folder in (sources, shared):
        folder.mkdir()
        (folder / "one.h").write_text("// one")
    before = build_key(frozenset(), sources, shared)
    (shared / "one.h").write_text("// two")
    assert build_key(frozenset(), sources, shared) != before


def test_cpu_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(file) == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "absent") == frozenset()
