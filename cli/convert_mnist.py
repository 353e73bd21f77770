"""caffepy convert-mnist"""

import click

from caffepy.cli import options


@click.command(short_help="Write MNIST's files to a database.")
@click.argument("images")
@click.argument("labels")
@click.argument("database", metavar="DB_NAME")
@options.backend
@options.logged()
def convert_mnist(images: str, labels: str, database: str, backend: str) -> None:
    """Write MNIST's IMAGES and LABELS (idx files, packed as .gz or not) to the new database
    DB_NAME.

    \b
    Examples:
      caffepy convert-mnist train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz mnist_train_lmdb
      caffepy convert-mnist t10k-images-idx3-ubyte t10k-labels-idx1-ubyte mnist_test_lmdb \\
        -backend lmdb
    """
    from caffepy.commands.data.mnist_and_cifar import convert_mnist as convert

    convert(images, labels, database, backend)
