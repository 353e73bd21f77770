"""Options that several commands share; `parsing` turns their strings into values."""

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import click

from caffepy import models
from caffepy.cli import parsing
from caffepy.core.errors import ConfigError
from caffepy.core.names import nearest

log = logging.getLogger(__name__)

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
PRECISIONS = (
    "fp32",
    "tf32",
    "bf16",
    "fp16",
)  # those of device.math_mode, imported later
SOLVERS = click.IntRange(1, 256)
"""Number of solvers on the CPU: each has a net of its own, and more are a typing error."""


GLOGS_OTHERS = (
    *(f"--{name}" for name in ("stderrthreshold", "vmodule", "max-log-size", "logbufsecs")),
    *(f"--{name}/--no-{name}" for name in ("alsologtostderr", "colorlogtostderr", "log-prefix")),
    "--stop-logging-if-full-disk/--no-stop-logging-if-full-disk",
)
"""Flags of glog that do nothing here."""
LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def is_optional(option: click.Option) -> bool:
    """True if an option's value may be left out."""
    return not option.is_flag and isinstance(option.flag_value, str)


class Definition(NamedTuple):
    """A prototxt file, and the name of the bundled model if it was given by name."""

    path: str
    bundled: str | None = None


class Result(Protocol):
    """Findings of a command."""

    def table(self) -> str:
        """Return it as text."""

    def json(self) -> str:
        """Return it as JSON."""


def find_definition(name: str, kind: str) -> Definition:
    """Return the file of this name, else the bundled model's prototxt of this kind.

    ConfigError if it is neither.
    """
    path = models.path(name, kind)
    if os.path.exists(name) or (path is None and {os.sep, "."} & set(name)):
        return Definition(name)  # reading it reports what is wrong
    if path is None:
        known = models.names()
        raise ConfigError(
            f'no file "{name}", and no bundled model of that name{nearest(name, known)} '
            f"(bundled: {', '.join(known)})"
        )
    return Definition(path, name)


def _prototxt(kind: str, help: str, *further: str) -> Decorator:
    """--solver, or --model and further names of it: a file or a bundled model's of this kind."""

    def find(context: click.Context, parameter: click.Parameter, value: str) -> Definition | None:
        return find_definition(value, kind) if value else None

    name = "solver" if kind == "solver" else "model"
    return click.option(
        f"--{name}", *further, name, type=click.Path(), default="", callback=find, help=help
    )


def open_gpu(gpu: str | None) -> None:
    """Begin to open the first GPU of these, beside the imports of what computes."""
    first = (gpu or "").replace("all", "0").partition(",")[0].strip()
    if first.isdigit():
        from caffepy.device.gpus import open_ahead

        open_ahead(int(first))


def _trained_weights(*further: str) -> Decorator:
    return click.option(
        "--weights",
        *further,
        "weights",
        type=click.Path(),
        default="",
        callback=parsing.names,
        help="Files of weights (.caffemodel or .h5), separated by commas; matched to the "
        "layers by name.",
    )


def _gpus(use: str) -> Decorator:
    help = f"GPUs: numbers separated by commas, or all{use}"
    return click.option("--gpu", callback=parsing.devices, metavar="IDS|all", help=help)


