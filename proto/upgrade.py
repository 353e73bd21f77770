"""Old formats made new: V0 and V1 layers, data settings, inputs, BatchNorm's params, the solver's
type.

Each `upgrade_*` takes a message, leaves it as it is, and returns the upgraded one (of a net, the
same object if it is new already). Log lines are Caffe's. What Caffe aborts on is a ConfigError;
what it only warns of is a logged error.
"""

import logging
import os

from caffepy.core.errors import ConfigError
from caffepy.core.registry import nearest
from caffepy.proto.caffe_pb2 import (
    BlobShape,
    LayerParameter,
    NetParameter,
    SolverParameter,
    V0LayerParameter,
    V1LayerParameter,
)

log = logging.getLogger(__name__)

V1_TYPES = {
    "NONE": "",
    "ABSVAL": "AbsVal",
    "ACCURACY": "Accuracy",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "CONCAT": "Concat",
    "CONTRASTIVE_LOSS": "ContrastiveLoss",
    "CONVOLUTION": "Convolution",
    "DATA": "Data",
    "DECONVOLUTION": "Deconvolution",
    "DROPOUT": "Dropout",
    "DUMMY_DATA": "DummyData",
    "ELTWISE": "Eltwise",
    "EUCLIDEAN_LOSS": "EuclideanLoss",
    "EXP": "Exp",
    "FLATTEN": "Flatten",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "HINGE_LOSS": "HingeLoss",
    "IM2COL": "Im2col",
    "IMAGE_DATA": "ImageData",
    "INFOGAIN_LOSS": "InfogainLoss",
    "INNER_PRODUCT": "InnerProduct",
    "LRN": "LRN",
    "MEMORY_DATA": "MemoryData",
    "MULTINOMIAL_LOGISTIC_LOSS": "MultinomialLogisticLoss",
    "MVN": "MVN",
    "POOLING": "Pooling",
    "POWER": "Power",
    "RELU": "ReLU",
    "SIGMOID": "Sigmoid",
    "SIGMOID_CROSS_ENTROPY_LOSS": "SigmoidCrossEntropyLoss",
    "SILENCE": "Silence",
    "SLICE": "Slice",
    "SOFTMAX": "Softmax",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "SPLIT": "Split",
    "TANH": "TanH",
    "THRESHOLD": "Threshold",
    "WINDOW_DATA": "WindowData",
}
"""Layer types: the names of V1's enum, and the strings that took their place."""

V0_TYPES = {
    "accuracy": "ACCURACY",
    "bnll": "BNLL",
    "concat": "CONCAT",
    "conv": "CONVOLUTION",
    "data": "DATA",
    "dropout": "DROPOUT",
    "euclidean_loss": "EUCLIDEAN_LOSS",
    "flatten": "FLATTEN",
    "hdf5_data": "HDF5_DATA",
    "hdf5_output": "HDF5_OUTPUT",
    "im2col": "IM2COL",
    "images": "IMAGE_DATA",
    "infogain_loss": "INFOGAIN_LOSS",
    "innerproduct": "INNER_PRODUCT",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MULTINOMIAL_LOGISTIC_LOSS",
    "pool": "POOLING",
    "relu": "RELU",
    "sigmoid": "SIGMOID",
    "softmax": "SOFTMAX",
    "softmax_loss": "SOFTMAX_LOSS",
    "split": "SPLIT",
    "tanh": "TANH",
    "window_data": "WINDOW_DATA",
}
"""Layer types of V0, and their names in V1's enum."""

_CONV, _POOL, _IP = (
    {"conv": "convolution_param"},
    {"pool": "pooling_param"},
    {"innerproduct": "inner_product_param"},
)
_DATA, _IMAGES = {"data": "data_param"}, {"images": "image_data_param"}
_HDF5, _WINDOWS = {"hdf5_data": "hdf5_data_param"}, {"window_data": "window_data_param"}
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
    "source": (
        "source",
        _DATA | _HDF5 | _IMAGES | _WINDOWS | {"infogain_loss": "infogain_loss_param"},
    ),
    "batchsize": ("batch_size", _DATA | _HDF5 | _IMAGES | _WINDOWS),
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

_V0_TRANSFORMS = {
    "scale": "scale",
    "meanfile": "mean_file",
    "cropsize": "crop_size",
    "mirror": "mirror",
}
_TRANSFORMS = ("scale", "mean_file", "crop_size", "mirror")
_DATA_PARAMS = {
    V1LayerParameter.DATA: "data_param",
    V1LayerParameter.IMAGE_DATA: "image_data_param",
    V1LayerParameter.WINDOW_DATA: "window_data_param",
}

_SOLVER_TYPES = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
    "SAG": "SAG",
}


def needs_v0_upgrade(net: NetParameter) -> bool:
    """True if some layer is a V0 layer: `layers { layer { ... } }`."""
    return any(layer.HasField("layer") for layer in net.layers)


