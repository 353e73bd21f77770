import pytest

from caffepy.core.errors import ConfigError
from caffepy.core.registry import FEW, Registry, listed, nearest

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


def test_an_unknown_name_of_a_registry() -> None:
    some = Registry[int]("thing")
    some("b", "a")(1)
    with pytest.raises(ConfigError, match=r'^unknown thing "q" \(known: a, b\)$'):
        some["q"]
    many = Registry[int]("thing")
    many(*MANY)(1)
    with pytest.raises(ConfigError, match=r'^unknown thing "conv12_", did you mean "conv12_0"\?$'):
        many["conv12_"]