solver = _prototxt("solver", "Solver prototxt, or the name of a bundled model.")
model = _prototxt("train_val", "Net prototxt, or the name of a bundled model.")
deploy = _prototxt(
    "deploy", "Net prototxt, or the name of a bundled model, for its deploy net.", "--model-def"
)
weights = _trained_weights()
pretrained = _trained_weights("--pretrained-model")
gpu = _gpus("; only the first computes. Default: the CPU.")
gpus_measured = _gpus(". Default: all.")
gpus_if_named = _gpus(". Default: the CPU.")
gpus_in_turn = _gpus("; they share the batches. local: one for each process. Default: the CPU.")
gpus = _gpus(
    "; they train as one. local: one for each process. Default: what solver_mode and device_id of "
    "the solver say."
)
gpu_if_any: Decorator = click.option(
    "--gpu",
    is_flag=False,
    flag_value="0",
    callback=parsing.devices,
    metavar="[ID]",
    help="Compute on this GPU; without a number, on 0.",
)
cpus: Decorator = click.option(
    "--cpu",
    is_flag=False,
    flag_value="1",
    type=SOLVERS,
    metavar="[N]",
    help="Compute on the CPU even if the solver says solver_mode: GPU; N solvers train as one.",
)
cpus_in_turn: Decorator = click.option(
    "--cpu", type=SOLVERS, metavar="N", help="Compute on the CPU, N batches at a time."
)
sync: Decorator = click.option(
    "--sync",
    type=click.Choice(["auto", "tree", "muji", "flat", "nccl", "ps"]),
    default="auto",
    show_default=True,
    help="How several solvers average gradients: by NCCL; by Caffe's tree, in which only the first "
    "solver updates parameters; by muji or flat, in which all do; ps: by the servers of --cluster. "
    "auto: the fastest that these devices can use, which caffepy device-pairs tells.",
)
wire: Decorator = click.option(
    "--wire",
    type=click.Choice(["float32", "bf16"]),
    default="float32",
    show_default=True,
    help="Type in which gradients go between machines (mpirun or srun): bf16 sends half the bytes "
    "and rounds them to 7 bits of mantissa.",
)
batch_mode: Decorator = click.option(
    "--batch-mode",
    type=click.Choice(["per-gpu", "global"]),
    default="per-gpu",
    show_default=True,
    help="What batch_size in the net means: the batch of each solver, as in Caffe, or of all "
    "solvers together (global), as in NVCaffe.",
)
bn_stats: Decorator = click.option(
    "--bn-stats",
    type=click.Choice(["average", "root", "sync"]),
    default="average",
    show_default=True,
    help="BatchNorm's mean and variance in tests and snapshots: the average of all solvers, or "
    "those of the first (root), as in Caffe. sync: solvers normalize their batches as one in "
    "training, too; GPUs are much slower then.",
)
deterministic: Decorator = click.option(
    "--deterministic",
    is_flag=True,
    help="Give the same numbers in every run: fix the seed and the order of sums.",
)


nodes: Decorator = click.option(
    "--nodes",
    callback=parsing.range_of_nodes,
    metavar="N|MIN:MAX",
    help="Number of processes of mpirun or srun (with --cluster: of workers) that the run needs; "
    "another number is an error. With MIN:MAX a resumed run may have another number of solvers, "
    "and with it another total batch.",
)
deadlines: Decorator = click.option(
    "--deadlines",
    default="",
    envvar="CAFFEPY_DEADLINES",
    callback=parsing.deadlines,
    metavar="PHASE=S,...",
    help="Seconds without progress after which a solver counts as hung. Default: step=300,test=900,"
    "snapshot=900,set-up=900. One solver alone is ended only if this is given.",
)
precision: Decorator = click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Precision on a GPU: fp32 rounds nothing, tf32 rounds the inputs of matrix products to 10 "
    "bits of mantissa, bf16 and fp16 store activations in 16 bits. Default: the net's, else that "
    "of CAFFEPY_PRECISION, else tf32.",
)
capture: Decorator = click.option(
    "--capture/--no-capture",
    default=True,
    help="On a GPU, capture the training step as a CUDA graph and replay it, or run layer by "
    "layer (slower, for debugging). Default: capture.",
)
fuse: Decorator = click.option(
    "--fuse/--no-fuse",
    default=True,
    help="Compute layers such as Convolution and ReLU together, or one by one. Default: fuse.",
)


recompute: Decorator = click.option(
    "--recompute",
    default="1",
    callback=parsing.auto_or_number,
    metavar="auto|N",
    help="Gradient checkpointing, which takes less memory and more time, with the same numbers: "
    "keep only the blobs between N segments of the net, and compute the others again for backward; "
    "auto: only where free memory does not suffice. Default: keep all blobs.",
)
windows: Decorator = click.option(
    "--windows",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of windows that are timed.",
)
iterations_of_window: Decorator = click.option(
    "--iterations",
    type=click.IntRange(min=1),
    help="Iterations of a window. Default: as many as take 0.3 s, of bench scaling 1 s.",
)
measured_data: Decorator = click.option(
    "--data",
    default="synthetic",
    show_default=True,
    metavar="synthetic|PATH",
    help="Random images and labels, made once, the records of a database, or the images of a list.",
)
iterations: Decorator = click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Number of batches.",
)
level: Decorator = click.option(
    "--level",
    type=int,
    default=0,
    show_default=True,
    help="Level of the net, for min_level and max_level in the rules of layers.",
)
stage: Decorator = click.option(
    "--stage",
    "stages",
    default="",
    callback=parsing.stages,
    help="Stages of the net, separated by commas, for stage and not_stage in the rules of layers.",
)
threads: Decorator = click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Number of CPU threads. Default: one per core.",
)
backend: Decorator = click.option(
    "--backend",
    type=click.Choice(["lmdb", "leveldb"], case_sensitive=False),
    default="lmdb",
    show_default=True,
    help="Kind of database; a LevelDB needs the leveldb extra.",
)
progress: Decorator = click.option(
    "--progress/--no-progress", default=None, help="Show a progress line. Default: on a terminal."
)
max_bad_records: Decorator = click.option(
    "--max-bad-records",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Skip up to N records or images of each source that cannot be read, each with a warning.",
)
decode: Decorator = click.option(
    "--decode",
    type=click.Choice(["threads", "processes", "gpu"]),  # those of data.decoders, imported later
    default="threads",
    show_default=True,
    help="What decodes the images of Data, ImageData and WindowData layers: threads, the fastest "
    "for plain JPEGs; processes, one for each of --threads, for other images on many cores, with "
    "the same pixels; gpu, whose pixels differ by at most 1 of 255.",
)
as_json: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the result to stdout as JSON."
)