def needs_data_upgrade(net: NetParameter) -> bool:
    """True if some V1 data layer has settings that belong to transform_param."""
    return any(
        layer.type in _DATA_PARAMS
        and any(map(getattr(layer, _DATA_PARAMS[layer.type]).HasField, _TRANSFORMS))
        for layer in net.layers
    )


def needs_v1_upgrade(net: NetParameter) -> bool:
    """True if the net has `layers`."""
    return len(net.layers) > 0


def needs_input_upgrade(net: NetParameter) -> bool:
    """True if the net has inputs outside of a layer."""
    return len(net.input) > 0


def needs_batch_norm_upgrade(net: NetParameter) -> bool:
    """True if some BatchNorm layer has the three params that its statistics once needed."""
    return any(layer.type == "BatchNorm" and len(layer.param) == 3 for layer in net.layer)


def needs_upgrade(net: NetParameter) -> bool:
    """True if any of the upgrades applies to the net."""
    return needs_v1_upgrade(net) or needs_input_upgrade(net) or needs_batch_norm_upgrade(net)


def needs_type_upgrade(solver: SolverParameter) -> bool:
    """True if the solver has its type in the old enum."""
    return solver.HasField("solver_type")


def misplaced_fields(net: NetParameter) -> list[str]:
    """Settings of V0 layers that layers of their types do not have; the upgrade leaves them out."""
    return [
        f'{field} of layer "{layer.layer.name}" ({layer.layer.type})'
        for layer in net.layers
        for field, (_, homes) in _V0_FIELDS.items()
        if layer.layer.HasField(field) and layer.layer.type not in (*homes, "padding")
    ]


def upgrade_net(net: NetParameter, path: str | None) -> NetParameter:
    """The net in today's format; `path` is the file it was read from, if any, for the log and for
    errors.
    """
    if not needs_upgrade(net):
        return net
    try:
        upgraded = _copy(net)
        if needs_v0_upgrade(upgraded):
            _upgrading("deprecated V0LayerParameter", path)
            upgraded, sound = _upgrade_v0(upgraded)
            _upgraded("V0LayerParameter", sound, "V0NetParameter to NetParameter")
        if needs_data_upgrade(upgraded):
            _upgrading("deprecated transformation parameters", path)
            _upgrade_data(upgraded)
            _upgraded("data transformation parameters.")
            log.info(
                "Note that future Caffe releases will only support transform_param messages for "
                "transformation fields."
            )
        if needs_v1_upgrade(upgraded):
            _upgrading("deprecated V1LayerParameter", path)
            _upgrade_v1(upgraded)
            _upgraded("V1LayerParameter")
        if needs_input_upgrade(upgraded):
            _upgrading("deprecated input fields", path)
            _upgrade_input(upgraded)
            _upgraded("input fields.")
            log.info(
                "Note that future Caffe releases will only support input layers and not input "
                "fields."
            )
        if needs_batch_norm_upgrade(upgraded):
            log.info(
                "Attempting to upgrade batch norm layers using deprecated params: %s",
                path or "(no file)",
            )
            _upgrade_batch_norm(upgraded)
            log.info("Successfully upgraded batch norm layers using deprecated params.")
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
    """A copy of the solver with its type and the nets inside it in today's format, and nothing else
    changed.
    """
    upgraded = SolverParameter()
    upgraded.CopyFrom(solver)
    if needs_type_upgrade(solver):
        _upgrading("deprecated 'solver_type' field (enum)'", path)
        if solver.HasField("type"):
            raise ConfigError('give either "type" or the old "solver_type", not both', path)
        upgraded.type = _SOLVER_TYPES[SolverParameter.SolverType.Name(solver.solver_type)]
        upgraded.ClearField("solver_type")
        log.info(
            "Successfully upgraded file specified using deprecated 'solver_type' field (enum) to "
            "'type' field (string)."
        )
        log.warning(
            "Note that future Caffe releases will only support 'type' field (string) for a "
            "solver's type."
        )
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


def _copy(net: NetParameter) -> NetParameter:
    copy = NetParameter()
    copy.CopyFrom(net)
    return copy


def _upgrading(what: str, path: str | None) -> None:
    log.info("Attempting to upgrade input file specified using %s: %s", what, path or "(no file)")


def _upgraded(what: str, sound: bool = True, conversion: str = "") -> None:
    if sound:
        log.info("Successfully upgraded file specified using deprecated %s", what)
    else:
        log.error(
            "Warning: had one or more problems upgrading %s (see above); continuing anyway.",
            conversion,
        )


