"""Boxes of images as files have them: PASCAL VOC's XML, COCO's JSON, plain text; label maps."""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

import numpy as np

from caffepy.core.errors import ConfigError, DataError, reason
from caffepy.core.files import read_regular
from caffepy.core.names import nearest
from caffepy.proto.caffe_pb2 import AnnotatedDatum, Annotation, AnnotationGroup, LabelMap
from caffepy.proto.text import read_message

log = logging.getLogger(__name__)

Labels = Mapping[str, int]  # the label of each name

LARGEST = float(np.finfo(np.float32).max)
LABELS = range(-(1 << 31), 1 << 31)
"""Labels that a record can have."""


def read_label_map(path: str, check: bool = False) -> dict[str, int]:
    """The label of each name; of several the last, or ConfigError with `check`."""
    labels: dict[str, int] = {}
    for item in read_message(path, LabelMap()).item:
        if check and item.name in labels:
            raise ConfigError(f'{path}: the name "{item.name}" has several labels')
        if check and item.label in labels.values():
            raise ConfigError(f"{path}: label {item.label} has several names")
        labels[item.name] = item.label
    return labels


def label_of(name: str, labels: Labels, where: str) -> int:
    """The label of a name; DataError for an unknown one."""
    if name not in labels:
        hint = nearest(name, labels) or f"; it has {', '.join(list(labels)[:10])}"
        raise DataError(f'{where}: name "{name}" is not in the label map{hint}')
    return labels[name]


class Objects:
    """Collects the boxes of an image (width, height in pixels), by their labels."""

    def __init__(self, name: str, size: tuple[int, int], given: tuple[int, int] | None) -> None:
        """`given` is the size in the annotation, which counts, `size` that of the image file."""
        self.name = name
        if given is None:
            log.warning("%s does not say the image's size", name)
            given = size
        for axis, stated, true in zip(("width", "height"), given, size, strict=True):
            if stated != true:
                log.warning("%s inconsistent image %s.", name, axis)
        if min(given) < 1:
            raise DataError(f"{name}: no valid image width/height: {given[0]} x {given[1]}")
        self.size = given
        self._groups: dict[int, AnnotationGroup] = {}

    def add(self, label: int, box: tuple[float, ...], difficult: bool) -> None:
        """Add a box (xmin, ymin, xmax, ymax) in pixels."""
        width, height = self.size
        xmin, ymin, xmax, ymax = box
        if not (min(xmin, xmax) >= 0 and max(xmin, xmax) <= width) or not (
            min(ymin, ymax) >= 0 and max(ymin, ymax) <= height
        ):
            log.warning("%s bounding box exceeds image boundary.", self.name)
        if xmin > xmax or ymin > ymax:
            log.warning("%s bounding box irregular.", self.name)
        group = self._groups.setdefault(label, AnnotationGroup(group_label=label))
        one = Annotation(instance_id=len(group.annotation))
        one.bbox.xmin, one.bbox.xmax = xmin / width, xmax / width
        one.bbox.ymin, one.bbox.ymax = ymin / height, ymax / height
        one.bbox.difficult = difficult
        group.annotation.append(one)

    def write(self, record: AnnotatedDatum) -> None:
        """Put them into the record."""
        record.annotation_group.extend(self._groups.values())


@dataclass
class Node:
    """An element of an XML file, with the line where it begins."""

    tag: str
    line: int
    text: str = ""
    children: "list[Node]" = field(default_factory=list)

    def find(self, path: str) -> "Node | None":
        """The first element there, such as "size/width"."""
        first, _, rest = path.partition("/")
        child = next((child for child in self.children if child.tag == first), None)
        return child.find(rest) if child and rest else child


def read_xml(path: str) -> Node:
    """The root of an XML file; DataError names the line that is wrong."""
    parser, top = expat.ParserCreate(), Node("", 0)
    parser.buffer_text = True  # many pieces of a text, as of entities, take quadratic time
    open_nodes = [top]

    def start(tag: str, attributes: Any) -> None:
        node = Node(tag, parser.CurrentLineNumber)
        open_nodes[-1].children.append(node)
        open_nodes.append(node)

    def add(text: str) -> None:
        open_nodes[-1].text += text

    parser.StartElementHandler, parser.CharacterDataHandler = start, add
    parser.EndElementHandler = lambda tag: open_nodes.pop()
    try:
        parser.Parse(_read(path), True)
    except expat.ExpatError as error:
        what = expat.errors.messages[error.code]
        raise DataError(f"{path}:{error.lineno}:{error.offset + 1}: {what}") from None
    except LookupError as error:
        raise DataError(f"{path}:1: {error}") from None
    return top.children[0]


def _read(path: str) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from None


