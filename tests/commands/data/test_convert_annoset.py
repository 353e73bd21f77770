"""convert-annoset: records with boxes of VOC's, COCO's and plain annotations, and what is wrong
with an annotation.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from caffepy.commands.data.convert_annoset import AnnotatedRecipe, convert_annoset
from caffepy.commands.data.convert_imageset import Converted
from caffepy.core.errors import CaffeError, DataError
from caffepy.data.datum import decode_annotated
from caffepy.data.sources import open_database
from caffepy.proto.caffe_pb2 import AnnotatedDatum

XML = """<?xml version="1.0"?>
<annotation>
  <size><width>20</width><height>10</height><depth>3</depth></size>
  <object>
    <name>dog</name><pose>Left</pose><difficult>1</difficult>
    <bndbox><xmin>2</xmin><ymin>1</ymin><xmax>12</xmax><ymax>9</ymax></bndbox>
  </object>
  <object>
    <name>cat</name>
    <bndbox><xmax>20</xmax><xmin>0</xmin><ymin>0.5</ymin><ymax>10</ymax></bndbox>
  </object>
  <object>
    <name>dog</name>
    <bndbox><xmin>4</xmin><ymin>4</ymin><xmax>8</xmax><ymax>6</ymax></bndbox>
  </object>
</annotation>
"""
LABELS = "".join(
    f'item {{ name: "{name}" label: {i} display_name: "{name}" }}\n'
    for i, name in enumerate(["none_of_the_above", "cat", "dog"])
)
ROWS = [  # by label: label, instance, box, difficult
    [2, 0, 0.1, 0.1, 0.6, 0.9, 1],
    [2, 1, 0.2, 0.4, 0.4, 0.6, 0],
    [1, 0, 0, 0.05, 1, 1, 0],
]


@pytest.fixture
def voc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as of PASCAL VOC, with two images; the second has no annotation."""
    monkeypatch.chdir(tmp_path)
    for folder in ("JPEGImages", "Annotations"):
        (tmp_path / "voc" / folder).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        image = rng.integers(0, 256, (10, 20, 3), np.uint8)
        cv2.imwrite(f"voc/JPEGImages/{name}.jpg", image)
    Path("voc/Annotations/a.xml").write_text(XML)
    Path("labels.prototxt").write_text(LABELS)
    Path("names.txt").write_text("a\nb\n")
    Path("pairs.txt").write_text("JPEGImages/a.jpg Annotations/a.xml\n")
    return tmp_path


def convert(listed: str = "pairs.txt", **options: Any) -> Converted:
    options = {"anno_type": "detection", "label_map": "labels.prototxt", **options}
    return convert_annoset("voc", listed, "db", **options)


def records() -> list[tuple[bytes, AnnotatedDatum]]:
    source = open_database("db")
    found = [
        (bytes(key), AnnotatedDatum.FromString(bytes(value)))
        for items in source.once(9)
        for key, value in items
    ]
    source.close()
    return found


def rows(record: AnnotatedDatum) -> Any:
    return decode_annotated(record.SerializeToString()).objects


