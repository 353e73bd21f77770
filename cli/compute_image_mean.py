"""caffepy compute-image-mean"""

import click

from caffepy.cli import options


@click.command(short_help="Compute the mean image of a database.")
@click.argument("database", metavar="INPUT_DB")
@click.argument("output", metavar="[OUTPUT_FILE]", required=False)
@click.option(
    "--backend",
    default=None,
    hidden=True,
    type=click.Choice(["lmdb", "leveldb"], case_sensitive=False),
)
@options.threads
@options.progress
@options.as_json
@options.logged()
def compute_image_mean(
    database: str,
    output: str | None,
    backend: str | None,
    threads: int | None,
    progress: bool | None,
    as_json: bool,
) -> None:
    """Compute the mean of all images in INPUT_DB, an LMDB or LevelDB, and write it to OUTPUT_FILE,
    a binaryproto.

    The log ends with the mean of each channel, for mean_value. Sums are exact.

    \b
    Examples:
      caffepy compute-image-mean train_lmdb mean.binaryproto
      caffepy compute-image-mean train_leveldb mean.binaryproto
      caffepy compute-image-mean train_lmdb --json
    """
    from caffepy.commands.data.compute_image_mean import compute_image_mean as compute

    mean = compute(database, output, backend=backend, threads=threads, progress=progress)
    if as_json:
        click.echo(mean.json())
