"""Runs a script, or a module, that was written for Caffe: `import caffe` finds caffepy in it.

    python -m caffepy.as_caffe script.py ARGUMENTS
    python -m caffepy.as_caffe -m pytest ARGUMENTS

The same, for all Python processes of an installed caffepy, does the variable CAFFEPY_AS_CAFFE=1, by
a .pth file; and from a line of a script on, `caffepy.install_as_caffe()`.
"""

import os
import runpy
import sys
from collections.abc import Sequence

from caffepy.core.caffe_alias import install_as_caffe


def main(arguments: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, with `caffe` as a name of caffepy, here and in what they
    start.
    """
    by_name = arguments[:1] == ["-m"]
    sys.argv = [*arguments[by_name:]]
    if sys.argv in (["-h"], ["--help"]):
        sys.stdout.write(str(__doc__))
        return
    if not sys.argv:
        sys.exit("usage: python -m caffepy.as_caffe SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS]")
    if not by_name and not os.path.exists(sys.argv[0]):
        sys.exit(
            f"there is no script {sys.argv[0]}; usage: python -m caffepy.as_caffe SCRIPT, or "
            f"-m MODULE"
        )
    os.environ["CAFFEPY_AS_CAFFE"] = "1"
    install_as_caffe()
    if by_name:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