def test_a_folder_of_voc(voc: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert convert("names.txt", check=True) == Converted(2, 0)
    (key, first), (_, second) = records()
    assert key == b"00000000_JPEGImages/a.jpg"
    np.testing.assert_allclose(rows(first), ROWS, atol=1e-7)
    assert first.type == second.type == AnnotatedDatum.BBOX
    assert first.HasField("type")
    assert not second.annotation_group
    datum, image = first.datum, cv2.imread("voc/JPEGImages/a.jpg")
    assert (datum.channels, datum.height, datum.width, datum.label) == (3, 10, 20, -1)
    assert datum.data == image.transpose(2, 0, 1).tobytes()
    assert "b.xml does not exist: the image has no boxes" in caplog.text
    assert sorted(os.listdir()) == ["db", "labels.prototxt", "names.txt", "pairs.txt", "voc"]


def test_files_are_stored_as_they_are_or_resized(voc: Path) -> None:
    content = Path("voc/JPEGImages/a.jpg").read_bytes()
    sizes = {
        "as it is": (AnnotatedRecipe(encode=None), (10, 20)),
        "of a type": (AnnotatedRecipe(encode="png"), (10, 20)),
        "shorter side": (AnnotatedRecipe(encode="jpg", min_dim=15), (15, 30)),
        "longer side": (AnnotatedRecipe(encode="jpg", min_dim=15, max_dim=25), (12, 25)),
        "large enough": (AnnotatedRecipe(encode="jpg", min_dim=5), (10, 20)),
        "size": (AnnotatedRecipe(encode="jpg", width=8, height=9), (9, 8)),
        "grey": (AnnotatedRecipe(gray=True), (10, 20)),
    }
    for case, (recipe, size) in sizes.items():
        convert(recipe=recipe)
        ((_, record),) = records()
        decoded = decode_annotated(record.SerializeToString())
        assert decoded.image.shape == (1 if recipe.gray else 3, *size), case
        assert (record.datum.height, record.datum.width) == size, case
        assert (record.datum.data == content) == (case == "as it is"), case
        np.testing.assert_allclose(decoded.objects, ROWS, atol=1e-7)
        for path in Path("db").iterdir():
            path.unlink()
        Path("db").rmdir()


def test_cocos_file_of_one_image_and_a_text(voc: Path) -> None:
    boxes = [[2, 1, 10, 8], [0, 0.5, 20, 9.5], [4, 4, 4, 2]]
    found = [
        {"category_id": category, "bbox": box, "iscrowd": int(i == 0)}
        for i, (category, box) in enumerate(zip(["dog", "cat", "dog"], boxes, strict=True))
    ]
    content = {"image": {"width": 20, "height": 10}, "annotation": found}
    Path("voc/a.json").write_text(json.dumps(content))
    Path("voc/a.txt").write_text("2 2 1 12 9\n1 0 0.5 20 10\n\n2 4 4 8 6\n")
    for kind in ("json", "txt"):
        Path("list.txt").write_text(f"JPEGImages/a.jpg a.{kind}\n")
        convert("list.txt", recipe=AnnotatedRecipe(label_type=kind), check=True)
        ((_, record),) = records()
        expected = np.array(ROWS) * ([1] * 6 + [kind == "json"])  # a text says nothing of that
        np.testing.assert_allclose(rows(record), expected, atol=1e-7)
        for path in Path("db").iterdir():
            path.unlink()
        Path("db").rmdir()


INSTANCES: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "JPEGImages/a.jpg", "width": 20, "height": 10},
        {"id": 3, "file_name": "JPEGImages/b.jpg", "width": 20, "height": 10},
    ],
    "annotations": [
        {"image_id": 7, "category_id": 18, "bbox": [2, 1, 10, 8], "iscrowd": 0},
        {"image_id": 7, "category_id": 17, "bbox": [0, 0, 20, 10], "iscrowd": 1},
    ],
    "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
}


@pytest.mark.parametrize("labels", [None, "names", "ids"])
def test_instances_of_coco(labels: str | None, voc: Path) -> None:
    Path("instances.json").write_text(json.dumps(INSTANCES))
    if labels == "ids":
        Path("labels.prototxt").write_text(LABELS.replace('"cat"', '"17"').replace('"dog"', '"18"'))
    convert("instances.json", label_map=labels and "labels.prototxt")
    (_, first), (_, second) = records()
    expected = [[2, 0, 0.1, 0.1, 0.6, 0.9, 0], [1, 0, 0, 0, 1, 1, 1]]
    np.testing.assert_allclose(rows(first), expected, atol=1e-7)
    assert not second.annotation_group


def test_labels_of_a_classification(voc: Path) -> None:
    Path("list.txt").write_text("JPEGImages/a.jpg 5\n")
    convert("list.txt", anno_type="classification")
    ((_, record),) = records()
    assert record.datum.label == 5
    assert not record.HasField("type")


