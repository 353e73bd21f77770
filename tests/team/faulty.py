"""A user's layer that goes wrong: `python_param` says how, in which rank and at which of its passes."""

import json
import os
import signal
import threading
import time


def rank() -> int:
    """The rank whose thread this is."""
    name = threading.current_thread().name
    return int(name.rsplit(" ", 1)[1]) if name.startswith("caffepy rank") else 0


class Faulty:
    """Passes its bottom on; `{"what", "rank", "at", "phase"}` in param_str say what happens, and when."""

    def setup(self, bottom, top):
        self.orders = json.loads(self.param_str)
        self.passes = 0
        if self.orders["at"] == "setup" and rank() == self.orders["rank"] and self.phase == 0:
            self.go_wrong()

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        if rank() == self.orders["rank"] and self.phase == self.orders.get("phase", 0):
            self.passes += 1
            if self.passes == self.orders["at"]:
                self.go_wrong()

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff

    def go_wrong(self):
        what = self.orders["what"]
        if what == "raise":
            raise RuntimeError("it went wrong")
        if what == "hang":
            time.sleep(60)
        if what == "deaf":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            time.sleep(60)
        if what == "twice":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            what = "SIGINT"
        os.kill(os.getpid(), getattr(signal, what))
