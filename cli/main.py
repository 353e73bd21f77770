"""The `caffepy` command: its subcommands, and the only place that turns errors into messages and
exit codes.
"""

import atexit
import errno
import io
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from time import sleep
from types import FrameType
from typing import TextIO

import click

from caffepy import __version__, models
from caffepy.cli import options
from caffepy.cli.arguments import command_name, normalize
from caffepy.cli.bench import bench
from caffepy.cli.check import check
from caffepy.cli.classify import classify
from caffepy.cli.compute_image_mean import compute_image_mean
from caffepy.cli.convert_annoset import convert_annoset
from caffepy.cli.convert_cifar import convert_cifar
from caffepy.cli.convert_imageset import convert_imageset
from caffepy.cli.convert_mnist import convert_mnist
from caffepy.cli.data import data
from caffepy.cli.detect import detect
from caffepy.cli.device_pairs import device_pairs
from caffepy.cli.device_query import device_query
from caffepy.cli.doctor import doctor
from caffepy.cli.draw import draw
from caffepy.cli.export import export
from caffepy.cli.extract_features import extract_features
from caffepy.cli.group import Commands
from caffepy.cli.parse_log import parse_log
from caffepy.cli.plot import plot
from caffepy.cli.server import server
from caffepy.cli.summarize import summarize
from caffepy.cli.test import test
from caffepy.cli.time import time
from caffepy.cli.train import train
from caffepy.cli.upgrade_net import upgrade_net
from caffepy.cli.upgrade_solver import upgrade_solver
from caffepy.cli.visualize import visualize
from caffepy.cli.weights import weights
from caffepy.core.abandoned import at_work
from caffepy.core.errors import (
    INTERRUPTED,
    CaffeError,
    ConfigError,
    DataError,
    DeviceError,
    RecordError,
    UsageError,
    reason,
)
from caffepy.core.names import nearest

PROGRAM = "caffepy"
BUG = 70
MOST_PIXELS = 1 << 28  # of an image; a PNG of all one colour is a thousand times as small
REINSTALL = "pip install caffepy, or pip install . in a clone, installs all that it needs"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with a process's number among those that a launcher started."""
INSTEAD = {
    "--cpu": "leave it out; without --gpu the CPU computes",
    "--param-server": "leave it out; Intel Caffe's --param_server=mpi is the way that all "
    "processes train here: mpirun -n 4 caffepy train --solver FILE --cpu 1",
}
"""Remedies for flags that other commands, or forks of Caffe, have."""
FIRST_REPORTS = 2.0  # seconds; mpirun ends the others in less
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
ENDING = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)
]

EPILOG = """
\b
Flags may be written -flag value, -flag=value, --flag value or --flag=value.
\b
Exit codes: 0 done, 2 usage, 3 configuration, 4 data, 5 diverged, 6 device, 7 synchronization,
75 stopped by a signal after a snapshot, 130 interrupted, 70 a bug of caffepy.
\b
Completion for bash (or zsh, fish): eval "$(_CAFFEPY_COMPLETE=bash_source caffepy)"
"""


SECTIONS = {
    "Train": (train, server, test, time, bench),
    "Look": (check, summarize, draw, visualize, plot, parse_log),
    "Use": (classify, detect, extract_features),
    "Data": (
        convert_imageset,
        convert_annoset,
        convert_mnist,
        convert_cifar,
        compute_image_mean,
        data,
    ),
    "Convert": (export, weights, upgrade_net, upgrade_solver),
    "GPUs": (device_query, device_pairs, doctor),
}


@click.group(
    cls=Commands,
    sections=SECTIONS,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"max_content_width": 110},
)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def caffepy(context: click.Context) -> None:
    """Train Caffe nets: solver and net prototxts in, Caffe's log lines, weights and snapshots out.

    \b
    caffepy train --solver digits                    train a bundled net on its data
    caffepy train --solver solver.prototxt           train your own
    caffepy COMMAND --help                           what a command can do, with examples
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Run the command line of this process and end it."""
    if not sys.warnoptions:  # the solver reports overflows, with the layer that made them
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"caffepy\.")
    _fill_standard_streams()
    os.environ.setdefault("OPENCV_LOG_LEVEL", "ERROR")  # our errors report undecodable images
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MOST_PIXELS))  # read by its library
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the locale cannot encode
    for number in ENDING:  # as KeyboardInterrupt, so that unfinished files are removed
        # nohup ignores SIGHUP
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    sys.unraisablehook = _interrupt_again
    atexit.register(_leave)  # called after all that is registered from now on
    name = os.path.basename(sys.argv[0])
    code = run(sys.argv[1:], PROGRAM if name.endswith(".py") else name.removesuffix(".exe"))
    for number in ENDING:  # the exit code is final; threads and files take a moment to close
        signal.signal(number, signal.SIG_IGN)
    _write_stderr(end="")  # log lines that could not be written may be left
    global _exit_code
    _exit_code = code
    if at_work():
        _leave()
    sys.exit(code)