def _number(value: Any, what: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise DataError(f"{where}: {what} is {json.dumps(value)}, not a number") from None
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST:
        raise DataError(f"{where}: {what} is {number:g}, which no float holds")
    return number


def from_xml(path: str, size: tuple[int, int], labels: Labels) -> Objects:
    """The objects of a file of PASCAL VOC or ILSVRC: name, difficult and bndbox of each.

    DataError with the line of what is missing or no number.
    """
    root = read_xml(path)
    if root.tag != "annotation":
        raise DataError(f"{path}:{root.line}: <{root.tag}> is no <annotation>")

    def value(node: Node, name: str) -> float:
        where, inner = f"{path}:{node.line}", node.find(name)
        if inner is None:
            raise DataError(f"{where}: <{node.tag}> has no <{name}>")
        return _number(inner.text.strip(), f"<{name}>", f"{path}:{inner.line}")

    given = root.find("size")
    stated = (int(value(given, "width")), int(value(given, "height"))) if given else None
    objects = Objects(path, size, stated)
    for node in root.children:
        if node.tag != "object":
            continue
        name, box, difficult = (node.find(tag) for tag in ("name", "bndbox", "difficult"))
        if name is None or box is None:
            missing = "name" if name is None else "bndbox"
            raise DataError(f"{path}:{node.line}: <object> has no <{missing}>")
        label = label_of(name.text.strip(), labels, f"{path}:{name.line}")
        corners = tuple(value(box, side) for side in ("xmin", "ymin", "xmax", "ymax"))
        objects.add(label, corners, difficult is not None and difficult.text.strip() == "1")
    return objects


def read_json(path: str) -> Any:
    """The content of a JSON file; DataError names the place that is wrong."""
    try:
        return json.loads(_read(path))
    except json.JSONDecodeError as error:
        what = f"{error.msg[:1].lower()}{error.msg[1:]}"
        raise DataError(f"{path}:{error.lineno}:{error.colno}: {what}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is no JSON text") from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of too many digits
        raise DataError(f"{path} cannot be read: {error}") from None


def _list(content: Any, key: str, where: str) -> list[Any]:
    """The list of this key; DataError if there is none."""
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise DataError(f'{where}: there is no list "{key}"')
    return found


def from_json(path: str, size: tuple[int, int], labels: Labels) -> Objects:
    """The objects of one image of COCO: {"image": {height, width}, "annotation": [{category_id,
    bbox: [x, y, width, height], iscrowd}]}, as SSD's scripts split them.
    """
    content = read_json(path)
    image = content.get("image") if isinstance(content, dict) else None
    return from_coco(path, image, _list(content, "annotation", path), size, labels)


def from_coco(
    path: str, image: Any, found: list[Any], size: tuple[int, int], labels: Labels
) -> Objects:
    """The objects that COCO's annotations `found` of an image describe.

    DataError with the index of an annotation that lacks something or has what is no number.
    """
    stated = None
    if isinstance(image, dict) and {"width", "height"} <= image.keys():
        sides = (_number(image[name], name, path) for name in ("width", "height"))
        stated = tuple(map(int, sides))
    objects = Objects(path, size, stated)  # type: ignore[arg-type]
    for i, one in enumerate(found):
        where = f"{path}: annotation {i}"
        box = _list(one, "bbox", where)
        if len(box) != 4:
            raise DataError(f"{where}: bbox has {len(box)} numbers, not 4")
        x, y, width, height = (_number(v, "a number of bbox", where) for v in box)
        if "category_id" not in one:
            raise DataError(f"{where}: there is no category_id")
        label = label_of(str(one["category_id"]), labels, where)
        corners = x, y, x + width, y + height
        objects.add(label, corners, bool(_number(one.get("iscrowd", 0), "iscrowd", where)))
    return objects


def from_text(path: str, size: tuple[int, int], labels: Labels) -> Objects:
    """The objects of a plain text: lines of label, xmin, ymin, xmax, ymax in pixels.

    DataError with the number of a line that has anything else.
    """
    objects = Objects(path, size, size)
    for number, line in enumerate(_read(path).decode(errors="replace").splitlines(), 1):
        words, where = line.split(), f"{path}:{number}"
        if not words:
            continue
        if len(words) != 5:
            raise DataError(f"{where}: {len(words)} words, not label xmin ymin xmax ymax")
        label, *box = (_number(word, "a number", where) for word in words)
        if label != int(label) or int(label) not in LABELS:
            raise DataError(f"{where}: label {label:g} is no whole number of 32 bits")
        objects.add(int(label), tuple(box), False)
    return objects


READERS = {"xml": from_xml, "json": from_json, "txt": from_text}
"""By the type of annotation file."""


class Coco:
    """COCO's instances_*.json: the images, and what is annotated in each."""

    def __init__(self, path: str, labels: Labels | None) -> None:
        """`labels` are those of categories by name or id; without them they count from 1."""
        self.path = path
        content = read_json(path)
        images, found, categories = (
            _list(content, key, path) for key in ("images", "annotations", "categories")
        )
        try:
            names = {one["id"]: str(one["name"]) for one in categories}
            self.images = {one["id"]: one for one in images}
            if len(self.images) < len(images):
                (often, _), *_ = Counter(one["id"] for one in images).most_common(1)
                raise DataError(f"{path}: several images have the id {often}")
            self.entries = [(str(one["file_name"]), key) for key, one in self.images.items()]
            self._found: dict[Any, list[Any]] = {key: [] for key in self.images}
            for name, key in self.entries:
                if "\0" in name or not name.isprintable():
                    raise DataError(f"{path}: image {key}: no file has the name {name!a}")
            if labels is None:
                self.labels = {str(key): i for i, key in enumerate(sorted(names), 1)}
            for i, one in enumerate(found):
                if one["image_id"] not in self._found:
                    raise DataError(f"{path}: annotations[{i}]: no image {one['image_id']}")
                self._found[one["image_id"]].append(one)
        except (KeyError, TypeError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
            raise DataError(f"{path} is not COCO's: an entry {what}") from None
        if not self.entries:
            raise DataError(f"{path} lists no images")
        if labels is not None:
            known = {
                str(key): labels.get(str(key), labels.get(name)) for key, name in names.items()
            }
            self.labels = {key: label for key, label in known.items() if label is not None}

    def objects(self, key: Any, size: tuple[int, int]) -> Objects:
        """The objects of the image of this id."""
        image = self.images[key]
        path = f"{self.path}: {image['file_name']}"
        return from_coco(path, image, self._found[key], size, self.labels)
