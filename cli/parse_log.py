"""caffepy parse-log"""

import click

from caffepy.cli import options


@click.command(short_help="Write a training log as tables.")
@click.argument("log", metavar="LOG")
@click.argument("outdir", default="", metavar="[OUTDIR]")
@click.option(
    "--delimiter",
    default=",",
    show_default=True,
    help="Separator of columns, such as ';' or '\\t'.",
)
@click.option(
    "--columns",
    is_flag=True,
    help="Write the tables of Caffe's parse_log.sh, in files of the same names, instead of "
    "parse_log.py's CSV.",
)
@click.option("--verbose", is_flag=True, hidden=True)
@options.as_json
@options.logged(least=1)
def parse_log(
    log: str, outdir: str, delimiter: str, columns: bool, verbose: bool, as_json: bool
) -> None:
    """Write the net outputs in a training log, caffepy's or Caffe's, to LOG.train and LOG.test in
    the folder OUTDIR; print their names.

    The files are those of Caffe's parse_log.py: iterations, seconds, learning rates and a column
    for each output. Files of these names are replaced. OUTDIR is the current folder if it is not
    given. With --json the rows go to stdout, and files are written only if OUTDIR is given.

    \b
    Examples:
      caffepy parse-log caffe.INFO
      caffepy parse-log train.log tables --delimiter ';'
      caffepy parse-log train.log --json
    """
    delimiter = delimiter.replace("\\t", "\t")
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise click.BadParameter(f"{delimiter!r} is not one character", param_hint="--delimiter")
    if columns and (as_json or delimiter != ","):
        raise click.UsageError("--columns goes with neither --json nor --delimiter.")
    from caffepy.report import log_tables

    messages = []
    if columns:
        messages = log_tables.save_log_columns(log, outdir or ".")
    elif outdir or not as_json:
        messages = log_tables.save_log_csvs(log, outdir or ".", delimiter)
    if as_json:
        click.echo(log_tables.as_json(log))
    else:
        click.echo("\n".join(messages))
