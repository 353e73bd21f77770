"""caffepy draw"""

import click

from caffepy.cli import options

PHASES = {"ALL": None, "TRAIN": 0, "TEST": 1}


@click.command(short_help="Draw a net.")
@click.argument("net", metavar="NET")
@click.argument("out")
@click.option(
    "--rankdir",
    type=click.Choice(["LR", "RL", "TB", "BT"]),
    default="LR",
    show_default=True,
    help="Where the data flows: left to right, right to left, to the bottom, to the top.",
)
@click.option(
    "--phase",
    type=click.Choice(list(PHASES)),
    default="ALL",
    show_default=True,
    help="The phase whose layers are drawn.",
)
@click.option("--display-lrm", is_flag=True, help="Show the lr_mult of parameters.")
@options.logged(least=1)
def draw(net: str, out: str, rankdir: str, phase: str, display_lrm: bool) -> None:
    """Draw NET, a prototxt or a bundled model, to the file OUT in the format that its extension names.

    .dot needs nothing else; .png, .svg, .pdf and others need graphviz.

    \b
    Examples:
      caffepy draw lenet lenet.svg
      caffepy draw train_val.prototxt net.png --rankdir TB --phase TRAIN
      caffepy draw deploy.prototxt net.dot
    """
    from caffepy.draw import draw_net_to_file, extension
    from caffepy.proto.text import read_net

    extension(out)
    definition = options.find_definition(net, "train_val")
    draw_net_to_file(read_net(definition.path), out, rankdir, PHASES[phase], display_lrm)
