"""caffepy time"""

from typing import Any

import click

from caffepy.cli import options

PHASES = click.Choice(["TRAIN", "TEST"])


@click.command(short_help="Time the layers of a net.")
@options.model
@options.gpu
@options.precision
@options.iterations
@click.option("--phase", type=PHASES, default="TRAIN", show_default=True, help="Phase of the net.")
@options.level
@options.stage
@options.decode
@options.threads
@options.synthetic
@options.as_json
@options.logged()
@options.ignoring("solver", "snapshot", "weights", "sigint_effect", "sighup_effect")
def time(
    model: options.Definition | None,
    synthetic: bool,
    image: tuple[int, ...] | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Print the mean times of each layer, forward and backward, to stdout.

    Of the processes that mpirun or srun started each times its own device; the first prints its
    times, and which is the slowest.

    \b
    Examples:
      caffepy time --model lenet --synthetic
      caffepy time --model train_val.prototxt --iterations 20
      caffepy time --model caffenet --synthetic --gpu 0
    """
    if model is None:
        raise click.UsageError(
            "Need a model definition to time: give --model FILE or the name of a bundled model."
        )
    options.open_gpu(values["gpu"])
    from caffepy.commands.time import time as run

    result = run(
        model.path,
        synthetic=synthetic or image is not None,
        image=image or options.image_of(model, synthetic),
        **values,
    )
    options.show(result, as_json)
