"""caffepy device-query"""

import json
import logging
import os
import platform

import click

from caffepy.cli import options

log = logging.getLogger(__name__)


@click.command(short_help="Show the devices that caffepy can compute on.")
@options.gpu
@options.as_json
@options.logged()
def device_query(gpu: str | None, as_json: bool) -> None:
    """Print what the devices are to stdout.

    \b
    Examples:
      caffepy device-query
      caffepy device-query --gpu all
    """
    log.info("Querying GPUs %s", gpu or "")
    options.refuse_gpu(gpu)
    cpu = {"name": cpu_name(), "threads": os.cpu_count()}
    if as_json:
        click.echo(json.dumps({"cpu": cpu, "gpus": []}))
        return
    click.echo(f"CPU: {cpu['name']}, {cpu['threads']} threads")
    click.echo("no CUDA device: this version computes on the CPU")


def cpu_name() -> str:
    """The processor's name as Linux knows it, else the platform's word for it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
