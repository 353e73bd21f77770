"""Old formats made new: V0 and V1 layers, data settings, inputs, BatchNorm's params, the solver's
type.

Each `upgrade_*` takes a message, leaves it as it is, and returns the upgraded one (of a net, the
same object if it is new already). Log lines are Caffe's. What Caffe aborts on is a ConfigError;
what it only warns of is a logged error.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from caffepy.core.errors import ConfigError
from caffepy.core.names import nearest
from caffepy.proto.alignment import align_crop
from caffepy.proto.caffe_pb2 import (
    BlobShape,
    ConvolutionParameter,
    LayerParameter,
    LossParameter,
    NetParameter,
    ParamSpec,
    Pooling3DParameter,
    PoolingParameter,
    SolverParameter,
    V0LayerParameter,
    V1LayerParameter,
)

log = logging.getLogger(__name__)

_SPELLED = {
    "NONE": "",
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BN": "BN",
    "BNLL": "BNLL",
    "CONVOLUTION3D": "Convolution3D",
    "DECONVOLUTION3D": "Deconvolution3D",
    "DENSE_CRF": "DenseCRF",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "LRN": "LRN",
    "MVN": "MVN",
    "POOLING3D": "Pooling3D",
    "RELU": "ReLU",
    "RELU6": "ReLU6",
    "ROIPOOLING": "ROIPooling",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
    "VOXEL_SOFTMAX": "Softmax",
    "VOXEL_SOFTMAX_LOSS": "SoftmaxWithLoss",
}
V1_TYPES = {
    name: _SPELLED.get(name, "".join(map(str.capitalize, name.split("_"))))
    for name in V1LayerParameter.LayerType.DESCRIPTOR.values_by_name
}
"""Layer types: the names of V1's enum, and the strings that took their place."""

_SAME = (
    "accuracy bnll concat data dropout euclidean_loss flatten hdf5_data hdf5_output im2col "
    "infogain_loss lrn multinomial_logistic_loss relu sigmoid softmax softmax_loss split tanh "
    "window_data"
)
V0_TYPES = {name: name.upper() for name in _SAME.split()} | {
    "conv": "CONVOLUTION",
    "images": "IMAGE_DATA",
    "innerproduct": "INNER_PRODUCT",
    "pool": "POOLING",
}
"""Layer types of V0, and their names in V1's enum."""

_CONV, _POOL = {"conv": "convolution_param"}, {"pool": "pooling_param"}
_IP = {"innerproduct": "inner_product_param"}
_DATA, _IMAGES = {"data": "data_param"}, {"images": "image_data_param"}
_HDF5, _WINDOWS = {"hdf5_data": "hdf5_data_param"}, {"window_data": "window_data_param"}
_FILES = _DATA | _HDF5 | _IMAGES | _WINDOWS
_LRN = {"lrn": "lrn_param"}
_V0_FIELDS = {
    "num_output": ("num_output", _CONV | _IP),
    "biasterm": ("bias_term", _CONV | _IP),
    "weight_filler": ("weight_filler", _CONV | _IP),
    "bias_filler": ("bias_filler", _CONV | _IP),
    "pad": ("pad", _CONV | _POOL),
    "kernelsize": ("kernel_size", _CONV | _POOL),
    "group": ("group", _CONV),
    "stride": ("stride", _CONV | _POOL),
    "pool": ("pool", _POOL),
    "dropout_ratio": ("dropout_ratio", {"dropout": "dropout_param"}),
    "local_size": ("local_size", _LRN),
    "alpha": ("alpha", _LRN),
    "beta": ("beta", _LRN),
    "k": ("k", _LRN),
    "source": ("source", _FILES | {"infogain_loss": "infogain_loss_param"}),
    "batchsize": ("batch_size", _FILES),
    "rand_skip": ("rand_skip", _DATA | _IMAGES),
    "shuffle_images": ("shuffle", _IMAGES),
    "new_height": ("new_height", _IMAGES),
    "new_width": ("new_width", _IMAGES),
    "concat_dim": ("concat_dim", {"concat": "concat_param"}),
    "det_fg_threshold": ("fg_threshold", _WINDOWS),
    "det_bg_threshold": ("bg_threshold", _WINDOWS),
    "det_fg_fraction": ("fg_fraction", _WINDOWS),
    "det_context_pad": ("context_pad", _WINDOWS),
    "det_crop_mode": ("crop_mode", _WINDOWS),
}
"""V0 field: its new name, and the V0 types that have it with the message into which it moves."""