def test_odd_boxes_are_told_of(voc: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    odd = XML.replace("<xmax>12", "<xmax>25").replace("<xmin>4", "<xmin>9")
    Path("voc/Annotations/a.xml").write_text(odd.replace("<width>20", "<width>21"))
    convert()
    told = [message.removeprefix("voc/Annotations/a.xml ") for message in caplog.messages]
    assert told == [
        "inconsistent image width.",
        "bounding box exceeds image boundary.",
        "bounding box irregular.",
    ]


NESTED = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10 if i else "a"}">' for i in range(9))
NESTED = f"<!DOCTYPE annotation [{NESTED}]><annotation>&e8;</annotation>"
WRONG = {
    "xml": (XML.replace("</size>", ""), r"a.xml:16:3: mismatched tag"),
    "root": ("<a/>", r"a.xml:1: <a> is no <annotation>"),
    "unknown": (
        XML.replace(">cat<", ">cap<"),
        r'a.xml:9: name "cap" is not in the label map.*"cat"',
    ),
    "no name": (XML.replace("<name>cat</name>", ""), r"a.xml:8: <object> has no <name>"),
    "no box": (XML.replace("bndbox", "box", 2), r"a.xml:4: <object> has no <bndbox>"),
    "no side": (XML.replace("<xmin>2</xmin>", ""), r"a.xml:6: <bndbox> has no <xmin>"),
    "number": (XML.replace("<xmin>2<", "<xmin>two<"), r'a.xml:6: <xmin> is "two", not a number'),
    "infinite": (XML.replace("<xmin>2<", "<xmin>inf<"), r"a.xml:6: <xmin> is inf, which no float"),
    "huge": (
        XML.replace("<xmin>2<", "<xmin>1e300<"),
        r"a.xml:6: <xmin> is 1e\+300, which no float",
    ),
    "encoding": ('<?xml version="1.0" encoding="foo"?><annotation/>', r"a.xml:1: .*foo"),
    "entities": (NESTED, r"a.xml:\d+:\d+: limit on input amplification factor"),
    "size": (XML.replace("<width>20<", "<width>0<"), r"a.xml: no valid image width/height: 0 x 10"),
}
WRONG_JSON = {
    "json": ('{"annotation": [1 2]}', r"a.json:1:19: expecting ',' delimiter"),
    "empty": ("[]", r'a.json: there is no list "annotation"'),
    "box": ('{"annotation": [{"bbox": [1, 2]}]}', r"a.json: annotation 0: bbox has 2 numbers"),
    "category": (
        '{"annotation": [{"bbox": [1, 2, 3, 4]}]}',
        r"annotation 0: there is no category_id",
    ),
    "deep": ("[" * 100_000, r"a.json cannot be read: .*recursion"),
    "digits": (f'{{"annotation": [{"1" * 5000}]}}', r"a.json cannot be read: .*digits"),
    "huge": (
        f'{{"annotation": [{{"bbox": [1{"0" * 400}, 2, 3, 4]}}]}}',
        r"a number of bbox is inf, which no float holds",
    ),
    "text": (
        '{"annotation": [{"bbox": ["a", 2, 3, 4]}]}',
        r'a number of bbox is "a", not a number',
    ),
}
WRONG_COCO = {
    "images": ({}, r'instances.json: there is no list "images"'),
    "image": (
        {**INSTANCES, "annotations": [{"image_id": 1}]},
        r"instances.json: annotations\[0\]: no image 1",
    ),
    "name": ({**INSTANCES, "images": [{"id": 1}]}, r"is not COCO's: an entry lacks 'file_name'"),
    "file": (
        {**INSTANCES, "images": [{"id": 1, "file_name": "a\0b"}], "annotations": []},
        r"instances.json: image 1: no file has the name 'a\\x00b'",
    ),
    "none": ({**INSTANCES, "images": [], "annotations": []}, r"instances.json lists no images"),
    "twice": (
        {**INSTANCES, "images": [{"id": 7, "file_name": "a"}, {"id": 7, "file_name": "b"}]},
        r"instances.json: several images have the id 7",
    ),
}


def fails(listed: str, message: str, **options: Any) -> None:
    with pytest.raises(CaffeError, match=message):
        convert(listed, **options)
    assert not {"db", "db.partial"} & set(os.listdir())


