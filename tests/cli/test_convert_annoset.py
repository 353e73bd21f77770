"""caffepy convert-annoset passes its flags on."""

from typing import Any

import pytest

from caffepy.cli import main


def test_flags_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        "caffepy.commands.data.convert_annoset.convert_annoset",
        lambda *a, **k: given.append((a, k)),
    )
    line = "convert_annoset -anno_type=detection -label_map_file=map -label_type json -check_label"
    line += (
        " -min_dim=3 -max_dim 9 -gray -encoded -shuffle -seed 3 -resume -noprogress root list db"
    )
    assert main.run(line.split()) == 0
    assert main.run(["convert-annoset", "--encode-type", "jpg", "root", "list", "db"]) == 0
    (arguments, flags), (_, other) = given
    assert arguments == ("root", "list", "db")
    recipe = flags.pop("recipe")
    assert (recipe.gray, recipe.min_dim, recipe.max_dim, recipe.encode) == (True, 3, 9, None)
    assert recipe.label_type == "json"
    assert flags == {
        "anno_type": "detection",
        "label_map": "map",
        "check_label": True,
        "backend": "lmdb",
        "shuffle": True,
        "seed": 3,
        "check_size": False,
        "resume": True,
        "check": False,
        "threads": None,
        "progress": False,
    }
    assert (other["anno_type"], other["recipe"].encode) == ("classification", "jpg")
    assert main.run(["convert-annoset", "--resize-width", "3", "root", "list", "db"]) == 2
    assert "Give both --resize-width and --resize-height" in capsys.readouterr().err
