"""pycaffe's NetSpec: nets in Python, `n.conv1 = L.Convolution(n.data, num_output=20, ...)`."""

from collections import Counter
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    ValuesView,
)
from typing import Any

import numpy as np
from google.protobuf.message import Message

from caffepy.core.names import nearest
from caffepy.proto import caffe_pb2
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter


def param_name_dict() -> dict[str, str]:
    """Map layer types to the LayerParameter fields of their parameters, without `_param`.

    Of several fields of one message the first is Caffe's; the others are those of forks.
    """
    found: dict[str, str] = {}
    for field in LayerParameter.DESCRIPTOR.fields:
        if field.name.endswith("_param") and field.message_type:
            kind = field.message_type.name.removesuffix("Parameter")
            found.setdefault(kind, field.name.removesuffix("_param"))
    return found


_param_names = param_name_dict()


def assign_proto(proto: Message, name: str, val: Any) -> None:
    """Set a field of a message from Python's values.

    A dict (or a message) becomes a message, a list a repeated field; a single value for a repeated
    field counts as a list of one. AttributeError for an unknown field suggests the nearest name;
    TypeError and ValueError name the field of a wrong value.
    """
    fields = proto.DESCRIPTOR.fields_by_name
    if name not in fields:
        raise AttributeError(
            f'{proto.DESCRIPTOR.name} has no field "{name}"{nearest(name, fields)}'
        )
    field, kind = getattr(proto, name), fields[name].message_type
    try:
        if fields[name].default_value != []:  # not repeated; protobuf 5 has no is_repeated
            _fill(field, val) if kind else setattr(proto, name, val)
            return
        for item in val if isinstance(val, (list, tuple, np.ndarray)) else [val]:
            _fill(field.add(), item) if kind else field.append(item)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{proto.DESCRIPTOR.name}.{name}: {error}") from None


def _fill(message: Message, val: Message | Mapping[str, Any]) -> None:
    message.SetInParent()
    if isinstance(val, Message):
        message.CopyFrom(val)
        return
    if not isinstance(val, Mapping):
        raise TypeError(f"a dict of fields is needed, not {val!r}")
    for key, value in val.items():
        assign_proto(message, key, value)


class Top:
    """Output number `n` of a layer, `fn`."""

    def __init__(self, fn: "Function", n: int) -> None:
        self.fn = fn
        self.n = n

    def to_proto(self) -> NetParameter:
        """Return the net that computes this output; layers are named by type and number."""
        return to_proto(self)

    def _to_proto(self, made: "Made", names: "Names", counts: Counter[str]) -> None:
        self.fn._to_proto(made, names, counts)


class Function:
    """A layer to be built: type, inputs, parameters, and outputs, `tops`. TypeError if an input is
    no Top.
    """

    def __init__(self, type_name: str, inputs: Iterable[Top], params: Mapping[str, Any]) -> None:
        self.type_name = type_name
        self.inputs = tuple(inputs)
        for i, top in enumerate(self.inputs):
            if not isinstance(top, Top):
                raise TypeError(f"{type_name} input {i} is not a Top (type is {type(top)})")
        self.params = dict(params)
        self.ntop: int = self.params.pop("ntop", 1)
        self.in_place: bool = self.params.pop("in_place", False)
        self.tops = tuple(Top(self, n) for n in range(self.ntop))

    def to_proto(self) -> NetParameter:
        """Return the net that ends in this layer; layers are named by type and number."""
        return to_proto(self)

    @property
    def fn(self) -> "Function":
        """Itself, as for a Top."""
        return self

    def _to_proto(self, made: "Made", names: "Names", counts: Counter[str]) -> None:
        """Add the layers that this one needs to `made`, each after those of its inputs, and itself.

        What has no name yet gets one in `names`, of type and number by `counts`.
        """
        needed = [self]
        while needed:
            fn = needed[-1]
            missing = [top.fn for top in fn.inputs if top.fn not in made]
            if missing:
                needed += reversed(missing)
                continue
            needed.pop()
            if fn not in made:
                bottoms = [made[top.fn].top[top.n] for top in fn.inputs]
                tops = bottoms if fn.in_place else [_name(top, names, counts) for top in fn.tops]
                named = fn if fn in names or not fn.tops else fn.tops[0]
                name = _name(named, names, counts)
                layer = LayerParameter(type=fn.type_name, bottom=bottoms, top=tops, name=name)
                fn._assign(layer)
                made[fn] = layer

    def _assign(self, layer: LayerParameter) -> None:
        """Set the layer's fields: first those of its type's parameters, then those of all types."""
        name, common = f"{_param_names.get(self.type_name)}_param", layer.DESCRIPTOR.fields_by_name
        kind = common[name].message_type if name in common else None
        own = kind.fields_by_name if kind else {}
        for key, value in self.params.items():
            if key in own and not key.endswith("param"):
                assign_proto(getattr(layer, name), key, value)
            elif own and key not in common:
                suggestion = nearest(key, [*own, *common])
                raise AttributeError(f'{self.type_name} has no parameter "{key}"{suggestion}')
            else:
                assign_proto(layer, key, value)


