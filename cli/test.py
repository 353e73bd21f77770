"""caffepy test"""

from typing import Any

import click

from caffepy.cli import options


@click.command(short_help="Test trained weights on a net's test data.")
@options.model
@options.weights
@options.gpus_in_turn
@options.cpus_in_turn
@options.deadlines
@options.precision
@options.iterations
@click.option(
    "--ap-version",
    type=click.Choice(["Integral", "MaxIntegral", "11point", "101point", "COCO"]),
    help="How DetectionEvaluate's precision is averaged: as it is, VOC 2012, VOC 2007, over 101 "
    "points, COCO's mean of ten overlaps. Default: as a solver.prototxt beside the net says, or "
    "Integral.",
)
@options.max_bad_records
@options.decode
@options.level
@options.stage
@options.threads
@options.as_json
@options.logged()
@options.ignoring("solver", "snapshot", "phase", "sigint_effect", "sighup_effect")
def test(
    model: options.Definition | None, weights: tuple[str, ...], as_json: bool, **values: Any
) -> None:
    """Run a net in its TEST phase and print the means of its outputs to stdout.

    Several devices, and the processes that mpirun or srun started, share the batches; the means are
    those of one device.

    \b
    Examples:
      caffepy test --model digits --weights digits_iter_500.caffemodel --iterations 3
      caffepy test --model train_val.prototxt --weights net.caffemodel --json
      caffepy test --model train_val.prototxt --weights net.caffemodel --gpu all --iterations 1000
      mpirun -n 4 caffepy test --model train_val.prototxt --weights net.caffemodel --gpu all
    """
    if model is None:
        raise click.UsageError(
            "Need a model definition to score: give --model FILE or the name of a bundled model."
        )
    if not weights:
        raise click.UsageError("Need model weights to score: give --weights FILE.")
    options.open_gpu(values["gpu"])
    from caffepy.commands.test import test as run

    options.show(run(model.path, weights, last_resort=options.leave, **values), as_json)
