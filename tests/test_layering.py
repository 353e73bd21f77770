"""Packages import only from rows below them in the table of ARCHITECTURE.md; packages of one row do
not import each other, and no files import each other in a circle.
"""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = {
    "__init__": 12,
    "__main__": 12,
    "as_caffe": 12,
    "cli": 11,
    "commands": 10,
    "pycaffe": 9,
    "export": 9,
    "parallel": 8,
    "solver": 7,
    "collectives": 7,
    "report": 7,
    "drawing": 7,
    "net": 6,
    "layer": 5,
    "data": 4,
    "models": 4,
    "ops": 3,
    "proto": 3,
    "device": 2,
    "core": 1,
}
SAME_ROW = {
    # the version and the public names of the package, which imports nothing for them
    ("cli", "__init__"),
    ("pycaffe", "__init__"),
    ("export", "__init__"),
}


@cache
def sources() -> dict[Path, str]:
    """Every module and the package (or top-level module) of the table that it belongs to."""
    files = {
        path: path.relative_to(ROOT / "caffepy").parts[0]
        for path in (ROOT / "caffepy").rglob("*.py")
    }
    for folder in ("cli", "proto", "models"):
        files.update(dict.fromkeys((ROOT / folder).rglob("*.py"), folder))
    return {path: name.removesuffix(".py") for path, name in files.items()}


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every import anywhere in a module, in functions and under TYPE_CHECKING, too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Names of modules, or of things in modules, that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def imports(path: Path) -> set[str]:
    """The packages of the table that a module imports, anywhere in it."""
    found = {n.split(".")[1] for node in statements(path) for n in names(node) if is_ours(n)}
    return {name if name in ROWS else "__init__" for name in found}


def is_ours(name: str) -> bool:
    return name.startswith("caffepy.")


def test_every_package_has_a_row() -> None:
    assert set(sources().values()) <= set(ROWS)


@pytest.mark.parametrize("path", sorted(sources()), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    package = sources()[path]
    for other in imports(path) - {package}:
        below = ROWS[other] < ROWS[package] or (package, other) in SAME_ROW
        assert below, f"{package} (row {ROWS[package]}) imports {other} (row {ROWS[other]})"


def test_files_do_not_import_each_other_in_circles() -> None:
    """The package itself, whose names are imported on first use, stands above all."""
    modules = {}
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "caffepy" else ("caffepy", *parts))
        modules[name.removesuffix(".__init__")] = path
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = [n for node in statements(path) for n in names(node) if is_ours(n)]
        targets = {n if n in modules else n.rpartition(".")[0] for n in found}
        graph[module] = targets - {module, "caffepy"}
    assert len(graph["caffepy.solver.solver"]) > 5
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_a_start_on_a_gpu_does_without_the_cpu_s_kernels() -> None:
    """Numba takes a quarter of a second to import."""
    for path in (ROOT / "caffepy" / "ops" / "cuda").rglob("*.py"):
        top = ast.parse(path.read_text()).body
        found = [node for node in top if isinstance(node, (ast.Import, ast.ImportFrom))]
        wanted = [name for node in found for name in names(node)]
        assert not any(name.startswith(("caffepy.ops.cpu", "numba")) for name in wanted), path


def test_only_the_device_layer_knows_cupy() -> None:
    for path in sources():
        known = any(
            name.split(".")[0] == "cupy" for node in statements(path) for name in names(node)
        )
        allowed = any(
            f"caffepy/{room}/" in path.as_posix() for room in ("device", "ops/cuda", "collectives")
        )
        assert allowed or not known, f"{path} imports cupy"