def test_a_size_beyond_memory(voc: Path) -> None:
    fails("pairs.txt", "pixels cannot be resized as asked", recipe=AnnotatedRecipe(min_dim=10**7))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_xml(case: str, voc: Path) -> None:
    content, message = WRONG[case]
    Path("voc/Annotations/a.xml").write_text(content)
    fails("pairs.txt", message)


@pytest.mark.parametrize("case", WRONG_JSON)
def test_wrong_json(case: str, voc: Path) -> None:
    content, message = WRONG_JSON[case]
    Path("voc/a.json").write_text(content)
    Path("list.txt").write_text("JPEGImages/a.jpg a.json\n")
    fails("list.txt", message, recipe=AnnotatedRecipe(label_type="json"))


@pytest.mark.parametrize("case", WRONG_COCO)
def test_wrong_instances(case: str, voc: Path) -> None:
    content, message = WRONG_COCO[case]
    Path("instances.json").write_text(json.dumps(content))
    fails("instances.json", message)


def test_ids_of_categories_that_have_no_order(voc: Path) -> None:
    categories = [{"id": 1, "name": "a"}, {"id": "x", "name": "b"}]
    Path("instances.json").write_text(json.dumps({**INSTANCES, "categories": categories}))
    fails("instances.json", "is not COCO's: an entry is wrong: '<' not supp", label_map=None)


def test_wrong_lists_and_label_maps(voc: Path) -> None:
    fails("pairs.txt", "give --label-map FILE", label_map=None)
    fails("pairs.txt", 'pairs.txt:1: "Annotations/a.xml" is no label', anno_type="classification")
    Path("words.txt").write_text("JPEGImages/a.jpg Annotations/a.xml\nJPEGImages/b.jpg\n")
    Path("empty.txt").write_text("\n")
    fails("empty.txt", "empty.txt lists no images", anno_type="classification")
    Path("alone.txt").write_text("a\nb\n")
    fails(
        "alone.txt", "no labels .* of PASCAL VOC give --anno-type det", anno_type="classification"
    )
    fails("words.txt", 'words.txt:2: "JPEGImages/b.jpg" is not an image path, a blank and')
    Path("voc/a.txt").write_text("2 1 2 3\n")
    Path("list.txt").write_text("JPEGImages/a.jpg a.txt\n")
    text = AnnotatedRecipe(label_type="txt")
    fails("list.txt", "a.txt:1: 4 words, not label xmin ymin xmax ymax", recipe=text)
    for label in ("1.5", "99999999999"):
        Path("voc/a.txt").write_text(f"{label} 1 2 3 4\n")
        fails("list.txt", "a.txt:1: label .* is no whole number of 32 bits", recipe=text)
    Path("list.txt").write_text("JPEGImages/a.jpg 99999999999\n")
    fails("list.txt", 'list.txt:1: "99999999999" is no label', anno_type="classification")
    for old, new, message in (
        ('"cat"', '"dog"', 'labels.prototxt: the name "dog" has several labels'),
        ("label: 1", "label: 2", "labels.prototxt: label 2 has several names"),
    ):
        Path("labels.prototxt").write_text(LABELS.replace(old, new))
        fails("pairs.txt", message, check_label=True)


def test_names_without_a_folder_of_voc(voc: Path) -> None:
    with pytest.raises(DataError, match=r"names.txt has no annotation .* it has no Annotations"):
        convert_annoset(
            "elsewhere/", "names.txt", "db", anno_type="detection", label_map="labels.prototxt"
        )


def test_an_interrupted_run_goes_on(voc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.commands.data.convert_imageset.COMMIT_EVERY", 2)
    good, bad = (f"JPEGImages/{name}.jpg Annotations/{name}.xml\n" for name in "ab")
    Path("list.txt").write_text(good * 100 + bad)
    Path("voc/Annotations/b.xml").write_text(XML.replace("</object>", "", 1))
    with pytest.raises(DataError, match=r"b.xml:\d+:\d+: mismatched tag"):
        convert("list.txt", threads=1)
    Path("voc/Annotations/b.xml").write_text(XML)
    assert convert("list.txt", resume=True) == Converted(101, 0)
    assert len(records()) == 101