_TRANSFORMS = ("scale", "mean_file", "crop_size", "mirror")  # V0 has them without "_"
_DATA_PARAMS = {
    V1LayerParameter.DATA: "data_param",
    V1LayerParameter.IMAGE_DATA: "image_data_param",
    V1LayerParameter.WINDOW_DATA: "window_data_param",
    V1LayerParameter.VIDEO_DATA: "image_data_param",
    V1LayerParameter.VIDEO_SEGMENTATION_DATA: "image_data_param",
    V1LayerParameter.VIDEO_WITH_VOXEL_TRUTH_DATA: "image_data_param",
}

_VOLUMES = {
    "Convolution3D": ("convolution_param", "convolution3d_param"),
    "Deconvolution3D": ("convolution_param", "convolution3d_param"),
    "Pooling3D": ("pooling_param", "pooling3d_param"),
    "VideoData": ("image_data_param", "video_data_param"),
}
"""Types of C3D, and where the settings of their V1 layers are and belong."""

_OF_VOLUMES = {
    PoolingParameter.MAX: Pooling3DParameter.MAX,
    PoolingParameter.AVE: Pooling3DParameter.AVE,
}

HOLES = ("hole", "hole_h", "hole_w")
"""DeepLab's first names of dilation."""

_SOLVER_TYPES = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
    "SAG": "SAG",
}


def needs_upgrade(net: NetParameter) -> bool:
    """True if the net has `layers`, inputs outside of a layer, old BatchNorm or AutoCrop layers, or
    layers that have another type or other fields here.
    """
    named = any(
        _other_type(layer) or _holed(layer) or layer.HasField("softmaxloss_param")
        for layer in net.layer
    )
    old = _old_batch_norms(net) or _auto_crops(net) or named
    return bool(net.layers or net.input or old)


def _other_type(layer: LayerParameter) -> str | None:
    """Return the type that a layer of Synopsys' Caffe, of video-caffe or of hierarchical bilinear
    pooling has by its settings here, None for its own.
    """
    if layer.type == "ReLU" and layer.relu_param.relu6:
        return "ReLU6"
    if layer.type == "Reshape" and layer.reshape_param.pixelshuffler != 1:
        return "DepthToSpace"
    if layer.type == "SumPooling":
        return "Pooling"
    if layer.type in ("NdConvolution", "HoleConvolution"):
        return "Convolution"
    if layer.type == "NdPooling":
        return "Pooling3D" if len(layer.pooling_param.kernel_shape.dim) == 3 else "Pooling"
    if layer.type == "Pooling" and (axes := _axes(layer.pooling_param)) > 1:
        return "Pooling3D" if axes == 3 else "Pooling"
    return None


_SIDES = ("kernel_size", "stride", "pad")


def _axes(param: PoolingParameter) -> int:
    """Number of axes for which R-C3D's layer gives a size of its own; 1 for Caffe's."""
    return 1 + max(len(getattr(param, f"further_{name}")) for name in _SIDES)


def _take_further(param: PoolingParameter) -> None:
    """Move the sizes along all axes of R-C3D's layer to video-caffe's fields."""
    axes = _axes(param)
    for name in _SIDES:
        sizes = [getattr(param, name), *getattr(param, f"further_{name}")]
        if axes > 1 and param.HasField(name):
            shape = getattr(param, f"{name.removesuffix('_size')}_shape")
            shape.dim.extend(sizes * axes if len(sizes) == 1 else sizes)
            param.ClearField(name)
            param.ClearField(f"further_{name}")


