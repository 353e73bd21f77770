"""caffepy extract-features"""

from collections.abc import Sequence
from typing import Any

import click

from caffepy.cli import options, parsing

CAFFES = "WEIGHTS PROTO BLOB[,BLOB] DB[,DB] NUM_BATCHES DB_TYPE [CPU|GPU [DEVICE_ID]]"


@click.command(short_help="Write the values of a trained net's blobs to files.")
@click.argument("caffes", nargs=-1, metavar=f"[{CAFFES}]")
@options.model
@options.weights
@click.option(
    "--blob",
    "blobs",
    multiple=True,
    callback=parsing.names,
    help="A blob to write. For several, repeat the flag or separate names by commas.",
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    callback=parsing.names,
    metavar="PATH",
    help="Output: one for each blob, or one .h5 file for all; .h5 and .npy choose the kind.",
)
@click.option(
    "--backend",
    type=click.Choice(["lmdb", "leveldb", "hdf5", "npy"]),
    help="Kind of the output. Default: by its extension, else an LMDB.",
)
@click.option(
    "--batches", type=click.IntRange(min=1), help="Number of batches. Default: all the data, once."
)
@options.gpu
@options.precision
@options.level
@options.stage
@options.threads
@options.progress
@options.logged(least=1)
def extract_features(
    caffes: tuple[str, ...],
    model: options.Definition | None,
    weights: tuple[str, ...],
    blobs: Sequence[str],
    outputs: Sequence[str],
    backend: str | None,
    batches: int | None,
    gpu: str | None,
    **values: Any,
) -> None:
    """Run a trained net over the data of its data layers and write the values of blobs, one record
    or row per item.

    Databases are those of Caffe's tool: keys 0000000000, 0000000001, ..., Datums of float_data. An
    HDF5 file has a dataset for each blob, so that an HDF5Data layer can read it. Nothing
    that exists is overwritten. Takes options, or the arguments of Caffe's tool in their order.

    \b
    Examples:
      caffepy extract-features --model digits --weights digits_iter_500.caffemodel --blob ip1 \\
        --output ip1_lmdb
      caffepy extract-features --model net.prototxt --weights w.caffemodel --blob fc7,label \\
        --output features.h5
      caffepy extract-features w.caffemodel net.prototxt fc7,prob fc7_db,prob_db 10 leveldb GPU 0
    """
    if caffes:
        if model or weights or blobs or outputs or backend or batches or gpu:
            raise click.UsageError(f"Give options or Caffe's arguments ({CAFFES}), not both.")
        weights, model, blobs, outputs, batches, backend, gpu = _parsed(caffes)
    net = options.need_weights(model, weights)
    if not blobs or not outputs:
        raise click.UsageError(
            "Need to know what to write, and where to: give --blob NAME and --output PATH."
        )
    from caffepy.commands.extract_features import extract_features as run
    from caffepy.commands.extract_features import features_of

    features = features_of(blobs, outputs, backend)
    run(net.path, weights, features, batches=batches, gpu=gpu, **values)


Parsed = tuple[tuple[str, ...], options.Definition, list[str], list[str], int, str, str | None]


def _parsed(words: tuple[str, ...]) -> Parsed:
    """Return the values of Caffe's arguments."""
    if not 6 <= len(words) <= 8:
        raise click.UsageError(f"Caffe's form has 6 to 8 arguments, not {len(words)}: {CAFFES}")
    weights, model, blobs, outputs, batches, backend, *where = words
    if not batches.isdecimal() or int(batches) < 1:
        raise click.UsageError(f'The number of batches is 1 or more, not "{batches}".')
    mode, device = [*(where or ["CPU"]), "0"][:2]
    if mode not in ("CPU", "GPU") or not device.isdecimal():
        raise click.UsageError(
            f'After the kind of database come CPU or GPU and its number, not "{" ".join(where)}".'
        )
    return (
        (weights,),
        options.find_definition(model, "train_val"),
        blobs.split(","),
        outputs.split(","),
        int(batches),
        backend,
        device if mode == "GPU" else None,
    )
