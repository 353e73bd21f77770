"""caffepy draw"""

import click

from caffepy.cli import options

PHASES = {"ALL": None, "TRAIN": 0, "TEST": 1}


@click.command(short_help="Draw a net as a graph.")
@click.argument("net", metavar="NET")
@click.argument("out")
@click.option(
    "--rankdir",
    type=click.Choice(["LR", "RL", "TB", "BT"]),
    default="LR",
    show_default=True,
    help="Direction of the data: left to right, right to left, to the bottom, to the top.",
)
@click.option(
    "--phase",
    type=click.Choice(list(PHASES)),
    default="ALL",
    show_default=True,
    help="The phase whose layers are drawn.",
)
@click.option("--display-lrm", is_flag=True, help="Show the lr_mult of parameters.")
@click.option(
    "--shapes",
    is_flag=True,
    help="Show the shapes of blobs beside the arrows; this builds the net, and the code of "
    "Python layers runs.",
)
@options.synthetic
@options.logged(least=1)
def draw(
    net: str,
    out: str,
    rankdir: str,
    phase: str,
    display_lrm: bool,
    shapes: bool,
    synthetic: bool,
    image: tuple[int, ...] | None,
) -> None:
    """Draw NET, a prototxt or a bundled model, to the file OUT in the format that its extension
    names; print its name.

    .dot, .svg, .png and .jpg need nothing else, but pictures are better with graphviz; .pdf and
    others need it.

    \b
    Examples:
      caffepy draw lenet lenet.svg
      caffepy draw train_val.prototxt net.png --rankdir TB --phase TRAIN
      caffepy draw lenet lenet.png --phase TRAIN --shapes --synthetic
      caffepy draw deploy.prototxt net.dot
    """
    if (synthetic or image) and not shapes:
        raise click.UsageError("--synthetic and --image are for --shapes.")
    from caffepy.proto.text import read_net
    from caffepy.pycaffe.draw import FORMATS, draw_net_to_file, shapes_of
    from caffepy.report.text import extension_of

    extension_of(out, FORMATS)
    definition = options.find_definition(net, "train_val")
    param = read_net(definition.path)
    known = None
    if shapes:
        image = image or options.image_of(definition, synthetic)
        known = shapes_of(
            param, PHASES[phase], definition.path, synthetic or image is not None, image
        )
    draw_net_to_file(param, out, rankdir, PHASES[phase], display_lrm, known)
    click.echo(out)