def _become(layer: LayerParameter, other: str) -> None:
    """Make of the layer one of the other type."""
    kind, layer.type = layer.type, other
    if kind == "SumPooling":
        layer.pooling_param.CopyFrom(layer.sum_pooling_param)
        layer.ClearField("sum_pooling_param")
    _take_further(layer.pooling_param)
    if other == "ReLU6":
        layer.relu6_param.negative_slope = layer.relu_param.negative_slope
        layer.ClearField("relu_param")
    elif other == "Convolution":
        _take_shapes(layer.convolution_param)
    elif other == "Pooling":
        _take_sides(layer.pooling_param, layer.pooling_param, "hw")
    elif other == "Pooling3D":
        given = layer.pooling_param
        if given.pool not in _OF_VOLUMES:
            raise ConfigError(f'layer "{layer.name}" ({kind}): volumes take MAX and AVE alone')
        layer.pooling3d_param.pool = _OF_VOLUMES[given.pool]
        layer.pooling3d_param.global_pooling = given.global_pooling
        _take_sides(given, layer.pooling3d_param, "lhw")
        layer.ClearField("pooling_param")
    else:
        layer.depth_to_space_param.block_size = layer.reshape_param.pixelshuffler
        layer.depth_to_space_param.data_format = "CRD"
        layer.ClearField("reshape_param")


def _auto_crops(net: NetParameter) -> list[int]:
    """The numbers of the layers that find the place of their crop by themselves, as V1's do."""
    return [i for i, layer in enumerate(net.layer) if layer.type == "AutoCrop"]


def _old_batch_norms(net: NetParameter) -> list[LayerParameter]:
    """The BatchNorm layers with the three params that its statistics once needed."""
    return [layer for layer in net.layer if layer.type == "BatchNorm" and len(layer.param) == 3]


def _take_shapes(param: ConvolutionParameter) -> None:
    """Move the sizes along all axes of video-caffe's layer to Caffe's fields."""
    for name in ("kernel_size", "stride", "pad"):
        shape = f"{name.removesuffix('_size')}_shape"
        getattr(param, name).extend(getattr(param, shape).dim)
        param.ClearField(shape)


def _take_sides(
    given: PoolingParameter, taken: PoolingParameter | Pooling3DParameter, axes: str
) -> None:
    """Move the sizes along these axes of video-caffe's layer to fields for each."""
    for name in ("kernel", "stride", "pad"):
        sizes = list(getattr(given, f"{name}_shape").dim)
        given.ClearField(f"{name}_shape")
        if sizes and len(sizes) != len(axes):
            raise ConfigError(f"{name}_shape needs {len(axes)} dims, not {len(sizes)}")
        for axis, size in zip(axes, sizes, strict=False):
            setattr(taken, f"{name}_{axis}", size)


def _holed(layer: LayerParameter) -> bool:
    """True for a layer with DeepLab's first name of dilation."""
    return any(layer.convolution_param.HasField(name) for name in HOLES)


def _fill_holes(param: ConvolutionParameter) -> None:
    """Write DeepLab's holes as dilation."""
    both = param.hole if param.HasField("hole") else 1
    sizes = [
        getattr(param, name) if param.HasField(name) else both for name in ("hole_h", "hole_w")
    ]
    param.dilation.extend(sizes if sizes[0] != sizes[1] else sizes[:1])
    for name in HOLES:
        param.ClearField(name)


def _take_ignored_label(layer: LayerParameter) -> None:
    """Move the label that DeepLab's loss ignores to Caffe's field; both average over the others."""
    ignored = layer.softmaxloss_param.ignore_label
    if len(ignored) > 1:
        raise ConfigError(
            f'layer "{layer.name}" ({layer.type}): softmaxloss_param has {len(ignored)} '
            "ignore_label; caffepy ignores one"
        )
    for label in ignored:
        layer.loss_param.ignore_label = label
    layer.ClearField("softmaxloss_param")


def misplaced_fields(net: NetParameter) -> list[str]:
    """Settings of V0 layers that layers of their types do not have; the upgrade leaves them out."""
    return [
        f'{field} of layer "{layer.layer.name}" ({layer.layer.type})'
        for layer in net.layers
        for field, (_, homes) in _V0_FIELDS.items()
        if layer.layer.HasField(field) and layer.layer.type not in (*homes, "padding")
    ]


