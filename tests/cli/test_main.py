import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from caffepy import __version__
from caffepy.cli import main
from caffepy.core.errors import (
    ConfigError,
    DataError,
    DeviceError,
    DivergenceError,
    SyncError,
    UsageError,
)

Captured = pytest.CaptureFixture[str]
WEIGHTS = Path(__file__).parents[1] / "golden" / "digits" / "digits_iter_500.caffemodel"
CAFFE_FLAGS = {
    "train": [
        "solver",
        "weights",
        "snapshot",
        "gpu",
        "level",
        "stage",
        "sigint_effect",
        "sighup_effect",
    ],
    "test": ["model", "weights", "gpu", "iterations", "level", "stage"],
    "time": ["model", "gpu", "iterations", "phase", "level", "stage"],
    "device_query": ["gpu"],
}
CAFFE_DEFAULTS = {
    "iterations": 50,
    "level": 0,
    "sigint_effect": "stop",
    "sighup_effect": "snapshot",
    "phase": "TRAIN",
}
GLOG_FLAGS = ["log_dir", "minloglevel", "logtostderr", "alsologtostderr", "v"]
GLOG_FLAGS += ["stderrthreshold", "colorlogtostderr", "vmodule", "max_log_size"]
ERRORS = {
    2: UsageError,
    3: ConfigError,
    4: DataError,
    5: DivergenceError,
    6: DeviceError,
    7: SyncError,
}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes `caffepy device-query` raise."""

    def install(error: BaseException) -> None:
        def raise_it(**_: Any) -> None:
            raise error

        monkeypatch.setattr(main.device_query, "callback", raise_it)

    return install


@pytest.mark.parametrize("command", CAFFE_FLAGS)
def test_every_flag_of_caffe_is_there_with_its_default(command: str) -> None:
    """Those of other commands, too, which Caffe takes and ignores."""
    parameters = {
        name.lstrip("-"): p
        for p in main.caffepy.commands[command.replace("_", "-")].params
        for name in p.opts
    }
    for flag in CAFFE_FLAGS[command] + GLOG_FLAGS:
        parameter = parameters[flag.replace("_", "-")]
        if flag in CAFFE_DEFAULTS:
            assert parameter.default == CAFFE_DEFAULTS[flag]
    others = {flag for flags in CAFFE_FLAGS.values() for flag in flags} - {*CAFFE_FLAGS[command]}
    assert {flag.replace("_", "-") for flag in others} <= parameters.keys()
    assert all(parameters[flag.replace("_", "-")].hidden for flag in others)


def test_flags_of_other_commands_are_ignored(capsys: Captured) -> None:
    assert main.run(["device_query", "-iterations", "3", "-minloglevel", "1"]) == 0
    assert capsys.readouterr().err.endswith("] device_query does not use --iterations\n")


def test_the_log_file_bears_the_name_of_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["device_query", "-log_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["/opt/caffe/build/tools/caffe", *line])
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(main, "_leave", lambda: None)  # or it would end pytest, with code 0
    with pytest.raises(SystemExit):
        main.main()
    assert (tmp_path / "caffe.INFO").readlink().name.startswith("caffe.")


@pytest.mark.parametrize("command", ["", *main.caffepy.commands])
def test_help_has_an_example(command: str, capsys: Captured) -> None:
    assert main.run([*command.split(), "--help"]) == 0
    assert f"  caffepy {command}" in capsys.readouterr().out


COMMANDS = [
    (name, *([further] if further else []))
    for name, command in main.caffepy.commands.items()
    for further in ("", *getattr(command, "commands", ()))
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_line_of_the_help_ends_within_a_word(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A flag or phase that is cut at its hyphen cannot be read or copied."""
    for columns in ("80", "110", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main.run([*command, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert not [line for line in lines if line.endswith("-")]
        assert not [line for line in lines if "None" in line], "a range without ends"


def test_the_shape_for_an_export_is_that_of_its_input(capsys: Captured) -> None:
    assert main.run(["export", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "--image C,H,W Replace the data layers by an input of this shape" in told
    assert "random" not in told


def test_no_command_shows_the_help(capsys: Captured) -> None:
    assert main.run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: caffepy")


def test_version(capsys: Captured) -> None:
    assert main.run(["-version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


TYPOS = {
    "command": ("trian", 'caffepy: error: no such command "trian", did you mean "train"?'),
    "flag": (
        "train -slover x",
        'caffepy: error: no such option "--slover", did you mean "--solver"?',
    ),
    "flag of train": (
        "time --cpu 2 --model lenet",
        'no such option "--cpu": leave it out; without --gpu the CPU computes',
    ),
    "flag of Intel Caffe": (
        "train --solver digits --param_server=mpi",
        'no such option "--param-server": leave it out; Intel Caffe\'s --param_server=mpi is',
    ),
    "argument as a flag": (
        "export --model net.prototxt",
        'no such option "--model": give NET without a flag',
    ),
    "weights as a flag": (
        "export net.prototxt --weights net.caffemodel",
        'no such option "--weights": give WEIGHTS without a flag',
    ),
    "like a hidden flag": ("export --modul", 'no such option "--modul"\n'),
    "choice": (
        "train -sigint_effect stpo",
        "Invalid value for '--sigint-effect': 'stpo' is not one of",
    ),
    "number": (
        "test -iterations few",
        "Invalid value for '--iterations': 'few' is not a valid integer range",
    ),
    "no iterations": (
        "time -iterations 0",
        "Invalid value for '--iterations': 0 is not in the range x>=1",
    ),
    "no batches": ("test -iterations 0", "'--iterations': 0 is not in the range x>=1"),
    "device": ("test -gpu 0,x", "'0,x' is neither \"all\" nor device numbers separated by commas"),
    "image": ("time -image 3,32", "'3,32' is not three sizes: channels,height,width"),
    "no solver": ("train", "Need a solver definition to train"),
    "no model": ("test", "Need a model definition to score"),
    "no model to time": ("time", "Need a model definition to time"),
    "no weights": ("test -model digits", "Need model weights to score"),
    "nothing to check": ("check", "Need one definition to check"),
    "argument of another": (
        "time lenet",
        "Got unexpected extra argument (lenet); give the file as --model FILE",
    ),
    "argument": (
        "train digits",
        "Got unexpected extra argument (digits); give the file as --solver FILE",
    ),
    "solvers as a list": (
        "train --solver digits --cpu 0,1,2",
        "Got unexpected extra argument (0,1,2); --cpu takes the number of solvers, as in --cpu 3",
    ),
}


@pytest.mark.parametrize(("typed", "message"), TYPOS.values(), ids=TYPOS.keys())
def test_usage_errors(typed: str, message: str, capsys: Captured) -> None:
    assert main.run(typed.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "\nUsage: caffepy" in error


@pytest.mark.parametrize("code", ERRORS)
def test_known_errors_are_one_message_and_their_exit_code(
    code: int, failing: Any, capsys: Captured
) -> None:
    failing(ERRORS[code]("what is wrong\n  x: 1\n  ^", "net.prototxt:3:1"))
    assert main.run(["device-query"]) == code
    assert (
        capsys.readouterr().err == "caffepy: error: net.prototxt:3:1: what is wrong\n  x: 1\n  ^\n"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()], ids=["ctrl-c", "abort"])
def test_interrupted(error: BaseException, failing: Any, capsys: Captured) -> None:
    failing(error)
    assert main.run(["device-query"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(failing: Any, capsys: Captured) -> None:
    failing(ZeroDivisionError("oh"))
    assert main.run(["device-query"]) == 70
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.splitlines()[-1].startswith("caffepy: error: this is a bug of caffepy")


def test_what_a_command_returns_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.device_query, "callback", lambda **_: 75)
    assert main.run(["device-query"]) == 75


def test_neither_file_nor_bundled_model(capsys: Captured) -> None:
    assert main.run(["train", "-solver", "digitss"]) == 3
    assert (
        'no file "digitss", and no bundled model of that name, did you mean "digits"?'
        in capsys.readouterr().err
    )


def test_groups_alone_show_their_help(capsys: Captured) -> None:
    for group in main.groups():
        assert main.run([group]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith(f"Usage: caffepy {group} ")
        assert shown.err == ""


def test_a_flag_of_a_subcommand_is_that_commands_own() -> None:
    assert main.flags(["bench", "train", "--model", "digits", "--cpu", "--json"])["cpu"] is False
    assert main.flags(["bench", "scaling", "--model", "digits", "--cpu", "2"])["cpu"] is True


def test_a_package_that_is_missing_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "caffepy.commands.check", None)
    assert main.run(["check", "digits"]) == 70
    assert "please report it" in capsys.readouterr().err

    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'h5py'", name="h5py")

    monkeypatch.setattr("caffepy.cli.options.find_definition", missing)
    assert main.run(["check", "digits"]) == 3
    told = 'caffepy: error: the package "h5py", which caffepy needs, is not installed\n(pip install'
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    "arguments", [["train", "-solver=lenet"], ["test", "-model", "lenet", "-weights", str(WEIGHTS)]]
)
def test_a_bundled_net_without_data(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(arguments) == 4
    assert capsys.readouterr().err.endswith(
        "(only these bundled nets bring their data: digits, digits_seg, digits_ssd; put yours "
        "where the net looks for it)\n"
    )


def test_glogs_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("GLOG_log_dir", str(tmp_path))
    assert main.run(["device-query"]) == 0
    assert "Querying GPUs" in (tmp_path / "caffepy.INFO").read_text()
    monkeypatch.setenv("GLOG_minloglevel", "1")
    capsys.readouterr()
    assert main.run(["device-query"]) == 0
    assert capsys.readouterr().err == ""


def python_m(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "caffepy", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **settings,
    )


def test_as_a_module_and_without_heavy_imports() -> None:
    code = "import sys; from caffepy.cli.main import run; run(['train', '--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert not [
        name
        for name in ("numpy", "google.protobuf", "numba", "tqdm", "cv2")
        if f"'{name}'" in loaded
    ]
    done = python_m("devce-query")
    assert (done.returncode, done.stdout) == (2, "")
    assert 'did you mean "device-query"?' in done.stderr


@pytest.mark.parametrize(
    ("first", "freed"), [("", ""), ("sys.setprofile(lambda *_: 0)", "freed\n")]
)
def test_a_process_ends_without_freeing_its_objects_unless_it_is_profiled(
    first: str, freed: str
) -> None:
    program = f"""
import atexit, sys
from caffepy.cli import main
class Held:
    def __del__(self): print("freed")
main.held, run = Held(), main.run
def run_and_register(*arguments):
    atexit.register(print, "called at exit")
    return run(*arguments)
main.run, sys.argv = run_and_register, ["caffepy", "--version"]
{first}
main.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{__version__}\ncalled at exit\n{freed}"


def test_a_reader_that_goes_away_is_no_error() -> None:
    ours, its = os.pipe()
    os.close(ours)
    child = subprocess.Popen(
        [sys.executable, "-m", "caffepy", "device-query"],
        stdout=its,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(its)
    _, error = child.communicate()
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    picture = tmp_path / "lenet.svg"
    line = f'"{sys.executable}" -m caffepy draw lenet "{picture}" && "{sys.executable}" -m caffepy device-query'
    done = subprocess.run(
        ["sh", "-c", f"({line}) {closed}"], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert picture.read_text().rstrip().endswith("</svg>")


def test_a_locale_that_lacks_a_character(tmp_path: Path) -> None:
    file = tmp_path / "\u65e5.log"
    file.write_text("I1128 17:32:20.518199  6170 train.cpp:1] Starting\n")
    done = python_m(
        "parse-log",
        str(file),
        str(tmp_path),
        "--verbose",
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0
    assert r"/\u65e5.log.train" in done.stdout


def test_no_more_threads(failing: Any, capsys: Captured) -> None:
    failing(RuntimeError("can't start new thread"))
    assert main.run(["device-query"]) == DeviceError.exit_code
    assert "the system gives this process no more threads\n(fewer" in capsys.readouterr().err


def test_no_memory_is_one_message(failing: Any, capsys: Captured) -> None:
    failing(MemoryError("Unable to allocate 3.2 TiB"))
    assert main.run(["device-query"]) == 6
    assert "caffepy: error: out of memory: Unable to allocate 3.2 TiB\n" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["check", "none.prototxt"], 3), (["check", "--nothing"], 2), (["check", "digits"], 0)],
)
def test_exit_codes_do_not_depend_on_stderr(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "caffepy", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, check=False)
    assert done.returncode == code


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments", [["--help"], ["device-query"], ["check", "--model", "lenet", "--synthetic"]]
)
def test_full_stdout_is_one_message(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "caffepy", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "caffepy: error: cannot write the output: no space left on device\n"
    )
    assert "Traceback" not in done.stderr


def test_an_interrupt_that_a_library_turned_into_another_error_is_one(
    failing: Any, capsys: Captured
) -> None:
    with pytest.raises(KeyboardInterrupt):
        main._interrupt(2, None)
    try:
        failing(ImportError("import failed"))
        assert main.run(["device-query"]) == main.INTERRUPTED
    finally:
        main._interrupted = False
    assert not capsys.readouterr().err


INTERRUPTED_IMPORT = """
import os, signal, sys
from caffepy.cli import main
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, main._interrupt)
import interrupts_itself
"""


def test_an_interrupt_in_an_import_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "interrupts_itself.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"
    )
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


LOOKED_UP = """
import os, signal, sys, types
from caffepy.cli import main

class Package(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, main._interrupt)
sys.modules["package"] = Package("package")
try:
    from package import name
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_an_import_of_what_is_there_is_interrupted_as_all_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOKED_UP], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (7, "")


INTERRUPTED_REMOVAL = """
import os, signal, sys, time
from caffepy.cli import main

class Removed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

def work(**_):
    Removed()
    time.sleep(60)

main.device_query.callback = work
sys.argv = ["caffepy", "device-query"]
main.main()
"""


def test_an_interrupt_while_an_object_is_removed_is_not_lost() -> None:
    command = [sys.executable, "-c", INTERRUPTED_REMOVAL]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "")


LARGE_IMAGE = """
import sys
from caffepy.cli import main

def work(**_):
    import cv2, numpy
    try:
        cv2.imdecode(numpy.frombuffer(b"P5 20000 20000 255 ", numpy.uint8), 1)
    except cv2.error:
        print("refused")

main.device_query.callback = work
sys.argv = ["caffepy", "device-query"]
main.main()
"""


@pytest.mark.parametrize("allowed", ["", str(1 << 30)])
def test_images_of_too_many_pixels_take_no_memory(allowed: str) -> None:
    environment = {**os.environ, **({"OPENCV_IO_MAX_IMAGE_PIXELS": allowed} if allowed else {})}
    command = [sys.executable, "-c", LARGE_IMAGE]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True)
    assert done.stdout == ("" if allowed else "refused\n")


ENDED = """
import os, signal, sys, time
from caffepy.cli import main
from caffepy.core.files import written

_, path, name = sys.argv

def work(**_):
    with written(path) as temporary:
        open(temporary, "w").close()
        os.kill(os.getpid(), getattr(signal, name))
        while signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
            time.sleep(0.01)  # the signal may have come to another thread

main.device_query.callback = work
sys.argv = ["caffepy", "device-query"]
main.main()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_what_ends_a_command_leaves_nothing_half_written(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path / "out.txt"), name]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr.strip(), list(tmp_path.iterdir())) == (130, "", [])


@pytest.mark.skipif(not shutil.which("nohup"), reason="needs nohup")
def test_a_hangup_does_not_end_a_command_under_nohup(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-c", ENDED, str(tmp_path / "out.txt"), "SIGHUP"]
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=50, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_help_lists_every_command_once_in_sections(capsys: Captured) -> None:
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n{title}:\n") for title in main.SECTIONS]
    assert places == sorted(places)
    for name in main.caffepy.commands:
        assert text.count(f"\n  {name} ") == 1


def test_help_of_train_lists_every_option_once_in_sections(capsys: Captured) -> None:
    assert main.run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    titles = ["Options", *main.train.sections.values()]
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    shown = [option for option in main.train.params if not getattr(option, "hidden", False)]
    assert len(shown) > 40
    for option in shown:
        assert text.count(f"\n  {option.opts[0]} ") == 1, option.name
    begins = text.index("\nParameter server (with --cluster):\n")
    ends = text.index("\nData:\n")
    assert begins < text.index("\n  --servers ") < ends < text.index("\n  --decode ")
