"""`caffepy visualize`: the filters of a layer, or a blob after a forward pass, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from caffepy.commands.inference import find_blob, trained_net
from caffepy.commands.preprocess import PREPARATION, Preparation, load
from caffepy.commands.weights import read_weights
from caffepy.core.errors import ConfigError, UsageError
from caffepy.core.names import nearest
from caffepy.device.blob import Array, shape_string
from caffepy.layer.convolution import Convolution
from caffepy.proto.binary import blob_to_array
from caffepy.report import grid
from caffepy.report.text import extension_of


@dataclass(frozen=True)
class Picture:
    """The name and shape of what is drawn, and the picture's path."""

    name: str
    shape: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        return f"{self.name} ({' x '.join(map(str, self.shape))}): {self.path}"


def show_filters(weights: str, path: str, *, layer: str = "") -> Picture:
    """Draw the filters of a layer, by default of the first convolution, into the picture `path`.

    ConfigError for a layer that does not exist or has no filters.
    """
    extension_of(path, grid.FORMATS)
    filters: dict[str, Array] = {}
    others: list[str] = []
    for stored in read_weights(weights).layer:
        first = blob_to_array(stored.blobs[0]) if stored.blobs else None
        if first is not None and first.ndim == 4 and first[0, 0].size > 1:
            filters.setdefault(stored.name, first)
        elif first is not None:
            others.append(stored.name)
    name = layer or next(iter(filters), "")
    if name not in filters:
        known = f"layers with filters: {', '.join(filters)}" if filters else "no layer has filters"
        what = (
            f'"{name}" has no filters'
            if name in others
            else f'no layer "{name}"{nearest(name, filters)}'
        )
        raise ConfigError(f"{what} ({known})" if name else known, weights)
    grid.save(grid.grid(*grid.filter_tiles(filters[name])), path)
    return Picture(name, filters[name].shape, path)


def show_blob(
    model: str,
    weights: Sequence[str],
    path: str,
    *,
    blob: str = "",
    image: str = "",
    item: int = 0,
    preparation: Preparation = PREPARATION,
    gpu: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
) -> Picture:
    """Draw a blob after a forward pass, by default of the first convolution, into the file `path`.

    The net takes the prepared file `image`; without one, its own data, of whose first batch `item`
    is shown. ConfigError for a blob that does not exist.
    """
    extension_of(path, grid.FORMATS)
    with trained_net(model, weights, gpu=gpu, precision=precision, threads=threads) as net:
        tops = [node.top_names[0] for node in net.nodes if isinstance(node.layer, Convolution)]
        if not (blob or tops):
            raise UsageError("the net has no convolution: say which blob to show")
        name = blob or tops[0]
        shown = find_blob(net, name)
        if image:
            shape = net.blobs[net.inputs[0]].shape if net.inputs else ()
            if len(shape) != 4:
                needed = "needs an input for images, of shape (N, C, H, W), as deploy nets have"
                given = f"{net.inputs[0]} of {shape_string(shape)}" if net.inputs else "none"
                raise ConfigError(f"{needed}; it has {given}", model)
            transformer = preparation.transformer(net.inputs[0], shape)
            preparation.warn_of_missing(model)
            prepared = transformer.preprocess(net.inputs[0], load(image, shape[1]))
            net.blobs[net.inputs[0]].reshape((1, *shape[1:]))
            net.reshape()
            net.blobs[net.inputs[0]].host_data[...] = prepared
        elif net.inputs:
            raise UsageError(f'the net takes "{net.inputs[0]}": give an image')
        net.forward()
        net.device.check_errors()
        values = shown.host_data
        items = len(values) if values.ndim else 1
        if not 0 <= item < items:
            raise UsageError(f"item {item} is not in a batch of {items}")
        one: Array = values[item] if values.ndim else values
        grid.save(grid.grid(*grid.blob_tiles(one)), path)
        return Picture(name, one.shape, path)
