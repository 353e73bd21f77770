"""Pure rewrites of a NetParameter: filter layers by state, divide batches, insert Split layers."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from caffepy.core.errors import CaffeError, ConfigError
from caffepy.core.names import listed, nearest
from caffepy.proto.caffe_pb2 import (
    LayerParameter,
    NetParameter,
    NetState,
    NetStateRule,
)
from caffepy.proto.text import where

log = logging.getLogger(__name__)


@contextmanager
def located(path: str | None, layer: LayerParameter) -> Iterator[None]:
    """Add the place of a layer to errors of the block, and fields that its type does not read."""
    try:
        yield
    except CaffeError as error:
        if isinstance(error, ConfigError) and not error.where:
            error.message += _of_another_type(layer)
        raise error.at(where(path, layer)) from error.__cause__


def _of_another_type(layer: LayerParameter) -> str:
    """Return a remark on a layer that sets the `..._param` of another type instead of its own."""
    own = f"{layer.type.lower()}param"
    known = {name.replace("_", ""): name for name in LayerParameter.DESCRIPTOR.fields_by_name}
    given = [f.name for f, _ in layer.ListFields() if f.name.endswith("_param")]
    others = [name for name in given if name not in ("transform_param", "loss_param")]
    if own not in known or known[own] in given or not others:
        return ""
    return f"; {layer.type} reads {known[own]}, not {others[0]}"


def filter_state(param: NetParameter, path: str | None = None) -> NetParameter:
    """Return a copy with the layers that `param.state` (phase, level, stages) admits.

    ConfigError for a layer with both include and exclude rules.
    """
    kept = NetParameter()
    kept.CopyFrom(param)
    del kept.layer[:]
    for layer in param.layer:
        if layer.include and layer.exclude:
            raise ConfigError(
                "give either include rules or exclude rules, not both", where(path, layer)
            )
        if is_included(layer, param.state):
            kept.layer.add().CopyFrom(layer)
    return kept


def is_included(layer: LayerParameter, state: NetState) -> bool:
    """True if a layer's rules admit it to a net in this state."""
    if layer.include:
        return any(meets_rule(state, rule, layer.name) for rule in layer.include)
    return not any(meets_rule(state, rule, layer.name) for rule in layer.exclude)


def meets_rule(state: NetState, rule: NetStateRule, name: str) -> bool:
    """True if all fields of the rule hold for the state; log the first that does not."""
    differs = "The NetState %s (%d) %s (%d) specified by a rule in layer %s"
    if rule.HasField("phase") and rule.phase != state.phase:
        log.info(differs, "phase", state.phase, "differed from the phase", rule.phase, name)
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        log.info(differs, "level", state.level, "is below the min_level", rule.min_level, name)
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        log.info(differs, "level", state.level, "is above the max_level", rule.max_level, name)
        return False
    stages = [("did not contain stage", s) for s in rule.stage if s not in state.stage]
    stages += [("contained a not_stage", s) for s in rule.not_stage if s in state.stage]
    if stages:
        log.info("The NetState %s '%s' specified by a rule in layer %s", *stages[0], name)
    return not stages


BATCHES = (
    "data_param",
    "dense_image_data_param",
    "hdf5_data_param",
    "image_data_param",
    "memory_data_param",
    "window_data_param",
)


def divide_batches(param: NetParameter, parts: int, path: str | None = None) -> NetParameter:
    """Return a copy with batch sizes divided by `parts`; ConfigError if that leaves a rest."""
    divided = NetParameter()
    divided.CopyFrom(param)
    for layer in divided.layer:

        def share(batch: int, field: str, layer: LayerParameter = layer) -> int:
            if batch % parts:
                message = (
                    f"a batch of {batch} cannot be divided among {parts} solvers; "
                    f"give a {field} that {parts} divides, or --batch-mode per-gpu"
                )
                raise ConfigError(message, where(path, layer))
            return batch // parts

        for data in (getattr(layer, name) for name in BATCHES if layer.HasField(name)):
            if data.batch_size:
                data.batch_size = share(data.batch_size, "batch_size")
        if layer.HasField("dummy_data_param"):
            dummy = layer.dummy_data_param
            dummy.num[:] = [share(num, "num") for num in dummy.num]
            for shape in dummy.shape:
                if shape.dim and shape.dim[0] != 1:  # 1 is no batch
                    shape.dim[0] = share(shape.dim[0], "first dim")
        if layer.type == "Python" and not layer.bottom:
            log.warning(
                '--batch-mode global does not divide the batch of layer "%s" (Python), which '
                "shapes its tops itself",
                layer.name,
            )
    return divided


