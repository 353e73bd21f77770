"""Commands, flags, links and messages of README.md and docs/: they run, they are there, and the
messages are caffepy's.

Of each ```sh block the lines that begin with `caffepy `, and each ```python block as a script, run
in the order of their document, in one folder. All other lines of such blocks, and those that need
what a test has not, stand in NOT_RUN with the reason.
"""

import ast
import gzip
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pytest

from caffepy import models
from caffepy.cli import main
from tests.test_layering import ROWS

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "docs/tour.md",
    "docs/reference.md",
    "docs/from-caffe.md",
    "docs/troubleshooting.md",
    "docs/many-machines.md",
    "docs/parameter-server.md",
)

DEVELOPERS = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "dev").glob("*.md")),
]
"""Pages for those who change the code."""

WITHOUT_EXAMPLES = [
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "docs/differences.md",
    "docs/forks.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "models").glob("*/README.md")),
]
"""Pages whose commands need files that are not here."""

PAGES = [*DOCUMENTS, *DEVELOPERS, *WITHOUT_EXAMPLES]

CREATES_ENVIRONMENT = "makes an environment and installs into it"
STARTS_SHELL = "is for the reader's shell"
NEEDS_GPUS = "needs GPUs"
NEEDS_MACHINES = "needs several machines"
NEEDS_RAY = "needs Ray; tests/cli/test_cluster.py trains so"
NOT_RUN = {
    "python3 -m venv .venv && .venv/bin/pip install '.[plot]' && .venv/bin/caffepy train --solver digits": (
        CREATES_ENVIRONMENT
    ),
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[dev]' && .venv/bin/pytest -n auto": CREATES_ENVIRONMENT,
    "pip install '.[plot,tensorboard,onnx]' onnxruntime": CREATES_ENVIRONMENT,
    "pip install '.[cuda13]'": CREATES_ENVIRONMENT,
    ". .venv/bin/activate": STARTS_SHELL,
    "mkdir -p ~/caffepy-tour && cd ~/caffepy-tour": STARTS_SHELL,
    "caffepy doctor": "tells what is broken on this machine by its exit code",
    "caffepy train --solver digits --gpu 0": NEEDS_GPUS,
    "caffepy train --solver digits --gpu all": NEEDS_GPUS,
    "caffepy train --solver solver.prototxt --gpu all": NEEDS_GPUS,
    "caffepy device-query --gpu all": NEEDS_GPUS,
    "caffepy device-pairs --gpu all --measure": NEEDS_GPUS,
    "caffepy bench scaling --model resnet50 --gpu all": NEEDS_GPUS,
    "caffepy bench allreduce --gpu all": NEEDS_GPUS,
    "pip install 'caffepy[cuda13,mpi]'": CREATES_ENVIRONMENT,
    "mpirun -n 4 --hostfile hosts --map-by node caffepy train --solver solver.prototxt --gpu all": NEEDS_MACHINES,
    "srun -N 4 --ntasks-per-node 1 --gpus-per-node 8 --mpi=pmix caffepy train --solver solver.prototxt --gpu all": (
        NEEDS_MACHINES
    ),
    "pip install 'caffepy[ray]'": CREATES_ENVIRONMENT,
    "sbatch slurm-servers.sh --solver solver.prototxt --gpu all --consistency ssp:4 --every 25": (
        NEEDS_MACHINES
    ),
    "caffepy train --solver digits --cluster local --nodes 4 --cpu 1 --consistency ssp:1 --every 5": NEEDS_RAY,
    "export NCCL_SOCKET_IFNAME=ib0": STARTS_SHELL,
    "export NCCL_DEBUG=INFO": STARTS_SHELL,
}
EXTRAS = {
    "plot": "matplotlib",
    "--plot": "matplotlib",
    "--tensorboard": "tensorboardX",
    "export": "onnxruntime",
}
"""What a word of a command line needs besides caffepy."""

SOLVER = """
net: "train_val.prototxt" test_iter: 3 test_interval: 6 base_lr: 0.05 lr_policy: "fixed" momentum: 0.9
display: 2 max_iter: 6 snapshot: 3 snapshot_prefix: "snap" random_seed: 1
"""

