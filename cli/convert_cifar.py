"""caffepy convert-cifar"""

import click

from caffepy.cli import options


@click.command(short_help="Write CIFAR-10's files to databases.")
@click.argument("folder", metavar="IN")
@click.argument("out")
@click.argument(
    "kind", metavar="[lmdb|leveldb]", default="lmdb", type=click.Choice(["lmdb", "leveldb"])
)
@options.logged()
def convert_cifar(folder: str, out: str, kind: str) -> None:
    """Write CIFAR-10's files (data_batch_1.bin to test_batch.bin) in the folder IN to two new
    databases in OUT.

    They are cifar10_train_lmdb and cifar10_test_lmdb, or ..._leveldb.

    \b
    Examples:
      caffepy convert-cifar cifar-10-batches-bin examples/cifar10 lmdb
      caffepy compute-image-mean examples/cifar10/cifar10_train_lmdb \\
        examples/cifar10/mean.binaryproto
    """
    from caffepy.commands.data.mnist_and_cifar import convert_cifar as convert

    convert(folder, out, kind)