def _image(help: str) -> Decorator:
    return click.option("--image", callback=parsing.shape, metavar="C,H,W", help=help)


image = _image("Shape of the random images: channels, height and width, if the net does not say.")
input_image = _image("Replace the data layers by an input of this shape: channels, height, width.")


def _with(command: Command, *flags: Decorator) -> Command:
    """Add these options, listed in the help in this order."""
    for option in reversed(flags):
        command = option(command)
    return command


def to_database(command: Command) -> Command:
    """Add the options of writing a list of images to a database; UsageError for half a size."""

    @functools.wraps(command)
    def run(*, resize_width: int, resize_height: int, **values: Any) -> Any:
        if (resize_width > 0) != (resize_height > 0):
            raise click.UsageError("Give both --resize-width and --resize-height, or neither.")
        return command(resize_width=resize_width, resize_height=resize_height, **values)

    return _with(
        run,
        click.option("--gray/--no-gray", help="Store grey images, not colour."),
        click.option("--shuffle/--no-shuffle", help="Shuffle the lines of the list."),
        click.option(
            "--seed",
            type=click.IntRange(0),
            help="Seed of --shuffle. Default: a new one each time, which is logged.",
        ),
        backend,
        click.option(
            "--resize-width",
            type=click.IntRange(0),
            default=0,
            help="Width to resize images to. Default: 0, as they are.",
        ),
        click.option(
            "--resize-height",
            type=click.IntRange(0),
            default=0,
            help="Height to resize images to. Default: 0, as they are.",
        ),
        click.option(
            "--check-size/--no-check-size",
            help="Stop at an image whose size differs from the first.",
        ),
        click.option(
            "--encoded/--no-encoded",
            help="Store image files instead of pixels, unchanged if possible.",
        ),
        click.option(
            "--encode-type", default="", help="Store image files of this type: jpg, png..."
        ),
        click.option(
            "--resume", is_flag=True, help="Continue an interrupted run from DB_NAME.partial."
        ),
        click.option(
            "--check",
            is_flag=True,
            help="Compare all records with the images at the end; if DB_NAME exists, do only that.",
        ),
    )


def prepared(command: Command) -> Command:
    """Collect the options of image preparation into one value, `preparation`."""

    @functools.wraps(command)
    def run(
        *,
        mean_file: str,
        mean_values: tuple[float, ...],
        input_scale: float | None,
        raw_scale: float,
        channel_swap: tuple[int, ...],
        **values: Any,
    ) -> Any:
        from caffepy.commands.preprocess import Preparation

        if mean_file and mean_values:
            raise click.UsageError("Give --mean-file or --mean-values, not both.")
        preparation = Preparation(
            mean_file, mean_values, input_scale, raw_scale, channel_swap or None
        )
        return command(**values, preparation=preparation)

    return _with(
        run,
        click.option(
            "--mean-file",
            type=click.Path(),
            default="",
            help="Mean to subtract, a .npy or .binaryproto: transform_param's mean_file.",
        ),
        click.option(
            "--mean-values",
            default="",
            callback=parsing.numbers(float),
            metavar="V,...",
            help="Means of the channels in the net's order, blue, green, red, or one for all: "
            "transform_param's mean_value.",
        ),
        click.option(
            "--input-scale",
            type=parsing.Number(),
            help="Factor after the mean is subtracted: transform_param's scale.",
        ),
        click.option(
            "--raw-scale",
            type=parsing.Number(),
            default=255.0,
            show_default=True,
            help="Factor for pixels of 0 to 1 before the mean is subtracted.",
        ),
        click.option(
            "--channel-swap",
            default="",
            callback=parsing.integers,
            metavar="I,...",
            help="New order of red, green, blue. Default: 2,1,0 for nets of three channels.",
        ),
    )