Captured = pytest.CaptureFixture[str]


class Block(NamedTuple):
    """A fenced block: its language, the line where it starts, its text."""

    language: str
    line: int
    text: str


@cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str) -> Iterator[Block]:
    text = text_of(document)
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(found[1], text.count("\n", 0, found.start()) + 2, found[2])


def lines(block: Block) -> list[str]:
    """The command lines of a block, without comments."""
    return [
        line
        for line in (re.sub(r"(^|\s+)#.*", "", line) for line in block.text.splitlines())
        if line
    ]


def table(document: str) -> Iterator[list[str]]:
    """The cells of each row of a document's tables."""
    for line in text_of(document).splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what readers bring: a net of theirs, original files of MNIST and
    CIFAR-10.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("CAFFEPY_AS_CAFFE", "GLOG_log_dir", "GLOG_minloglevel"):
        monkeypatch.delenv(name, raising=False)
    net = models.path("digits", "train_val")
    assert net
    digits = Path(net)
    (tmp_path / "train_val.prototxt").write_text(digits.read_text())
    for name in ("digits_train_lmdb", "digits_test_lmdb"):
        (tmp_path / name).symlink_to(digits.parent / name)
    (tmp_path / "train_lmdb").symlink_to(digits.parent / "digits_train_lmdb")
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    images, labels = np.zeros((3, 28, 28), np.uint8), np.arange(3, dtype=np.uint8)
    for name, values in (
        ("train-images-idx3-ubyte.gz", images),
        ("train-labels-idx1-ubyte.gz", labels),
    ):
        head = np.array([0x800 + values.ndim, *values.shape], ">i4").tobytes()
        (tmp_path / name).write_bytes(gzip.compress(head + values.tobytes()))
    cifar = tmp_path / "cifar-10-batches-bin"
    cifar.mkdir()
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (cifar / name).write_bytes(bytes(3073 * 10_000))
    return tmp_path


def lacks(line: str) -> bool:
    """True if a line needs an extra that is not installed."""
    words = shlex.split(line)
    return any(word in words and not importable(module) for word, module in EXTRAS.items())


@cache
def importable(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def run_script(text: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_run(document: str, folder: Path, capsys: Captured) -> None:
    for block in blocks(document):
        if block.language == "python":
            run_script(block.text)
        for line in lines(block) if block.language == "sh" else ():
            if line not in NOT_RUN and not lacks(line):
                code = main.run(shlex.split(line)[1:])
                assert code == 0, f"{document}:{block.line}: {line}\n{capsys.readouterr().err}"
    if document == "docs/tour.md":
        left = {path.name for path in folder.iterdir()}
        assert left >= {
            "digits_iter_500.caffemodel",
            "features.h5",
            "images_lmdb",
            "mine_iter_200.caffemodel",
        }


def test_every_line_runs_or_has_its_reason() -> None:
    told = {
        line
        for document in DOCUMENTS
        for b in blocks(document)
        if b.language == "sh"
        for line in lines(b)
    }
    assert {line for line in told if not line.startswith("caffepy ")} <= set(NOT_RUN)
    assert set(NOT_RUN) <= told


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{before}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")


@pytest.mark.parametrize("document", [*DOCUMENTS, *WITHOUT_EXAMPLES])
def test_commands_and_flags_exist(document: str) -> None:
    """Commands and flags in the text, too."""
    known = dict(commands(main.caffepy))
    flags = {name for command in known.values() for name in flags_of(command)}
    told = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL))
    ours = [
        part.strip()
        for code in told
        for part in code.split(",")
        if part.strip().startswith("caffepy ")
    ]
    for line in ours:
        words = [word.replace("_", "-") for word in line.split()[1:]]
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in known), None)
        assert name or words[0].startswith("-") or words[0] == "COMMAND", line
        wrong = (
            {word for word in words if re.match(r"--?[a-z]", word)} - flags_of(known[name])
            if name
            else set()
        )
        assert not wrong, f"{line}: {wrong}"
    alone = {
        code.split()[0].replace("_", "-").split("=")[0] for code in told if code.startswith("--")
    }
    assert alone - flags <= OF_OTHERS, alone - flags - OF_OTHERS


