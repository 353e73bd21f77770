"""caffepy device-query"""

import logging
import os
import platform
from typing import Any

import click

from caffepy.cli import options

log = logging.getLogger(__name__)


LABELS = {
    "Device id": "id",
    "Major revision number": "major",
    "Minor revision number": "minor",
    "Name": "name",
    "Total global memory": "totalGlobalMem",
    "Total shared memory per block": "sharedMemPerBlock",
    "Total registers per block": "regsPerBlock",
    "Warp size": "warpSize",
    "Maximum memory pitch": "memPitch",
    "Maximum threads per block": "maxThreadsPerBlock",
    "Maximum dimension of block": "maxThreadsDim",
    "Maximum dimension of grid": "maxGridSize",
    "Clock rate": "clockRate",
    "Total constant memory": "totalConstMem",
    "Texture alignment": "textureAlignment",
    "Concurrent copy and execution": "deviceOverlap",
    "Number of multiprocessors": "multiProcessorCount",
    "Kernel execution timeout": "kernelExecTimeoutEnabled",
}
"""Caffe's labels, in its order, and CUDA's names of the properties."""

FLAGS = ("deviceOverlap", "kernelExecTimeoutEnabled")


@click.command(short_help="Show the CPU and the GPUs of this machine.")
@options.gpus_if_named
@options.as_json
@options.logged()
@options.ignoring(
    "solver",
    "model",
    "weights",
    "snapshot",
    "phase",
    "level",
    "stage",
    "iterations",
    "sigint_effect",
    "sighup_effect",
)
def device_query(gpu: str | None, as_json: bool) -> None:
    """Print the properties of the CPU and of the GPUs of --gpu to stdout.

    \b
    Examples:
      caffepy device-query
      caffepy device-query --gpu all
    """
    log.info("Querying GPUs %s", gpu or "")
    from caffepy.device.gpus import gpu_numbers, gpu_properties

    gpus = [{"id": number} | gpu_properties(number) for number in (gpu_numbers(gpu) if gpu else [])]
    cpu = {"name": cpu_name(), "threads": os.cpu_count()}
    if as_json:
        rows = [{name: _value(properties[name]) for name in LABELS.values()} for properties in gpus]
        import json

        click.echo(json.dumps({"cpu": cpu, "gpus": rows}))
        return
    click.echo(f"CPU: {cpu['name']}, {cpu['threads']} threads")
    for properties in gpus:
        for label, name in LABELS.items():
            click.echo(f"{label + ':':31}{_text(name, properties[name])}")


def _value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(name: str, value: Any) -> str:
    if name in FLAGS:
        return "Yes" if value else "No"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def cpu_name() -> str:
    """Return the processor's name from Linux, else the platform's."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
