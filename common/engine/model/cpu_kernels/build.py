"""Compile the kernels once per machine and source: `python -m common.engine.model.cpu_kernels.build`.

Owns: the compiler call and where the result is kept (beside the package, or under ~/.cache where that is read-only).
Processes that start together build once: the others wait on a file lock. Does not know how the library is called.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from common.errors import StartupError

log = structlog.get_logger(__name__)

SOURCES = Path(__file__).parent / "csrc"
SHARED = Path(__file__).parent / "shared"
"""Headers that every library may include."""

COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wno-psabi",
)
NEEDED_CPU_FLAGS = frozenset({"avx2", "fma", "f16c"})
COMPILE_TIMEOUT_S = 300


class CannotBuild(StartupError):
    """The kernels cannot be compiled or run here; the message says why. The torch decoder works without them."""


def cache_folders() -> tuple[Path, ...]:
    """Where a built library may be, best first."""
    return (Path(__file__).parent / "__pycache__", Path.home() / ".cache" / "pd-serve")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction sets of this machine; empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def build_key(flags: frozenset[str], sources: Path = SOURCES, shared: Path = SHARED) -> str:
    """Names a build: 16 hex digits over the CPU's flags, the compiler's and every source file, shared ones too."""
    digest = hashlib.sha256(" ".join([*sorted(flags), *FLAGS]).encode())
    for source in [*sorted(sources.iterdir()), *sorted(shared.iterdir())]:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def ensure_built(
    folders: Sequence[Path] | None = None, compilers: Sequence[str] = COMPILERS, sources: Path = SOURCES
) -> Path:
    """The library for this machine, compiled now if nobody has.

    Args:
        folders: where to look, then to write; default `cache_folders()`.
        compilers: commands to try, the first one found is used.
        sources: folder of its headers and .cpp files.

    Raises:
        CannotBuild: wrong machine, no compiler, no writable folder, or the compiler failed.
    """
    flags = cpu_flags()
    if missing := NEEDED_CPU_FLAGS - flags:
        raise CannotBuild(f"CPU kernels need {', '.join(sorted(missing))}, which this machine does not have")
    places = cache_folders() if folders is None else tuple(folders)
    name = f"pd_kernels-{build_key(flags, sources)}.so"
    for folder in places:
        if (folder / name).is_file():
            return folder / name
    compiler = next((found for command in compilers if (found := shutil.which(command))), None)
    if compiler is None:
        raise CannotBuild(f"CPU kernels need a C++ compiler: none of {', '.join(compilers)} is installed")
    target = _first_writable(places) / name
    with _locked(target.with_suffix(".lock")):
        if not target.is_file():
            log.info("cpu_kernels.compiling", compiler=compiler, to=str(target), usual_s=15)
            _compile(compiler, sources, target)
    return target


def _first_writable(folders: Sequence[Path]) -> Path:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    raise CannotBuild(f"CPU kernels have no writable folder among {', '.join(map(str, folders))}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, sources: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        command = [compiler, *FLAGS, f"-I{SHARED}", *map(str, sorted(sources.glob("*.cpp"))), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuild(f"CPU kernels: {compiler} did not run: {error}") from error
        if done.returncode:
            raise CannotBuild(f"CPU kernels: {compiler} failed: {done.stderr[-2000:]}")
        output.replace(target)


def main() -> int:
    """Build, say where the library is; 1 and the reason when it cannot be built."""
    try:
        sys.stdout.write(f"{ensure_built()}\n")
    except CannotBuild as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
