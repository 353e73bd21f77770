"""Packages import only from rows below them, as ARCHITECTURE.md draws the house; neighbours do not know each other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = {
    "cli": 9,
    "__main__": 10,
    "__init__": 8,
    "pycaffe": 8,
    "train": 8,
    "team": 8,
    "score": 8,
    "trained": 8,
    "features": 8,
    "images": 8,
    "visualize": 8,
    "classify": 8,
    "detect": 8,
    "timing": 8,
    "bench": 8,
    "bench_scaling": 8,
    "doctor": 8,
    "device_pairs": 8,
    "bench_allreduce": 8,
    "inspect_net": 8,
    "summarize": 8,
    "weights_file": 8,
    "upgrade_files": 8,
    "convert_imageset": 8,
    "convert_mnist": 8,
    "convert_cifar": 8,
    "compute_image_mean": 8,
    "inspect_data": 8,
    "draw": 8,
    "export": 8,
    "as_caffe": 8,
    "classifier": 8,
    "detector": 8,
    "io": 5,
    "net_spec": 4,
    "coord_map": 5,
    "solver": 7,
    "report": 7,
    "parallel": 7,
    "net": 6,
    "layer": 5,
    "data": 4,
    "filler": 4,
    "layer_text": 4,
    "ops": 3,
    "proto": 3,
    "pyblob": 3,
    "reporter": 3,
    "blob": 2,
    "cache": 2,
    "device": 2,
    "user_code": 2,
    "caffe_alias": 1,
    "errors": 1,
    "registry": 1,
    "paths": 1,
    "files": 1,
    "given_up": 1,
    "gpus": 1,
    "graph_svg": 1,
    "graph_bitmap": 2,
    "models": 4,
}
SAME_ROW = {
    ("train", "team"),
    ("summarize", "inspect_net"),
    ("score", "team"),
    ("score", "trained"),
    ("features", "trained"),
    ("visualize", "trained"),
    ("visualize", "weights_file"),
    ("visualize", "images"),
    # the tools of Caffe's Python scripts are built on its Python classes
    ("images", "io"),
    ("images", "pycaffe"),
    ("classify", "images"),
    ("classify", "classifier"),
    ("classify", "trained"),
    ("detect", "images"),
    ("detect", "detector"),
    ("detect", "trained"),
    ("bench_scaling", "bench"),
    ("bench_scaling", "team"),
    ("pycaffe", "__init__"),
    ("pycaffe", "team"),
    ("__init__", "pycaffe"),
    ("__init__", "classifier"),
    ("__init__", "detector"),
    ("classifier", "pycaffe"),
    ("detector", "pycaffe"),
    ("export", "__init__"),
    ("export", "trained"),
    ("registry", "errors"),
    ("files", "errors"),
    ("gpus", "errors"),
}


def sources() -> dict[Path, str]:
    """Every module and the package (or top-level module) of the table that it belongs to."""
    files = {path: path.relative_to(ROOT / "caffepy").parts[0] for path in (ROOT / "caffepy").rglob("*.py")}
    for folder in ("cli", "proto", "models"):
        files.update(dict.fromkeys((ROOT / folder).rglob("*.py"), folder))
    return {path: name.removesuffix(".py") for path, name in files.items()}


def imports(path: Path) -> set[str]:
    """The packages of the table that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "caffepy":
            names = [node.module] if node.module != "caffepy" else [f"caffepy.{a.name}" for a in node.names]
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
        allowed = "caffepy/ops/cuda" in str(path) or path.name in ("gpus.py", "nccl.py")
        assert allowed or not any(m.split(".")[0] == "cupy" for m in modules), f"{path} imports cupy"
