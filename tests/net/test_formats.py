"""In which format the blobs of a net lie on a GPU."""

import numpy as np
import pytest

from caffepy.blob import PLAIN, Format
from caffepy.net.formats import plan

from .nets import net_of

HALF = Format(np.dtype(np.float16), True)
WIDE = Format(np.dtype(np.float32), True)
DATA = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }\n'


def conv(name: str, bottom: str, extra: str = "") -> str:
    return f"""layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" {extra}
  convolution_param {{ num_output: 2 kernel_size: 1 }} }}\n"""


def test_a_layer_of_forward_type_float_keeps_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.layer.convolution.Convolution.format_for", lambda self, native: native)
    net = net_of(DATA + conv("a", "data") + conv("b", "a", "forward_type: FLOAT") + conv("c", "b"))
    formats = plan(net.layers, net.bottoms, net.tops, HALF)
    assert formats.bottoms == [[], [HALF], [WIDE], [HALF]]
    assert formats.tops == [[PLAIN], [HALF], [WIDE], [HALF]]
    in_float32 = plan(net.layers, net.bottoms, net.tops, WIDE)
    assert in_float32.tops == [[PLAIN], [WIDE], [WIDE], [WIDE]]
