"""Packages import only from rows below them, as ARCHITECTURE.md draws the house; neighbours do not
know each other.
"""

import ast
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


def sources() -> dict[Path, str]:
    """Every module and the package (or top-level module) of the table that it belongs to."""
    files = {
        path: path.relative_to(ROOT / "caffepy").parts[0]
        for path in (ROOT / "caffepy").rglob("*.py")
    }
    for folder in ("cli", "proto", "models"):
        files.update(dict.fromkeys((ROOT / folder).rglob("*.py"), folder))
    return {path: name.removesuffix(".py") for path, name in files.items()}


def imports(path: Path) -> set[str]:
    """The packages of the table that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "caffepy"
        ):
            names = (
                [node.module]
                if node.module != "caffepy"
                else [f"caffepy.{a.name}" for a in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("caffepy.")]
        found.update(name.split(".")[1] for name in names)
    return {name if name in ROWS else "__init__" for name in found}


def test_every_package_has_a_row() -> None:
    assert set(sources().values()) <= set(ROWS)


@pytest.mark.parametrize("path", sorted(sources()), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    package = sources()[path]
    for other in imports(path) - {package}:
        below = ROWS[other] < ROWS[package] or (package, other) in SAME_ROW
        assert below, f"{package} (row {ROWS[package]}) imports {other} (row {ROWS[other]})"


def test_only_the_device_layer_knows_cupy() -> None:
    for path in sources():
        modules = {
            (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        allowed = any(
            f"caffepy/{room}/" in path.as_posix() for room in ("device", "ops/cuda", "collectives")
        )
        assert allowed or not any(m.split(".")[0] == "cupy" for m in modules), (
            f"{path} imports cupy"
        )
