"""Install a line that Python runs at its start, so that CAFFEPY_AS_CAFFE=1 has an effect;
pyproject.toml cannot say that.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LINE = 'import os; os.environ.get("CAFFEPY_AS_CAFFE", "0") in ("", "0") or __import__("caffepy")\n'


class BuildWithLine(build_py):
    """Puts `caffepy_as_caffe.pth` beside the package, into wheels as well as into editable
    installations.
    """

    def run(self) -> None:
        """Build the package and write the line."""
        super().run()
        folder = (
            self.get_finalized_command("install").install_purelib
            if self.editable_mode
            else self.build_lib
        )
        Path(folder, "caffepy_as_caffe.pth").write_text(LINE)


setup(cmdclass={"build_py": BuildWithLine})
