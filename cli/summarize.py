"""caffepy summarize"""

import os

import click

from caffepy.cli import options

PHASES = {"ALL": None, "TRAIN": 0, "TEST": 1}


@click.command(short_help="Show a net as a table: layers, shapes, parameters, cost.")
@click.argument("net", metavar="NET")
@click.option(
    "--phase",
    type=click.Choice(list(PHASES)),
    default="ALL",
    show_default=True,
    help="Phase of the net; ALL: each that the layers name.",
)
@click.option(
    "--max-width",
    "--w",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="Largest width of a column.",
)
@options.level
@options.stage
@options.synthetic
@options.as_json
@options.logged(least=1)
def summarize(
    net: str,
    phase: str,
    max_width: int,
    level: int,
    stages: tuple[str, ...],
    synthetic: bool,
    image: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """Print the layers of NET, a net or solver prototxt or a bundled model, to stdout.

    For each layer: name, type, names and multipliers of parameters (x: lr_mult, Dx: decay_mult),
    bottoms -> tops, sizes as kernel/stride+pad outputs/group, shapes of the tops, number of
    parameters, multiply-adds of a forward pass, memory of the tops. On a terminal blobs have
    colours, tops that no layer takes are underlined, bottoms that no layer makes are red. A net
    that cannot be built is shown without shapes. The code of Python layers runs.

    \b
    Examples:
      caffepy summarize lenet --synthetic
      caffepy summarize train_val.prototxt --phase TRAIN --max-width 20
      caffepy summarize deploy.prototxt --json
    """
    from caffepy.commands.summarize import as_json as to_json
    from caffepy.commands.summarize import summarize as run

    definition = options.find_definition(net, "train_val")
    nets = run(
        definition.path,
        phase=PHASES[phase],
        level=level,
        stages=stages,
        synthetic=synthetic or image is not None,
        image=image or options.image_of(definition, synthetic),
    )
    colour = False if os.environ.get("NO_COLOR") else None  # None: on a terminal
    click.echo(
        to_json(nets) if as_json else "\n\n".join(it.table(max_width) for it in nets), color=colour
    )