def upgrade_net(net: NetParameter, path: str | None) -> NetParameter:
    """The net in today's format; `path` is its file, if any, for the log and for errors."""
    if not needs_upgrade(net):
        return net
    try:
        upgraded = NetParameter()
        upgraded.CopyFrom(net)
        if any(layer.HasField("layer") for layer in net.layers):
            _upgrading("deprecated V0LayerParameter", path)
            upgraded, sound = _upgrade_v0(upgraded)
            if sound:
                _upgraded("V0LayerParameter")
            else:
                log.error(
                    "Warning: had one or more problems upgrading V0NetParameter to NetParameter "
                    "(see above); continuing anyway."
                )
            log.warning(
                "Note that future Caffe releases will not support V0NetParameter; use "
                "./build/tools/upgrade_net_proto_text for prototxt and "
                "./build/tools/upgrade_net_proto_binary for model weights upgrade this and any "
                "other net protos to the new format."
            )
        misplaced = [(layer, *found) for layer in upgraded.layers for found in _transforms(layer)]
        if misplaced:
            _upgrading("deprecated transformation parameters", path)
            for layer, param, field in misplaced:
                setattr(layer.transform_param, field, getattr(param, field))
                param.ClearField(field)
            _upgraded("data transformation parameters.")
            _note("transform_param messages for transformation fields.")
        if upgraded.layers:
            _upgrading("deprecated V1LayerParameter", path)
            _upgrade_v1(upgraded)
            _upgraded("V1LayerParameter")
        if upgraded.input:
            _upgrading("deprecated input fields", path)
            _upgrade_input(upgraded)
            _upgraded("input fields.")
            _note("input layers and not input fields.")
        if crops := _auto_crops(upgraded):
            log.info(
                "Attempting to upgrade AutoCrop layers to Crop layers: %s", path or "(no file)"
            )
            for number in crops:
                upgraded.layer[number].type = "Crop"
                align_crop(upgraded.layer, number)
            log.info("Successfully upgraded AutoCrop layers.")
        for new in upgraded.layer:
            if _holed(new):
                _fill_holes(new.convolution_param)
            if new.HasField("softmaxloss_param"):
                _take_ignored_label(new)
            if other := _other_type(new):
                log.info('Layer "%s" (%s) becomes %s', new.name, new.type, other)
                _become(new, other)
        if old := _old_batch_norms(upgraded):
            what = "batch norm layers using deprecated params"
            log.info("Attempting to upgrade %s: %s", what, path or "(no file)")
            for spec in (spec for layer in old for spec in layer.param):
                spec.lr_mult = spec.decay_mult = 0
            log.info("Successfully upgraded %s.", what)
    except ConfigError as error:
        raise (error.at(path) if path else error) from None
    return upgraded


def upgrade_solver(solver: SolverParameter, path: str) -> SolverParameter:
    """The solver, and the nets inside it, in today's format, with a snapshot prefix.

    A missing `snapshot_prefix` is `path` without its extension; one that names a folder gets the
    stem of `path`.
    """
    upgraded = upgrade_solver_fields(solver, path)
    try:
        _set_snapshot_prefix(upgraded, path)
    except UnicodeEncodeError:
        raise ConfigError(
            "no snapshot_prefix can be made of this file's name, which is not UTF-8; set one", path
        ) from None
    return upgraded


def upgrade_solver_fields(solver: SolverParameter, path: str) -> SolverParameter:
    """A copy of the solver with its type and the nets inside it in today's format."""
    upgraded = SolverParameter()
    upgraded.CopyFrom(solver)
    if solver.HasField("solver_type"):
        _upgrading("deprecated 'solver_type' field (enum)'", path)
        if solver.HasField("type"):
            raise ConfigError('give either "type" or the old "solver_type", not both', path)
        upgraded.type = _SOLVER_TYPES[SolverParameter.SolverType.Name(solver.solver_type)]
        upgraded.ClearField("solver_type")
        _upgraded("'solver_type' field (enum) to 'type' field (string).")
        _note("'type' field (string) for a solver's type.")
    for field in ("net_param", "train_net_param"):
        if solver.HasField(field):
            getattr(upgraded, field).CopyFrom(upgrade_net(getattr(solver, field), path))
    for test_net, old in zip(upgraded.test_net_param, solver.test_net_param, strict=True):
        test_net.CopyFrom(upgrade_net(old, path))
    return upgraded


def _set_snapshot_prefix(solver: SolverParameter, path: str) -> None:
    stem = os.path.splitext(path)[0]
    if not solver.HasField("snapshot_prefix"):
        solver.snapshot_prefix = stem
        log.info("snapshot_prefix was not specified and is set to %s", solver.snapshot_prefix)
    elif os.path.isdir(solver.snapshot_prefix):
        solver.snapshot_prefix = os.path.join(solver.snapshot_prefix, os.path.basename(stem))
        log.info("snapshot_prefix was a directory and is replaced to %s", solver.snapshot_prefix)