OF_OTHERS = {"--shm-size", "--ipc", "--timing", "--signal", "--param-server", "--with-ft"}
OF_OTHERS |= {"--resize", "--rounds"}
"""Flags of Docker, SLURM, Intel Caffe, Caffe's scripts, mpirun, and programs in benchmarks/."""


def flags_of(command: click.Command) -> set[str]:
    """All spellings of a command's flags."""
    options = [p for p in command.params if isinstance(p, click.Option)]
    long = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    return long | {name.removeprefix("-") for name in long} | {"--help", "-h", "--version"}


@pytest.mark.parametrize("document", PAGES)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", text_of(document)):
        path, _, heading = target.partition("#")
        there = (ROOT / document).parent / path if path else ROOT / document
        assert there.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings
            }, target


@pytest.mark.parametrize("document", PAGES)
def test_rows_of_tables_are_whole(document: str) -> None:
    for found in re.finditer(r"(?:^\|.*\n)+", text_of(document), re.MULTILINE):
        rows = [len(re.split(r"(?<!\\)\|", line)) for line in found[0].splitlines()]
        assert len(set(rows)) == 1, found[0].splitlines()[rows.index(max(rows))]


class Code(NamedTuple):
    """The names of the code: all; members of each class, with its bases; top names of modules."""

    names: set[str]
    members: dict[str, set[str]]
    bases: dict[str, set[str]]
    modules: dict[str, set[str]]

    def has(self, name: str) -> bool:
        """True if each part of a dotted name is known, the last as a member of the one before."""
        *before, last = name.split(".")
        if before and before[-1] in self.members:
            return last in self.of_class(before[-1])
        if before and before[-1] in self.modules:
            return last in self.modules[before[-1]]
        return all(part in self.names for part in (*before, last))

    def of_class(self, name: str) -> set[str]:
        inherited = (self.of_class(base) for base in self.bases.get(name, ()))
        return self.members.get(name, set()).union(*inherited)


@cache
def code() -> Code:
    found = Code(set(), {}, {}, {})
    roots = [ROOT / name for name in ("caffepy", "cli", "proto", "models", "tests")]
    for path in (path for root in roots for path in root.rglob("*.py")):
        if path.name != "caffe_pb2.py":
            read_names(path, found)
    for path in (ROOT / "proto" / "caffe.proto", *(ROOT / "caffepy" / "ops").rglob("*.cu")):
        found.names.update(re.findall(r"[A-Za-z_]\w+", path.read_text(encoding="utf-8")))
    return found


def read_names(path: Path, found: Code) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found.modules.setdefault(path.stem, set()).update(names_of(tree.body))
    for node in ast.walk(tree):
        found.names.update(names_of([node]))
        if isinstance(node, ast.ClassDef):
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            named = {base.id for base in bases if isinstance(base, ast.Name)} - {node.name}
            found.bases.setdefault(node.name, set()).update(named)
            inside = {name for inner in ast.walk(node) for name in names_of([inner])}
            found.members.setdefault(node.name, set()).update(inside)


