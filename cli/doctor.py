"""caffepy doctor"""

import click

from caffepy.cli import options
from caffepy.core.errors import DeviceError


@click.command(short_help="Check that drivers and libraries for GPUs work.")
@options.as_json
@options.logged(least=1)
def doctor(as_json: bool) -> int:
    """Check driver, CUDA and libraries, compute on each GPU for about a second, and print a table
    to stdout.

    Missing parts are no error on a machine that computes on the CPU. Exit code 6: something that
    is installed is broken; the table says what to do about it.

    \b
    Examples:
      caffepy doctor
      caffepy doctor --json
    """
    from caffepy.commands.doctor import examine

    health = examine()
    click.echo(health.json() if as_json else health.table())
    return 0 if health.works else DeviceError.exit_code
