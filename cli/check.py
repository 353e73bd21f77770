"""caffepy check"""

import os
from collections.abc import Sequence
from typing import Any

import click

from caffepy.cli import options, parsing
from caffepy.core.errors import ConfigError, UsageError


@click.command(short_help="Check a solver or net and show its layers, without training.")
@click.argument("files", nargs=-1, metavar="[FILE|NAME|FOLDER]...")
@options.solver
@options.model
@options.level
@options.stage
@options.synthetic
@click.option(
    "--gpu",
    is_flag=True,
    help="Also show the plan for a GPU, in the given --precision; the machine needs none.",
)
@options.precision
@click.option(
    "--batch",
    callback=parsing.auto_or_number,
    metavar="auto|N",
    help="Build the net that learns with this batch; auto, with --gpu: find the largest that fits.",
)
@click.option(
    "--memory",
    callback=parsing.size_of_memory,
    metavar="SIZE",
    help="A GPU's memory, such as 80GB, for --batch auto. Default: that of this machine's first.",
)
@options.as_json
@options.logged(least=1)
def check(
    files: tuple[str, ...],
    solver: options.Definition | None,
    model: options.Definition | None,
    level: int,
    stages: tuple[str, ...],
    synthetic: bool,
    image: tuple[int, ...] | None,
    gpu: bool,
    precision: str | None,
    batch: int | str | None,
    memory: int | None,
    as_json: bool,
) -> int:
    """Build the nets of a solver, or a net in its phases, and print a table of their layers to
    stdout.

    For each layer: name, type, shapes of its tops, parameters, memory of the tops, operations of a
    forward pass (convolutions and inner products only). Below it: the memory that the data of the
    whole net take on the CPU, and its gradients where it trains. FILE is recognized as a solver or
    a net by its fields. The code of Python layers runs; no file that a layer names is written.

    Several files, or folders with all prototxts below them, are checked one by one, with a line for
    each and for each of its warnings; with --json an object a line (JSON lines, no list): file,
    kind, ok, error, layers, parameters, warnings (a list). The exit code is 3 if one is wrong. Of a
    solver its own fields are checked, not the files of its nets. With --json one definition gives a
    list with an object for each net.

    With --synthetic, images and labels have a shape with which the net can be built, if nothing
    states it.

    With --gpu also: the layers that run on the host, fused layers, the formats of the tops and
    their conversions, the memory of data and gradients, also with train --recompute, and whether a
    training step can be captured as a CUDA graph. With --batch auto the largest batch that fits,
    by this plan: nothing is run.

    \b
    Examples:
      caffepy check solver.prototxt
      caffepy check --model vgg16 --synthetic
      caffepy check --solver resnet50 --synthetic --gpu --precision bf16
      caffepy check --solver resnet50 --synthetic --gpu --batch auto --memory 80GB
      caffepy check models/ --synthetic --json
    """
    if precision and not gpu:
        raise click.UsageError("--precision is for --gpu.")
    if batch == "auto" and not gpu:
        raise click.UsageError("--batch auto is for --gpu.")
    if memory and batch != "auto":
        raise click.UsageError("--memory is for --batch auto.")
    given = [definition for definition in (solver, model) if definition is not None]
    wanted: dict[str, Any] = {"level": level, "stages": stages, "image": image}
    wanted |= {"synthetic": synthetic or image is not None, "gpu": gpu, "precision": precision}
    if files and (len(files) > 1 or os.path.isdir(files[0])) and not given:
        if batch:
            raise click.UsageError("--batch is for one definition.")
        return _check_all([options.find_definition(f, "train_val") for f in files], wanted, as_json)
    given.extend(options.find_definition(file, "solver") for file in files)
    if len(given) != 1:
        raise click.UsageError(
            "Need one definition to check: FILE, --solver FILE or --model FILE; or several files."
        )
    from caffepy.commands.check import as_json as to_json
    from caffepy.commands.check import inspect

    wanted["image"] = image or options.image_of(given[0], synthetic)
    wanted |= {"batch": batch, "memory": memory}
    nets = inspect(given[0].path, **wanted)
    click.echo(to_json(nets) if as_json else "\n\n".join(net.table() for net in nets))
    return 0


def _check_all(
    definitions: Sequence[options.Definition], wanted: dict[str, Any], as_json: bool
) -> int:
    """Print a line for each file and return the exit code."""
    from caffepy.commands.check_files import check_files, files_in

    files = list(files_in(definition.path for definition in definitions))
    if not files:
        given = ", ".join(definition.path for definition in definitions)
        raise UsageError(f"{given}: no prototxt lies below, a file ending in .prototxt or .pt")
    shapes = {one.path: options.image_of(one, wanted["synthetic"]) for one in definitions}
    images = {path: shape for path, shape in shapes.items() if shape and not wanted["image"]}
    wrong = 0
    for found in check_files(files, images=images, **wanted):
        click.echo(found.json() if as_json else found.text())
        wrong += not found.ok
    if not as_json:
        click.echo(f"{len(files):,} files, {wrong:,} with an error")
    return ConfigError.exit_code if wrong else 0
