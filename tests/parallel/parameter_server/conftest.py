"""A cluster of Ray that tests share: its start takes seconds."""

from collections.abc import Iterator

import pytest

from caffepy.parallel.parameter_server.embedded_ray import EmbeddedRay
from caffepy.parallel.parameter_server.ray_cluster import ENVIRONMENT, STORE


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of an embedded Ray with a token, that of this process's environment."""
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {
            **ENVIRONMENT,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "5" * 64,
        }.items():
            patch.setenv(key, value)
        embedded = EmbeddedRay(2, STORE)
        yield embedded.address
        embedded.close()