_exit_code: int | None = None  # of a command that is done


def _leave() -> None:
    """End the process of a command that is done without freeing its objects one by one: that takes
    0.2 s, and might hang. MPI and profilers need an orderly end.
    """
    watched = sys.gettrace() or sys.getprofile()
    if _exit_code is not None and (at_work() or not (watched or "mpi4py" in sys.modules)):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(_exit_code)


def _fill_standard_streams() -> None:
    """Open closed standard streams on /dev/null, or the next files would get their descriptors."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


_interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if _is_importing(frame):  # extension modules crash when they are interrupted
        os._exit(INTERRUPTED)
    _interrupted = True  # a library may raise another exception instead
    raise KeyboardInterrupt


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeat an interrupt a moment later if Python dropped it while it removed an object.

    Errors of a failed GPU while its objects are removed are silent: the first one was reported.
    """
    if type(unraisable.exc_value).__name__ == "CUDARuntimeError":
        return
    thread = threading.main_thread().ident
    if not isinstance(unraisable.exc_value, KeyboardInterrupt) or thread is None:
        sys.__unraisablehook__(unraisable)
    elif hasattr(signal, "pthread_kill"):
        timer = threading.Timer(0.01, signal.pthread_kill, (thread, signal.SIGINT))
        timer.daemon = True
        timer.start()


def _is_importing(frame: FrameType | None) -> bool:
    """True if a module is being loaded, not only looked up."""
    while frame is not None:
        if (
            frame.f_globals.get("__name__") == "importlib._bootstrap"
            and frame.f_code.co_name == "_load_unlocked"
        ):
            return True
        frame = frame.f_back
    return False


def run(arguments: Sequence[str], program: str = PROGRAM) -> int:
    """Run one command line and return its exit code; messages go to stderr.

    `program` is the name in its usage and of its log files: a link may have another than ours.
    """
    try:
        code = (
            caffepy.main(
                normalize(arguments, flags(arguments), groups()),
                prog_name=program,
                standalone_mode=False,
            )
            or 0
        )
        sys.stdout.flush()
        return code
    except click.UsageError as error:
        _let_first_report()
        _report(_unknown_option(error) if isinstance(error, click.NoSuchOption) else _misuse(error))
        if error.ctx is not None:
            _write_stderr(error.ctx.get_usage())
        return error.exit_code
    except CaffeError as error:
        if isinstance(error, (UsageError, ConfigError)):
            _let_first_report()
        _report(str(error), hint(error, arguments))
        return error.exit_code
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        return ended.code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except MemoryError as error:
        _report(
            f"out of memory{f': {error}' if str(error) else ''}",
            "smaller batches or images need less",
        )
        return DeviceError.exit_code
    except Exception as error:
        if _interrupted:
            return INTERRUPTED
        if isinstance(error, OSError) and error.errno in FULL and not error.filename:
            _abandon(sys.stdout)
            _report(f"cannot write the output: {reason(error)}")
            return UsageError.exit_code
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            remedy = "fewer solvers, or CAFFEPY_NUM_THREADS=1 in the environment, need less"
            _report("the system gives this process no more threads", remedy)
            return DeviceError.exit_code
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("caffepy"):
            _report(f'the package "{error.name}", which caffepy needs, is not installed', REINSTALL)
            return ConfigError.exit_code
        _write_stderr(traceback.format_exc().rstrip("\n"))
        _report(
            "this is a bug of caffepy, not yours; please report it where you got caffepy, with the "
            "lines above and the command"
        )
        return BUG


def _let_first_report() -> None:
    """Wait a moment in a process of mpirun or srun that is not the first one.

    If all have the same wrong command line, or no MPI, the first one's exit ends the others before
    they can report; what is wrong in another alone is reported, too.
    """
    if any(os.environ.get(name, "0") != "0" for name in RANKS):
        try:
            sleep(FIRST_REPORTS)
        except KeyboardInterrupt:  # the launcher's signal
            sys.exit(UsageError.exit_code)


