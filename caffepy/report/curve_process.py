"""The far end of `CurveProcess`: it loads what is needed, waits for two names, and draws."""

import json
import sys

from caffepy.report.metrics import draw_rows, read_rows


def serve() -> None:
    """Draw one curve, from a message on stdin; answer on stdout. End if no message comes."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401 # both are loaded before they are needed

    request = sys.stdin.read()
    if not request:
        return
    metrics, curve = json.loads(request)
    try:
        draw_rows(*read_rows(metrics), curve)
        problem = ""
    except Exception as error:
        problem = str(error) or type(error).__name__
    sys.stdout.write(json.dumps(problem))
