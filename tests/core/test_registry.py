import pytest

from caffepy.core.errors import ConfigError
from caffepy.core.registry import Registry

MANY = [f"conv{i}_{j}" for i in range(10, 20) for j in range(10)]


def test_an_unknown_name_of_a_registry() -> None:
    some = Registry[int]("thing")
    some("b", "a")(1)
    with pytest.raises(ConfigError, match=r'^unknown thing "q" \(known: a, b\)$'):
        some["q"]
    many = Registry[int]("thing")
    many(*MANY)(1)
    with pytest.raises(ConfigError, match=r'^unknown thing "conv12_", did you mean "conv12_0"\?$'):
        many["conv12_"]