def _upgrading(what: str, path: str | None) -> None:
    log.info("Attempting to upgrade input file specified using %s: %s", what, path or "(no file)")


def _upgraded(what: str) -> None:
    log.info("Successfully upgraded file specified using deprecated %s", what)


def _note(what: str) -> None:
    log.warning("Note that future Caffe releases will only support %s", what)


def _upgrade_v0(net: NetParameter) -> tuple[NetParameter, bool]:
    """The net with V1 layers, and whether every field found its place."""
    upgraded = NetParameter(input=net.input, input_dim=net.input_dim)
    for field in ("name", "force_backward"):
        if net.HasField(field):
            setattr(upgraded, field, getattr(net, field))
    sound = [_upgrade_v0_layer(layer, upgraded.layers.add()) for layer in _without_padding(net)]
    return upgraded, all(sound)


def _without_padding(net: NetParameter) -> list[V1LayerParameter]:
    """The V0 layers, those of type "padding" folded into the conv or pool that reads them."""
    kept: list[V1LayerParameter] = []
    source: dict[str, V1LayerParameter | None] = dict.fromkeys(net.input)
    for layer in net.layers:
        padded = V1LayerParameter()
        padded.CopyFrom(layer)
        for i, bottom in enumerate(layer.bottom):
            if bottom not in source:
                raise ConfigError(f'unknown bottom blob "{bottom}" of layer "{layer.layer.name}"')
            padding = source[bottom]
            if padding is not None and padding.layer.type == "padding":
                name, pads = layer.layer.name, f'padding layer "{padding.layer.name}"'
                if layer.layer.type not in ("conv", "pool"):
                    raise ConfigError(
                        f'{pads} leads to layer "{name}" ({layer.layer.type}), '
                        "but only conv and pool can pad"
                    )
                if not len(layer.bottom) == len(padding.bottom) == len(padding.top) == 1:
                    raise ConfigError(
                        f'{pads} and layer "{name}" behind it must have one bottom each'
                    )
                padded.layer.pad = padding.layer.pad
                padded.bottom[i] = padding.bottom[0]
        if layer.layer.type != "padding":
            kept.append(padded)
        source.update(dict.fromkeys(layer.top, layer))
    return kept


def _upgrade_v0_layer(old: V1LayerParameter, new: V1LayerParameter) -> bool:
    if not old.HasField("layer"):
        new.CopyFrom(old)
        return True
    v0 = old.layer
    new.bottom.extend(old.bottom)
    new.top.extend(old.top)
    new.blobs.extend(v0.blobs)
    new.blobs_lr.extend(v0.blobs_lr)
    new.weight_decay.extend(v0.weight_decay)
    if v0.HasField("name"):
        new.name = v0.name
    if v0.HasField("type"):
        if v0.type not in V0_TYPES:
            hint = nearest(v0.type, sorted(V0_TYPES))
            raise ConfigError(f'layer "{v0.name}": unknown V0 layer type "{v0.type}"{hint}')
        new.type = getattr(V1LayerParameter, V0_TYPES[v0.type])
    for field in _TRANSFORMS:
        if v0.HasField(old_name := field.replace("_", "")):
            setattr(new.transform_param, field, getattr(v0, old_name))
    moved = [_move_v0_field(v0, new, field) for field in _V0_FIELDS if v0.HasField(field)]
    if v0.HasField("hdf5_output_param"):
        moved.append(v0.type == "hdf5_output" or _placeless(v0, "hdf5_output_param"))
        if moved[-1]:
            new.hdf5_output_param.CopyFrom(v0.hdf5_output_param)
    return all(moved)


def _move_v0_field(v0: V0LayerParameter, new: V1LayerParameter, field: str) -> bool:
    renamed, homes = _V0_FIELDS[field]
    home = homes.get(v0.type)
    if home is None:
        return _placeless(v0, field)
    target, value = getattr(new, home), getattr(v0, field)
    if isinstance(value, (int, float, str)):
        if home == "convolution_param" and field in ("pad", "kernelsize", "stride"):
            getattr(target, renamed).append(value)
        else:
            setattr(target, renamed, value)
    else:
        getattr(target, renamed).CopyFrom(value)
    return True


