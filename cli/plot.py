"""caffepy plot"""

import os

import click

from caffepy.cli import options


@click.command(short_help="Draw the curves of training runs.")
@click.argument("logs", nargs=-1, metavar="LOG...")
@click.option(
    "--output",
    default="",
    metavar="FILE",
    help="Picture to write: .png, .svg or .pdf. Default: NAME.png.",
)
@click.option(
    "--x",
    "axis",
    type=click.Choice(["iterations", "seconds"]),
    default="iterations",
    show_default=True,
    help="The horizontal axis.",
)
@click.option(
    "--curves",
    default="",
    metavar="NAME,...",
    help="Curves: loss, outputs, lr, images/s, iter/s, or names such as 'test accuracy'. "
    "Default: all.",
)
@click.option(
    "--smooth",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Draw means of N values, and the values in a pale colour.",
)
@click.option("--log-loss", is_flag=True, help="Draw losses on a logarithmic axis.")
@click.option(
    "--chart",
    type=click.IntRange(0, 7),
    help="Chart of this number of Caffe's plot_training_log.",
)
@click.option(
    "--names",
    default="",
    metavar="NAME,...",
    help="Names of the runs. Default: those of their files.",
)
@options.as_json
@options.logged(least=1)
def plot(
    logs: tuple[str, ...],
    output: str,
    axis: str,
    curves: str,
    smooth: int,
    log_loss: bool,
    chart: int | None,
    names: str,
    as_json: bool,
) -> None:
    """Draw loss, net outputs, learning rate and speed of the run in each LOG, and print the
    picture's name.

    A LOG is a training log, caffepy's or Caffe's, or a PREFIX_metrics.csv. Restarts in it are one
    run; a run with several files is FILE,FILE,... in the order in which they were written. With
    --json the curves are printed instead.

    \b
    Charts: 0 and 1 test accuracy, 2 and 3 test loss, 4 and 5 learning rate, 6 and 7 loss,
    over iterations (even numbers) and over seconds (odd ones).

    \b
    Examples:
      caffepy plot digits_metrics.csv
      caffepy plot caffe.INFO ours.log --curves loss,outputs --smooth 10 --output both.svg
      caffepy plot monday.log,tuesday.log other.log --x seconds --names mine,other
      caffepy plot --chart 6 caffe.log --output loss.png
    """
    if not logs:
        raise click.UsageError("Need a log to draw: give one LOG or more.")
    if chart is not None and (curves or smooth > 1 or log_loss or axis != "iterations"):
        raise click.UsageError("--chart goes without --x, --curves, --smooth and --log-loss.")
    from caffepy.report.runs import read_runs
    from caffepy.report.series import as_json as to_json

    runs = read_runs(logs, names.split(",") if names else ())
    if as_json:
        click.echo(to_json(runs))
        return
    from caffepy.report import plot

    path = output or f"{os.path.basename(runs[0].name)}.png"
    if chart is not None:
        plot.draw_chart(runs, chart, path)
    else:
        wanted = [name.strip() for name in curves.split(",") if name.strip()]
        plot.draw(runs, path, x=axis, wanted=wanted, smooth=smooth, log_loss=log_loss)
    click.echo(path)
