"""State that a trainer leaves with servers that outlive it, so that the next one, or a snapshot,
has more than their values.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import shape_string
from caffepy.net.weights import write_layers
from caffepy.parallel.parameter_server.messages import Cut, Rule
from caffepy.parallel.parameter_server.ranges import KeyRange
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import BlobProto, BlobShape, LayerParameter, NetParameter
from caffepy.proto.caffe_pb2 import SolverParameter as Param
from caffepy.solver import Solver
from caffepy.solver.policy import next_step
from caffepy.solver.snapshot import Files, State, write_files


@dataclass(frozen=True)
class Kept:
    """A snapshot of worker 0 at a clock, without the values that the servers hold.

    param: a SolverParameter.
    model: a NetParameter whose blobs have no values where `places` has the index of their first
        element in the flat array of the ranges, layer by layer; else None.
    every, solvers: iterations between pushes, and solvers of a worker.
    position: the batch at which its data layers stand, of those that this run was dealt.
    """

    param: bytes
    state: State
    sidecar: dict[str, Any]
    model: bytes
    places: list[list[int | None]]
    every: int
    solvers: int
    position: int
    clock: int

    def iteration(self, clock: int) -> int:
        """Return the iteration of a clock."""
        return self.state.iteration + (clock - self.clock) * self.every


class Held(NamedTuple):
    """State of servers that outlive a trainer, at a clock."""

    kept: Kept
    cut: Cut
    ranges: Sequence[KeyRange]
    rule: Rule
    clock: int


def model_of(solver: Solver) -> tuple[bytes, list[list[int | None]]]:
    """Return a solver's net without the values of blobs that servers hold, and their places."""
    params, statistics, at = solver.params, solver.iterations.statistics, dict[int, int]()
    for learnable, (offset, _) in zip(solver.net.learnable, params.segments, strict=True):
        at[id(learnable.blob.data_memory)] = offset
    offset = params.reduced_diff.size
    for blob in statistics.blobs:
        at[id(blob.data_memory)] = offset
        offset += blob.count
    model, places = NetParameter(name=solver.net.name), list[list[int | None]]()
    for layer in solver.net.layers:
        places.append([at.get(id(blob.data_memory)) for blob in layer.blobs])
        saved = model.layer.add()
        saved.CopyFrom(layer.param)
        del saved.blobs[:]
        saved.blobs.extend(
            BlobProto(shape=BlobShape(dim=blob.shape))
            if place is not None
            else binary.array_to_blob(blob.host_data)
            for blob, place in zip(layer.blobs, places[-1], strict=True)
        )
    return model.SerializeToString(), places


def check_same_net(kept: Kept, solver: Solver) -> None:
    """Raise ConfigError unless this solver trains the net that servers hold, as they do."""
    held, own = (
        {layer.name: _shapes(layer) for layer in NetParameter.FromString(model).layer}
        for model in (kept.model, model_of(solver)[0])
    )
    for name, shapes in own.items():
        if held.get(name, []) != shapes:
            raise ConfigError(
                f'layer "{name}" has {_shape_text(shapes)}, there {_shape_text(held.get(name))}'
            )
    for name, shapes in held.items():
        if shapes and name not in own:
            raise ConfigError(f'there layer "{name}" has {_shape_text(shapes)}, here there is none')
    kind = kept.sidecar["type"]
    if kind != solver.param.type:
        raise ConfigError(f"this solver is of type {solver.param.type}, there it is {kind}")


def _shapes(layer: LayerParameter) -> list[tuple[int, ...]]:
    return [tuple(blob.shape.dim) for blob in layer.blobs]


def _shape_text(shapes: Sequence[tuple[int, ...]] | None) -> str:
    if not shapes:
        return "no parameters"
    return " and ".join(map(shape_string, shapes))


def write(held: Held, prefix: str) -> str:
    """Write what servers hold as a snapshot under this prefix; return its state file."""
    kept, cut, ranges = held.kept, held.cut, held.ranges
    iteration = kept.iteration(held.clock)
    files = Files.of(prefix, iteration, hdf5=False)
    flat = np.zeros(max(r.stop for r in ranges), np.float32)
    for key_range, values in zip(ranges, cut.values, strict=True):
        flat[key_range.start : key_range.stop] = values
    net = NetParameter.FromString(kept.model)

    def layers() -> Iterator[LayerParameter]:
        for layer, places in zip(net.layer, kept.places, strict=True):
            for blob, place in zip(layer.blobs, places, strict=True):
                if place is not None:
                    shape = tuple(blob.shape.dim)
                    values = flat[place : place + int(np.prod(shape))].reshape(shape)
                    blob.CopyFrom(binary.array_to_blob(values))
            yield layer
            layer.ClearField("blobs")

    remedy = "let the trainer take snapshots, with snapshot_format: HDF5"
    group = {
        **kept.sidecar["group"],
        "ahead": max(0, cut.batches * kept.solvers - kept.position),
        "servers": {
            key_range.name: own
            for key_range, own in zip(ranges, cut.update_states, strict=True)
            if own
        },
    }
    write_files(
        files,
        lambda path: write_layers(net.name, layers(), path, remedy),
        State(iteration, files.model, kept.state.history, _step(kept, iteration)),
        {**kept.sidecar, "iteration": iteration, "group": group},
        lambda what, path: None,
    )
    return os.path.abspath(files.state)


def _step(kept: Kept, iteration: int) -> int:
    """Return the step counter of the learning-rate policy at an iteration."""
    param, step = Param.FromString(kept.param), kept.state.current_step
    for number in range(kept.state.iteration, iteration):
        step = next_step(param, number, step)
    return step