Made = MutableMapping[Function, LayerParameter]
Names = MutableMapping[Top | Function, str]


def _name(top: Top | Function, names: Names, counts: Counter[str]) -> str:
    if top not in names:
        kind = top.fn.type_name
        counts[kind] += 1
        names[top] = f"{kind}{counts[kind]}"
    return names[top]


def _net(ends: Iterable[Top | Function], given: Mapping[Top | Function, str]) -> NetParameter:
    """Return the layers that these need; layers and tops have the given names, else type and
    number.
    """
    made: Made = {}
    names, counts = dict(given), Counter[str]()
    for end in ends:
        end._to_proto(made, names, counts)
    return NetParameter(layer=made.values())


def to_proto(*tops: Top | Function) -> NetParameter:
    """Return the net that computes these outputs; layers are named by type and number."""
    return _net(tops, {})


class NetSpec:
    """A net in the making: tops, and their layers, under the names that they are assigned to.

    Names are attributes or items, and layers come in that order, unless others need them before: `n
    = NetSpec(); n.data = L.Input(...); n["ip/1"] = L.InnerProduct(n.data, num_output=10);
    n.to_proto()`.
    """

    tops: "dict[str, Top | Function]"

    def __init__(self) -> None:
        super().__setattr__("tops", {})

    def __setattr__(self, name: str, value: Any) -> None:
        self.tops[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tops" or name not in self.tops:
            known = () if name == "tops" else self.tops
            raise AttributeError(f'the net has no top "{name}"{nearest(name, known)}')
        return self.tops[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.tops]

    def __delattr__(self, name: str) -> None:
        del self.tops[name]

    __setitem__, __delitem__ = __setattr__, __delattr__

    def __getitem__(self, name: str) -> Any:
        return self.tops[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tops

    def __iter__(self) -> Iterator[str]:
        return iter(self.tops)

    def __len__(self) -> int:
        return len(self.tops)

    def keys(self) -> "KeysView[str]":
        """The names."""
        return self.tops.keys()

    def vals(self) -> "ValuesView[Top | Function]":
        """The tops."""
        return self.tops.values()

    def items(self) -> "ItemsView[str, Top | Function]":
        """Names and tops."""
        return self.tops.items()

    def update(self, name: str, params: Mapping[str, Any]) -> None:
        """Set more parameters of the layer that makes this top."""
        self.tops[name].fn.params.update(params)

    def to_proto(self) -> NetParameter:
        """Return the net; TypeError for a name that is not assigned to one top."""
        for name, top in self.tops.items():
            if not isinstance(top, (Top, Function)):
                raise TypeError(
                    f"{name} is not a Top (type is {type(top)}); a layer with several has a name "
                    "for each"
                )
        return _net(self.tops.values(), {top: name for name, top in self.tops.items()})


class Layers:
    """`layers.Type(*bottoms, **params)` is a layer's top, its `ntop` tops, or itself if `ntop=0`.

    `in_place=True` gives tops the names of bottoms. Parameters whose names end in "param" are
    fields of LayerParameter, others belong to the layer type's own parameters or else to
    LayerParameter (`name`, `loss_weight`, `include`, ...).
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def layer(*bottoms: Top, **params: Any) -> Any:
            fn = Function(name, bottoms, params)
            if fn.ntop == 0:
                return fn
            return fn.tops[0] if fn.ntop == 1 else fn.tops

        layer.__name__ = name
        return layer


class Parameters:
    """`params.Pooling.MAX` is the number of an enum's value in PoolingParameter."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(caffe_pb2, f"{name}Parameter", None)
        if found is None:
            suffix = "Parameter"
            known = [key.removesuffix(suffix) for key in vars(caffe_pb2) if key.endswith(suffix)]
            raise AttributeError(f'there are no parameters "{name}"{nearest(name, known)}')
        return found

    def __dir__(self) -> list[str]:
        return sorted(_param_names)


layers = Layers()
params = Parameters()