def _placeless(v0: V0LayerParameter, field: str) -> bool:
    log.error("Unknown parameter %s for layer type %s", field, v0.type)
    return False


def _transforms(layer: V1LayerParameter) -> Iterator[tuple[Message, str]]:
    """The settings of a data layer that belong to transform_param: where they are, their names."""
    if layer.type in _DATA_PARAMS:
        param = getattr(layer, _DATA_PARAMS[layer.type])
        yield from ((param, field) for field in _TRANSFORMS if param.HasField(field))


MIXED = 'the net has both old "layers" and new "layer" entries; use "layer" for all of them'
"""What is wrong with such a net."""


def _upgrade_v1(net: NetParameter) -> None:
    if net.layer:
        raise ConfigError(MIXED)
    for old in net.layers:
        upgrade_layer(old, net.layer.add())
    for i, old in enumerate(net.layers):
        if old.type == V1LayerParameter.CROP:
            align_crop(net.layer, i)
    net.ClearField("layers")


def upgrade_layer(old: V1LayerParameter, new: LayerParameter) -> None:
    """Write a V1 layer into an empty LayerParameter."""
    for field in old.DESCRIPTOR.fields:
        name = field.name
        if name in ("layer", "type", "param", "blob_share_mode", "blobs_lr", "weight_decay"):
            continue
        value = getattr(old, name)
        if field.default_value == []:
            getattr(new, name).extend(value)
        elif old.HasField(name):
            if field.message_type is None:
                setattr(new, name, value)
            else:
                getattr(new, name).CopyFrom(value)
    if old.HasField("type"):
        new.type = V1_TYPES[V1LayerParameter.LayerType.Name(old.type)]
        _upgrade_volumes(old.type, new)
    specs: dict[str, Sequence[Any]] = {
        "name": old.param,
        "share_mode": old.blob_share_mode,  # the two enums have the same numbers
        "lr_mult": old.blobs_lr,
        "decay_mult": old.weight_decay,
    }
    new.param.extend(ParamSpec() for _ in range(max(map(len, specs.values()))))
    for name, values in specs.items():
        for spec, value in zip(new.param, values, strict=False):
            setattr(spec, name, value)


def _upgrade_volumes(old: int, layer: LayerParameter) -> None:
    """Move the settings of a V1 layer of C3D to where its type has them today."""
    if old == V1LayerParameter.VOXEL_SOFTMAX_LOSS:
        layer.loss_param.normalization = LossParameter.FULL
    if layer.type not in _VOLUMES:
        return
    source, target = _VOLUMES[layer.type]
    given, moved = getattr(layer, source), getattr(layer, target)
    for field, value in given.ListFields():
        name = field.name
        if source == "image_data_param" and name == "mean_value":
            layer.transform_param.mean_value.append(value)
            continue
        known = moved.DESCRIPTOR.fields_by_name.get(name)
        several = field.message_type is None and field.default_value == []
        if known is None or (several and len(value) > 1):
            raise ConfigError(
                f'layer "{layer.name}" ({layer.type}): C3D has no {source} with this {name}'
            )
        if known.message_type is None:
            kind = bool if known.type == known.TYPE_BOOL else type(known.default_value)
            setattr(moved, name, kind(value[0] if several else value))
        else:
            getattr(moved, name).CopyFrom(value)
    layer.ClearField(source)


def _upgrade_input(net: NetParameter) -> None:
    shapes = list(net.input_shape)
    if not shapes and net.input_dim:
        if len(net.input_dim) != 4 * len(net.input):
            need = f"{len(net.input)} inputs need {4 * len(net.input)} input_dim entries"
            raise ConfigError(f"{need}, not {len(net.input_dim)}")
        shapes = [BlobShape(dim=net.input_dim[i : i + 4]) for i in range(0, len(net.input_dim), 4)]
    if shapes:
        if len(shapes) != len(net.input):
            need = f"{len(net.input)} inputs need as many input_shape entries"
            raise ConfigError(f"{need}, not {len(shapes)}")
        layer = LayerParameter(name="input", type="Input", top=net.input)
        layer.input_param.shape.extend(shapes)
        net.layer.insert(0, layer)
    for field in ("input", "input_dim", "input_shape"):
        net.ClearField(field)
