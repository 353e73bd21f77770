"""Streams of random 32-bit numbers as Caffe's layers draw them, with a state that can be saved."""

from ctypes import c_uint32
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.device.device import Device
from caffepy.proto.caffe_pb2 import TransformationParameter

Array = NDArray[Any]

# of the generator's state; in numpy's memory the position follows. Reading them there is 100 times
# as fast as numpy's own way
WORDS = 624


class Twister:
    """A Mersenne twister."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.MT19937()
        seeded: Any = np.random.RandomState(seed % 2**32)  # seeds a twister as Caffe does
        self._generator.state = seeded.get_state(legacy=False)
        address = self._generator.ctypes.state_address
        self._words: Array = np.ctypeslib.as_array((c_uint32 * (WORDS + 1)).from_address(address))

    def draw(self, count: int) -> Array:
        """The next `count` numbers."""
        return np.asarray(self._generator.random_raw(count))

    def state(self) -> dict[str, Any]:
        """The position of the stream."""
        return {"twister": self._words[:WORDS].copy(), "twister_position": int(self._words[WORDS])}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a `state`; one without a stream changes nothing."""
        if "twister" in state:
            key = np.asarray(state["twister"], np.uint32)
            position = int(state["twister_position"])
            self._generator.state = {
                "bit_generator": "MT19937",
                "state": {"key": key, "pos": position},
            }


def new_twister(param: TransformationParameter, device: Device) -> Twister:
    """A stream seeded by transform_param's random_seed or, without one, by the device's."""
    return Twister(param.random_seed if param.random_seed >= 0 else device.draw_seed())
