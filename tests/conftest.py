"""What all tests share: GPU tests are skipped, with the reason, where there is no GPU."""

from functools import cache

import pytest

from caffepy.device import count_gpus
from caffepy.errors import DeviceError


@cache
def gpus() -> tuple[int, str]:
    """How many GPUs there are, and why not more."""
    try:
        count = count_gpus()
    except DeviceError as error:
        return 0, str(error)
    return count, f"this machine has {count} GPU(s)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked gpu or gpus(n) that this machine cannot run."""
    marker = item.get_closest_marker("gpus")
    needed = marker.args[0] if marker else int(item.get_closest_marker("gpu") is not None)
    if needed:
        count, reason = gpus()
        if count < needed:
            pytest.skip(f"needs {needed} GPU(s): {reason}")
