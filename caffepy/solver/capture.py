"""Passes of a net that a GPU records while they run and then replays, so that the host has little
to do.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from caffepy.core.errors import DeviceError
from caffepy.device.cuda import CudaDevice
from caffepy.device.graphs import CudaGraph
from caffepy.net import Net
from caffepy.net.fusion import Step

log = logging.getLogger(__name__)

MOST_RECORDINGS = 20
WORTH = 4
"""Recordings of which there were more must have been replayed so many times each, else shapes
change too often.
"""


def reason_not_capturable(net: Net) -> str | None:
    """Why a net's passes cannot be recorded, if they cannot."""
    for layer in net.layers:
        if layer.is_data:
            continue
        name = f'layer "{layer.param.name}" ({layer.type})'
        if layer.on_host:
            return f"{name} computes on the host"
        if layer.always_reshape:
            return f"the shapes of {name} depend on its data"
    return None


def is_capturable(callback: object) -> bool:
    """Whether a callback says `capturable = True`: all it does is to give work to the current
    stream, if anything.
    """
    return bool(getattr(callback, "capturable", False))


@dataclass
class _Part:
    """A part of a pass: the circumstances under which it last ran without changing them, and its
    recording.
    """

    steady: Hashable = None
    recording: CudaGraph | None = None


class GraphRunner:
    """The steps of a net, run one by one, or recorded in parts and replayed: `feed`, then `perform`
    what comes next.

    A part is recorded when it ran once and nothing moved: no memory, no shape, no callback, those
    of the net or `callbacks`. `what` is how the log calls the pass.
    """

    def __init__(self, net: Net, fuse: bool, what: str, callbacks: Sequence[object] = ()) -> None:
        self.net = net
        self.what = what
        self._callbacks = callbacks
        steps: Sequence[Step] = net.steps if fuse else [Step(i) for i in range(len(net.layers))]
        self.steps = steps
        self._feeding = [step for step in steps if net.layers[step.last].is_data]
        self.computing = [step for step in steps if not net.layers[step.last].is_data]
        self._fed = [top for node in net.nodes if not node.bottoms for top in node.tops]
        self._reason_not_capturable = reason_not_capturable(net)
        self._explained = False
        self._parts: dict[str, _Part] = {}
        self._recorded = self._replayed = 0

    def can_capture(self) -> bool:
        """Whether nothing speaks against recording; if something does, the log says what, once."""
        if not self.net.device.is_cuda or self.net.debug_info:
            return False
        reason = self._reason_not_capturable
        if reason is None and not all(map(is_capturable, (*self.net_callbacks, *self._callbacks))):
            reason = "a callback does not say that it can be recorded"
        if reason is not None and not self._explained:
            self._explained = True
            log.info("%s layer by layer: %s", self.what, reason)
        return reason is None

    @property
    def net_callbacks(self) -> tuple[object, ...]:
        """Those of the net, which are called around its layers."""
        net = self.net
        return (*net.before_forward, *net.after_forward, *net.before_backward, *net.after_backward)

    @property
    def eager_steps(self) -> Sequence[Step] | None:
        """The steps, or None for each layer by itself where someone looks at each."""
        watched = self.net.debug_info or not all(map(is_capturable, self.net_callbacks))
        return None if watched else self.steps

    def forget(self) -> None:
        """Let all recordings go, whoever still refers to the pass."""
        for part in self._parts.values():
            if part.recording is not None:
                part.recording.close()
        self._parts.clear()

    def feed(self) -> None:
        """Run the data layers, and bring to the device what a user wrote on the host."""
        if self._feeding:
            self.net.forward(steps=self._feeding)
        self.net.device.flush()

    @property
    def _gpu(self) -> CudaDevice:
        device = self.net.device
        assert isinstance(device, CudaDevice)
        return device

    def perform(self, name: str, work: Callable[[], None]) -> None:
        """Do the work of a part, by replay if it can be had; needs the device's scope."""
        part = self._parts.setdefault(name, _Part())
        now = self._circumstances()
        if part.steady != now or (part.recording is None and not self._record(part, work, now)):
            if part.recording is not None:
                self._gpu.synchronize()  # it may still run
                part.recording = None
            with self._gpu.overlapping():
                work()
            part.steady = now if self._circumstances() == now else None
            return
        assert part.recording is not None
        self._replayed += 1
        part.recording.replay()

    def _circumstances(self) -> Hashable:
        """What a recording depends on."""
        shapes = (top.shape for top in self._fed)
        return (
            self._gpu.allocation_version,
            *shapes,
            *map(id, self.net_callbacks),
            *map(id, self._callbacks),
        )

    def _record(self, part: _Part, work: Callable[[], None], now: Hashable) -> bool:
        if self._recorded > MOST_RECORDINGS and self._replayed < WORTH * self._recorded:
            self._reason_not_capturable = "shapes or memory change too often"
            return False
        self._recorded += 1
        try:
            part.recording = self._gpu.capture(work)
        except DeviceError as error:
            log.warning("%s layer by layer: %s", self.what, error.message)
            self._reason_not_capturable, self._explained = error.message, True
            return False
        return self._circumstances() == now