def with_batch(param: NetParameter, batch: int, path: str | None = None) -> NetParameter:
    """Return a copy whose data layers, or inputs, have this batch; ConfigError if none has one.

    Of DummyData and Input only the tops with as many items as the first one change.
    """
    copy = NetParameter()
    copy.CopyFrom(param)
    stated = False
    for layer in copy.layer:
        for descriptor, message in layer.ListFields():
            if descriptor.name.endswith("data_param"):
                stated |= _set_batch(message, batch)
        dummy = layer.dummy_data_param
        if dummy.num:
            dummy.num[:] = [batch if num == dummy.num[0] else num for num in dummy.num]
            stated = True
        for shapes in (dummy.shape, layer.input_param.shape):
            first = shapes[0].dim[0] if shapes and shapes[0].dim else None
            for shape in shapes:
                if shape.dim and shape.dim[0] == first:
                    shape.dim[0] = batch
                    stated = True
    if not stated:
        raise ConfigError("no data layer of the net states a batch that could be changed", path)
    return copy


def _set_batch(data: Any, batch: int) -> bool:
    """Set the batch_size of a data layer's message if it states one; return whether it does."""
    states = bool(getattr(data, "batch_size", 0))
    if states:
        data.batch_size = batch
    return states


Top = tuple[int, int]  # layer index, top index


def insert_splits(
    param: NetParameter, path: str | None = None, whole: NetParameter | None = None
) -> NetParameter:
    """Return a copy in which every top with several readers feeds a Split layer with one top a
    reader.

    A non-zero loss weight of a top counts as a reader and moves to the first top of the split.
    ConfigError for a bottom that no earlier layer has as a top; `whole` is the net before
    `filter_state`, so that the message can name a layer that was filtered out.
    """
    left_out = {top: layer.name for layer in (whole or param).layer for top in layer.top}
    producer_of, readers = _readers(param, path, left_out)
    split = NetParameter()
    split.CopyFrom(param)
    del split.layer[:]
    unread: dict[Top, list[str]] = {}  # the tops of its Split that still get a reader
    for i, layer in enumerate(param.layer):
        new = split.layer.add()
        new.CopyFrom(layer)
        for j in range(len(layer.bottom)):
            if readers[producer_of[i, j]] > 1:
                new.bottom[j] = unread[producer_of[i, j]].pop(0)
        for j, blob in enumerate(layer.top):
            if (count := readers[i, j]) > 1:
                name = f"{blob}_{layer.name}_{j}_split"
                tops = [f"{name}_{k}" for k in range(count)]
                made = split.layer.add(name=name, type="Split", bottom=[blob], top=tops)
                unread[i, j] = tops
                if j < len(layer.loss_weight) and layer.loss_weight[j]:
                    made.loss_weight.extend([layer.loss_weight[j]] + [0.0] * (count - 1))
                    del new.loss_weight[:]
                    unread[i, j] = tops[1:]
    return split


def _readers(
    param: NetParameter, path: str | None, left_out: dict[str, str]
) -> tuple[dict[tuple[int, int], Top], dict[Top, int]]:
    """Return the top behind each (layer, bottom index), and the number of readers of each top."""
    last_writer: dict[str, Top] = {}
    producer_of: dict[tuple[int, int], Top] = {}
    readers: dict[Top, int] = defaultdict(int)
    for i, layer in enumerate(param.layer):
        for j, name in enumerate(layer.bottom):
            if name not in last_writer:
                raise ConfigError(
                    f"Unknown bottom blob '{name}' (layer '{layer.name}', bottom index {j})"
                    f"{_hint(name, list(last_writer), left_out)}",
                    where(path, layer),
                )
            producer_of[i, j] = last_writer[name]
            readers[last_writer[name]] += 1
        for j, name in enumerate(layer.top):
            last_writer[name] = (i, j)
            if j < len(layer.loss_weight) and layer.loss_weight[j]:
                readers[i, j] += 1
    return producer_of, readers


def _hint(name: str, known: list[str], left_out: dict[str, str]) -> str:
    if name in left_out:
        later = "makes it, but stands later or is left out in this phase, level and stage"
        return f'; layer "{left_out[name]}" {later}'
    if not known:
        return "; no layer before it has a top"
    return nearest(name, known) or f"; blobs so far: {listed(known, name)}"