def names_of(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The names that statements or expressions define or use, and texts that are names."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.Constant(value=str(name)) if name.isidentifier():
                yield name
            case ast.Assign(targets=targets):
                yield from names_of(targets)
            case ast.AnnAssign(target=target):
                yield from names_of([target])
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Tuple(elts=elements):
                yield from names_of(elements)


@pytest.mark.parametrize(
    ("name", "function"), [("solver/capture.py", ""), ("device/cuda.py", "capture")]
)
def test_every_reason_against_capture_is_told(name: str, function: str) -> None:
    """Each text with a blank in the functions that decide stands in docs/dev/capture.md."""
    told = " ".join(text_of("docs/dev/capture.md").split())
    tree = ast.parse((ROOT / "caffepy" / name).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions = [node for node in functions if function in ("", node.name)]
    docstrings = {ast.get_docstring(node, clean=False) for node in functions}
    texts = {
        node.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    reasons = {text for text in texts - docstrings if text.strip().count(" ")}
    assert reasons
    assert not {r for r in reasons if r.split("%s")[0].strip() not in told}


FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?|[\w-]+\.(?:py|cuh?|md|toml|proto|prototxt)")
NAME = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\(.*\))?", re.DOTALL)


def mentions(document: str) -> Iterator[str]:
    """The texts in backquotes, and the words of call sequences that look like names or files."""
    text = text_of(document)
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for quoted_text in re.findall(r"`([^`]+)`", prose):
        parts = " ".join(quoted_text.split()).split(", ")
        if all(FILE.fullmatch(part) or NAME.fullmatch(part) for part in parts):
            yield from parts
    for block in blocks(document):
        if block.language == "text":
            yield from re.findall(r"[\w./-]+/[\w-]+\.py|\b[A-Z][a-z]\w*\.\w+", block.text)


@pytest.mark.parametrize("document", DEVELOPERS)
def test_developers_pages_name_what_is_there(document: str) -> None:
    missing = []
    for mention in mentions(document):
        if mention in EXAMPLES.get(document, ()):
            continue
        if FILE.fullmatch(mention):
            folders = ROOT, ROOT / "caffepy", (ROOT / document).parent
            if not any((folder / mention).exists() for folder in folders):
                missing.append(mention)
        elif NAME.fullmatch(mention) and not code().has(mention.partition("(")[0]):
            missing.append(mention)
    assert not missing


EXAMPLES = {
    "CONTRIBUTING.md": {"cuda12", "cuda13"},
    "docs/dev/add-a-data-source.md": {"caffepy/data/sources/npz.py"},
    "docs/dev/add-a-layer.md": {"self.param.mish_param"},
    "docs/dev/add-a-command.md": {
        "caffepy/commands/NAME.py",
        "cli/NAME.py",
        "caffepy/commands/labels.py",
        "cli/labels.py",
        "tests/commands/test_labels.py",
        "tests/cli/test_labels.py",
    },
}
"""What the pages would have their readers write, and words of other projects and of pyproject."""


def test_pictures_are_small() -> None:
    pictures = [path for path in (ROOT / "docs").iterdir() if path.suffix in (".svg", ".png")]
    assert pictures
    assert max(path.stat().st_size for path in pictures) < 60_000
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert {path.name for path in pictures} == set(re.findall(r"\(([\w-]+\.(?:svg|png))\)", pages))


def test_the_house_is_drawn_as_it_stands() -> None:
    """ARCHITECTURE.md's rows are those that test_layering enforces."""
    drawn = [
        (row[0], re.findall(r"`([^`]+)`", row[1]))
        for row in table("ARCHITECTURE.md")
        if row[0].isdigit()
    ]
    names = {
        (re.sub(r"^caffepy[./]|/$|\.py$", "", name).rstrip("/"), int(row))
        for row, cell in drawn
        for name in cell
    }
    for name, row in ROWS.items():
        if name != "__main__":
            assert any(row == drawn_at and fnmatch(name, pattern) for pattern, drawn_at in names), (
                name
            )


@cache
def templates() -> list[re.Pattern[str]]:
    """Patterns of the texts in caffepy's code, with values of any kind in their places."""
    found = set()
    for folder in ("caffepy", "cli", "proto"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "caffe_pb2.py":
                found.update(
                    pattern
                    for node in ast.walk(ast.parse(path.read_text()))
                    if (pattern := template(node))
                )
    return [re.compile(pattern, re.DOTALL) for pattern in found]


def template(node: ast.AST) -> str:
    """The regular expression of a text, empty if it says too little to be recognized."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = re.split(r"%[-.0-9]*[a-z]", node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
        parts = text.split("\0")
    else:
        return ""
    return ".*".join(map(re.escape, parts)) if len("".join(parts)) >= 11 else ""


def quoted() -> list[str]:
    cells = [row[0] for row in table("docs/troubleshooting.md") if row[0] != "what you see"]
    return [cell[1:-1] for cell in cells if re.fullmatch(r"`[^`]+`", cell)]


@pytest.mark.parametrize("message", quoted())
def test_messages_are_those_of_caffepy(message: str) -> None:
    assert any(pattern.fullmatch(message) for pattern in templates()), message


def test_many_messages_are_quoted() -> None:
    assert len(quoted()) > 40
