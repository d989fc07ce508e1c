"""The house rules that a machine can check (STYLE: sizes, names, floors, one writer of state)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("proxy", "prefill", "decode", "kv_transfer")
SHIPPED = (*ROLES, "common")
FORBIDDEN_NAMES = {"utils", "helpers", "misc", "base", "common", "types"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_CLASS_LINES = 300


def shipped_files() -> list[Path]:
    return sorted(path for package in SHIPPED for path in (ROOT / package).rglob("*.py"))


def all_files() -> list[Path]:
    return shipped_files() + sorted((ROOT / "benchmarks").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.py"))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {str(p.relative_to(ROOT)): n for p in all_files() if (n := p.read_text().count("\n")) > MAX_FILE_LINES}
    assert not long


def test_no_shipped_function_or_class_is_too_long() -> None:
    long = []
    for path in shipped_files():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                limit = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > limit:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({num_lines} > {limit})")
    assert not long


def test_no_module_has_a_name_that_says_nothing() -> None:
    bad = [p for p in shipped_files() if p.stem in FORBIDDEN_NAMES or p.parent.name in FORBIDDEN_NAMES - {"common"}]
    assert not bad


def test_only_move_to_writes_the_state_of_a_lifecycle() -> None:
    writers = []
    for path in shipped_files():
        for function in nodes(path):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name in (
                "move_to",
                "__init__",
            ):
                continue
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                if any(
                    isinstance(t, ast.Attribute) and t.attr in ("state", "_state", "phase", "_phase") for t in targets
                ):
                    writers.append(f"{path.relative_to(ROOT)}:{node.lineno} in {function.name}")
    assert not writers


def test_every_module_says_what_it_owns() -> None:
    silent = [str(p.relative_to(ROOT)) for p in shipped_files() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def test_every_public_function_says_what_it_does_nested_ones_too() -> None:
    silent = []
    for path in [*shipped_files(), *sorted((ROOT / "benchmarks").rglob("*.py"))]:
        for node in nodes(path):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not silent


@pytest.mark.parametrize(
    "package", ["common.wire.kv_params", "common.errors", "common.telemetry.timeline", "proxy.main"]
)
def test_the_ground_floor_and_the_proxy_never_import_torch(package: str) -> None:
    code = f"import {package}, sys; sys.exit('torch' in sys.modules or 'nixl' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_kv_transfer_never_imports_torch() -> None:
    code = "import kv_transfer.producer, kv_transfer.consumer, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_every_sub_package_of_common_has_two_users_among_the_roles() -> None:
    graph = grimp.build_graph(*SHIPPED, cache_dir=None)
    packages = {".".join(module.split(".")[:2]) for module in graph.modules if module.count(".") >= 2}
    lonely = []
    for package in sorted(p for p in packages if p.startswith("common.")):
        users = {role for role in ROLES if graph.chain_exists(role, package, as_packages=True)}
        if len(users) < 2:
            lonely.append(f"{package}: {sorted(users)}")
    assert not lonely


CONFINED = {
    "nixl": "kv_transfer/backends/",
    "xgrammar": "common/engine/structured_output/",
    "llguidance": "common/engine/structured_output/",
    "yaml": "common/config/loader.py",
    "gguf": "common/engine/model/",
    "dns": "proxy/fleet/srv_source",
    "kubernetes": "proxy/fleet/kubernetes_source",
    "prometheus_client": ("common/telemetry/", "proxy/metrics", "common/serving/metrics"),
}


@pytest.mark.parametrize("library", sorted(CONFINED))
def test_a_third_party_is_imported_only_by_its_adapter(library: str) -> None:
    home = CONFINED[library]
    strangers = []
    for path in shipped_files():
        name = str(path.relative_to(ROOT))
        if name.startswith(home):
            continue
        for node in nodes(path):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(module.split(".")[0] == library for module in modules):
                strangers.append(f"{name}:{node.lineno}")
    assert not strangers