def _upgrade_v0(net: NetParameter) -> tuple[NetParameter, bool]:
    """The net with V1 layers, and whether every field found its place."""
    upgraded = NetParameter(input=net.input, input_dim=net.input_dim)
    for field in ("name", "force_backward"):
        if net.HasField(field):
            setattr(upgraded, field, getattr(net, field))
    sound = [_upgrade_v0_layer(layer, upgraded.layers.add()) for layer in _without_padding(net)]
    return upgraded, all(sound)


def _without_padding(net: NetParameter) -> list[V1LayerParameter]:
    """The V0 layers, those of type "padding" folded into the convolution or pooling that reads
    them.
    """
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
                _check_padding(layer, padding)
                padded.layer.pad = padding.layer.pad
                padded.bottom[i] = padding.bottom[0]
        if layer.layer.type != "padding":
            kept.append(padded)
        source.update(dict.fromkeys(layer.top, layer))
    return kept


def _check_padding(layer: V1LayerParameter, padding: V1LayerParameter) -> None:
    if layer.layer.type not in ("conv", "pool"):
        raise ConfigError(
            f'padding layer "{padding.layer.name}" leads to layer "{layer.layer.name}" '
            f"({layer.layer.type}), "
            "but only conv and pool can pad"
        )
    if len(layer.bottom) != 1 or len(padding.bottom) != 1 or len(padding.top) != 1:
        raise ConfigError(
            f'padding layer "{padding.layer.name}" and layer "{layer.layer.name}" behind it must '
            "have one bottom each"
        )


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
            raise ConfigError(
                f'layer "{v0.name}": unknown V0 layer type "{v0.type}"{nearest(v0.type, V0_TYPES)}'
            )
        new.type = getattr(V1LayerParameter, V0_TYPES[v0.type])
    for field, renamed in _V0_TRANSFORMS.items():
        if v0.HasField(field):
            setattr(new.transform_param, renamed, getattr(v0, field))
    moved = [_move_v0_field(v0, new, field) for field in _V0_FIELDS if v0.HasField(field)]
    if v0.HasField("hdf5_output_param"):
        moved.append(_move_hdf5_output(v0, new))
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


def _move_hdf5_output(v0: V0LayerParameter, new: V1LayerParameter) -> bool:
    if v0.type != "hdf5_output":
        return _placeless(v0, "hdf5_output_param")
    new.hdf5_output_param.CopyFrom(v0.hdf5_output_param)
    return True


def _placeless(v0: V0LayerParameter, field: str) -> bool:
    log.error("Unknown parameter %s for layer type %s", field, v0.type)
    return False


def _upgrade_data(net: NetParameter) -> None:
    for layer in net.layers:
        if layer.type not in _DATA_PARAMS:
            continue
        param = getattr(layer, _DATA_PARAMS[layer.type])
        for field in _TRANSFORMS:
            if param.HasField(field):
                setattr(layer.transform_param, field, getattr(param, field))
                param.ClearField(field)


def _upgrade_v1(net: NetParameter) -> None:
    if net.layer:
        raise ConfigError(
            'the net has both old "layers" and new "layer" entries; use "layer" for all of them'
        )
    for old in net.layers:
        upgrade_layer(old, net.layer.add())
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
    for _ in range(
        max(len(old.param), len(old.blob_share_mode), len(old.blobs_lr), len(old.weight_decay))
    ):
        new.param.add()
    for spec, name in zip(new.param, old.param, strict=False):
        spec.name = name
    for spec, mode in zip(new.param, old.blob_share_mode, strict=False):
        spec.share_mode = mode  # type: ignore[assignment] # the two enums have the same numbers
    for spec, multiplier in zip(new.param, old.blobs_lr, strict=False):
        spec.lr_mult = multiplier
    for spec, multiplier in zip(new.param, old.weight_decay, strict=False):
        spec.decay_mult = multiplier


def _upgrade_input(net: NetParameter) -> None:
    shapes = list(net.input_shape)
    if not shapes and net.input_dim:
        if len(net.input_dim) != 4 * len(net.input):
            raise ConfigError(
                f"{len(net.input)} inputs need {4 * len(net.input)} input_dim entries, not "
                f"{len(net.input_dim)}"
            )
        shapes = [BlobShape(dim=net.input_dim[i : i + 4]) for i in range(0, len(net.input_dim), 4)]
    if shapes:
        if len(shapes) != len(net.input):
            raise ConfigError(
                f"{len(net.input)} inputs need as many input_shape entries, not {len(shapes)}"
            )
        layer = LayerParameter(name="input", type="Input", top=net.input)
        layer.input_param.shape.extend(shapes)
        net.layer.insert(0, layer)
    for field in ("input", "input_dim", "input_shape"):
        net.ClearField(field)


def _upgrade_batch_norm(net: NetParameter) -> None:
    for layer in net.layer:
        if layer.type == "BatchNorm" and len(layer.param) == 3:
            for spec in layer.param:
                spec.lr_mult = 0
                spec.decay_mult = 0
