"""StoreWatch: whether Ray's store of names, its head, answers."""

import logging
import threading
import time

from caffepy.core.errors import SyncError
from caffepy.parallel.parameter_server.ray_calls import import_ray

log = logging.getLogger(__name__)

AWAY = 40.0
"""Seconds for which a run goes on while Ray's store does not answer: one on Redis is started again.
Ray's processes end after 60 s, and the last snapshot comes from them.
"""

ANSWERS = 2.0
"""Seconds that Ray's store may take to answer, and between looks whether it does."""


class StoreWatch:
    """A watch, from `start` to `stop`, over Ray's store; `away` is the seconds since it last
    answered, 0 if it does.
    """

    def __init__(self) -> None:
        self.away = 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to watch."""
        threading.Thread(target=self._look, name="caffepy-store", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def check(self) -> None:
        """Raise SyncError if the store has not answered for so long that all will end."""
        if self.away > AWAY:
            raise SyncError(
                f"Ray's head has not answered for {AWAY:g} s: start it again, and resume from the "
                "last snapshot; with its store on Redis (RAY_REDIS_ADDRESS) it may be away for less"
            )

    def _look(self) -> None:
        ray = import_ray()
        store = ray._private.worker.global_worker.gcs_client
        while not self._stopped.is_set():
            begun = time.monotonic()
            try:
                store.internal_kv_get(b"caffepy", namespace=b"caffepy", timeout=ANSWERS)
            except ray.exceptions.RayError:
                if not self.away:
                    message = "Ray's head does not answer; the run goes on without it for %g s"
                    log.warning(message, AWAY)
                self.away += min(time.monotonic() - begun, 3 * ANSWERS)
                continue
            if self.away:
                log.info("Ray's head answers again")
            self.away = 0.0
            self._stopped.wait(ANSWERS)
