"""A process beside the last seconds of a run: it loads matplotlib meanwhile, then draws the curve.

`curve_process` is its far end.
"""

import json
import subprocess
import sys
from contextlib import suppress

AHEAD = 3.0
"""Seconds before the expected end of a run at which the process starts."""


class CurveProcess:
    """Draws one picture when asked to; it ends with this process."""

    def __init__(self) -> None:
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from caffepy.report.curve_process import serve; serve()"
        )
        # in a session of its own, Ctrl-C in a terminal does not reach it
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def draw(self, metrics: str, curve: str) -> str | None:
        """Draw a metrics file as the picture `curve`; both are absolute. Return what was wrong, an
        empty string if nothing was, None if the process ended without an answer.
        """
        try:
            answer, _ = self._process.communicate(json.dumps([metrics, curve]))
            return str(json.loads(answer))
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with suppress(OSError, ValueError):
            self._process.communicate()