def _abandon(stream: TextIO) -> None:
    """Discard the rest of a stream's buffer, or the end of the process would fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def flags(arguments: Sequence[str] = ()) -> dict[str, bool | None]:
    """Return the names of all commands' flags, without dashes, and whether each takes a value
    (None: it may).

    If commands disagree, the command that the arguments name decides.
    """
    named: list[click.Command] = [caffepy]  # a group, then its command
    for argument in arguments:
        known = named[-1].commands if isinstance(named[-1], click.Group) else {}
        if command := known.get(command_name(argument)):
            named.append(command)
    return {
        name.lstrip("-"): None if options.is_optional(parameter) else not parameter.is_flag
        for command in [*_all_commands(caffepy), *named[1:]]
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def groups() -> list[str]:
    """Return the commands with subcommands."""
    return [name for name, command in caffepy.commands.items() if isinstance(command, click.Group)]


def _all_commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _all_commands(inner)


def _unknown_option(error: click.NoSuchOption) -> str:
    name = error.option_name
    params = error.ctx.command.get_params(error.ctx) if error.ctx else []
    flags = [p for p in params if isinstance(p, click.Option)]
    remedy = INSTEAD.get(name) if any("--gpu" in flag.opts for flag in flags) else None
    argument = {"--model": "net"}.get(name, name.lstrip("-"))
    if any(isinstance(p, click.Argument) and p.name == argument for p in params):
        remedy = f"give {argument.upper()} without a flag"
    known = [name for flag in flags if not flag.hidden for name in flag.opts]
    return f'no such option "{name}"{f": {remedy}" if remedy else nearest(name, known)}'


def _misuse(error: click.UsageError) -> str:
    message = error.format_message()
    command = error.ctx.command if error.ctx else None
    if command in (train, test, time) and message.startswith("Got unexpected extra argument"):
        extra = message[message.index("(") + 1 : message.rindex(")")]
        remedy = f"give the file as {'--solver' if command is train else '--model'} FILE"
        if command is not time and extra.replace(",", "").isdigit():
            remedy = f"--cpu takes the number of solvers, as in --cpu {extra.count(',') + 1}"
        message += f"; {remedy}"
    return message


def hint(error: CaffeError, arguments: Sequence[str]) -> str:
    """Return what to try next, if a flag helps."""
    if isinstance(error, RecordError) and {"train", "test"} & set(arguments):
        return "to skip some such records, add --max-bad-records N"
    given = {argument.lstrip("-").partition("=")[0] for argument in arguments}
    if isinstance(error, DeviceError):
        return _without_gpus(str(error), given)
    if (
        isinstance(error, DataError)
        and {"time", "check", "draw"} & set(arguments)
        and not {"synthetic", "image"} & given
    ):
        return "to go without the data, add --synthetic"
    if (
        isinstance(error, DataError)
        and {"train", "test"} & set(arguments)
        and _bundled(arguments) - models.with_data()
    ):
        return (
            "only these bundled nets bring their data: "
            f"{', '.join(sorted(models.with_data()))}; put yours where the net looks for it"
        )
    if isinstance(error, DataError) and "export" in arguments:
        return "to go without the data, give --image C,H,W, or a deploy net"
    return ""


def _without_gpus(message: str, given: set[str]) -> str:
    """Return what a command does on a machine without GPUs."""
    from caffepy.device.gpus import NO_DRIVER, NO_GPU

    if {"device-pairs", "device_pairs"} & given:
        return "without GPUs, --cpu N or --simulate FILE shows schedules"
    if not any(reason in message for reason in ("CuPy", NO_DRIVER, NO_GPU)):
        return ""
    if "allreduce" in given:
        return "without GPUs, --cpu N measures threads of the CPU"
    if "gpu" not in given or {"device-query", "device_query"} & given:
        return ""
    return f"{'with --cpu instead of' if 'train' in given else 'without'} --gpu, the CPU computes"


def _bundled(arguments: Sequence[str]) -> set[str]:
    return {argument.partition("=")[2] or argument for argument in arguments} & set(models.names())


def _report(message: str, further: str = "") -> None:
    _write_stderr(f"caffepy: error: {message}" + (f"\n({further})" if further else ""))


def _write_stderr(text: str = "", end: str = "\n") -> None:
    """Write to stderr, if that can be written: the exit code is the same without."""
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)