def synthetic(command: Command) -> Command:
    """Add --synthetic and --image, which replaces the data layers of a net even without it."""
    help = "Use random images and labels instead of the net's data, which need not exist."
    return _with(command, click.option("--synthetic", is_flag=True, help=help), image)


def logged(least: int = 0) -> Decorator:
    """Add glog's flags, and log as they say during the command; `least` is the default level."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*, log_dir: str, minloglevel: int, logtostderr: bool, v: int, **values: Any) -> Any:
            from caffepy.report import logging_to

            lowest = logging.DEBUG if v > 0 and minloglevel == 0 else LEVELS[minloglevel]
            program = click.get_current_context().find_root().info_name or "caffepy"
            folder = None if logtostderr else log_dir
            with logging_to(log_dir=folder, level=lowest, program=program):
                return command(**values)

        return _with(
            run,
            click.option(
                "--log-dir",
                type=click.Path(),
                default="",
                envvar="GLOG_log_dir",
                help="Folder for a log file: a copy of the log on stderr.",
            ),
            click.option(
                "--minloglevel",
                type=click.IntRange(0, 3),
                default=least,
                show_default=True,
                envvar="GLOG_minloglevel",
                help="What to log: 0 all, 1 warnings and errors, 2 errors, 3 fatal errors.",
            ),
            click.option(
                "--logtostderr/--no-logtostderr",
                envvar="GLOG_logtostderr",
                help="Log to stderr only.",
            ),
            click.option("--v", type=int, default=0, envvar="GLOG_v", help="1: log details."),
            *(click.option(flag, hidden=True, expose_value=False) for flag in GLOGS_OTHERS),
        )

    return decorate


def ignoring(*flags: str) -> Decorator:
    """Take flags of Caffe that this command does not use, as Caffe takes all with any command."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            for flag in flags:
                if values.pop(flag) is not None:
                    log.warning("%s does not use --%s", command.__name__, flag.replace("_", "-"))
            return command(**values)

        return _with(run, *(click.option(f"--{f.replace('_', '-')}", hidden=True) for f in flags))

    return decorate


def leave(error: BaseException) -> None:
    """End the process while its main thread hangs; so may the reader of stderr."""
    if isinstance(error, SystemExit):  # another process has the message
        os._exit(error.code if isinstance(error.code, int) else 70)
    text = f"caffepy: error: {error}\n(the main thread does not answer)"
    writer = threading.Thread(target=click.echo, args=(text, None, True, True), daemon=True)
    writer.start()
    writer.join(1.0)
    os._exit(getattr(error, "exit_code", 70))


def image_of(definition: Definition, synthetic: bool) -> tuple[int, ...] | None:
    """Return the shape of a bundled model's images, if they are to be synthetic."""
    if not (synthetic and definition.bundled):
        return None
    from caffepy.models.synthetic import image_shape

    return image_shape(definition.bundled)


def is_first() -> bool:
    """Return True unless another of several processes that worked as one has the result to show."""
    from caffepy.commands import nodes

    return nodes.is_first()


def show(result: Result, as_json: bool) -> None:
    """Print a result; of several processes that work as one, only the first does."""
    if is_first():
        click.echo(result.json() if as_json else result.table())


def need_weights(model: Definition | None, weights: tuple[str, ...]) -> Definition:
    """Return the net; UsageError if it or its weights are not given."""
    if model is None or not weights:
        raise click.UsageError(
            "Need a net and trained weights: give --model FILE and --weights FILE."
        )
    return model


def trained(solver: Definition | None, model: str, gpu: str | None, cpu: object) -> Definition:
    """Return what a benchmark trains: the bundled model of this name, else the solver.

    UsageError if it is not clear.
    """
    if model:
        solver = find_definition(model, "solver")
    if solver is None:
        raise click.UsageError("Need something to train: give --model NAME or --solver FILE.")
    if gpu and cpu:
        raise click.UsageError("Give --gpu or --cpu, not both.")
    return solver
