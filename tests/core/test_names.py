from pathlib import Path

import pytest

from caffepy.core import names
from caffepy.core.errors import reason
from caffepy.core.names import FEW, listed, nearest

MANY = [f"conv{i}_{j}" for i in range(10, 20) for j in range(10)]


def test_a_few_names_are_listed_in_their_order() -> None:
    assert listed(["data", "conv1", "fc8"], "fc9") == "data, conv1, fc8"


def test_of_many_names_the_nearest_come_first() -> None:
    first, *others = listed(MANY, "conf17_3").split(", ")
    assert first == "conv17_3"
    assert others[-1].endswith(f" and {len(MANY) - FEW} more")
    assert len(others) == FEW - 1


@pytest.mark.parametrize(
    ("name", "known", "suggested"),
    [
        ("Convolutoin", ["Concat", "Convolution"], "Convolution"),
        ("CONCAT", ["Concat", "Convolution"], "Concat"),
        ("max-itr", ["max_iter", "momentum"], "max_iter"),
        ("conv", ["convolution_param", "name"], "convolution_param"),
        ("zzz", ["Concat", "Convolution"], ""),
        ("zzz", [], ""),
    ],
)
def test_nearest(name: str, known: list[str], suggested: str) -> None:
    assert nearest(name, known) == (f', did you mean "{suggested}"?' if suggested else "")


def test_a_missing_file_is_told_with_the_one_whose_name_is_nearest(tmp_path: Path) -> None:
    def told(name: str) -> str:
        with pytest.raises(FileNotFoundError) as caught:
            (tmp_path / name).open()
        return reason(caught.value)

    (tmp_path / "train.log").touch()
    assert told("trian.log") == 'no such file or directory, did you mean "train.log"?'
    assert told("other.log") == "no such file or directory", "only the extension is alike"
    assert told("gone/train.log") == "no such file or directory"
    (tmp_path / "link.log").symlink_to("gone")
    assert told("link.log") == "no such file or directory", "not the link itself"
    for i in range(names.MANY):
        (tmp_path / f"{i}.log").touch()
    assert told("trian.log") == "no such file or directory", "there are too many to compare"
