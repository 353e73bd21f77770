import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.solver.cases import ENVIRONMENT

NET = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 } } }'
BUILD = 'caffe.Net("net.prototxt", caffe.TEST)\n'


def lines(folder: Path, script: str, **variables: str) -> list[str]:
    """The messages that a script writes to stderr, with the letters of their levels."""
    (folder / "net.prototxt").write_text(NET)
    environment = {key: value for key, value in ENVIRONMENT.items() if not key.startswith("GLOG_")}
    done = subprocess.run(
        [sys.executable, "-c", "import logging\nimport caffepy as caffe\n" + script],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        " ".join(found)
        for found in re.findall(r"^([IWEF])\d{4} [\d:.]+ +\d+ [^]]+\] (.*)$", done.stderr, re.M)
    ]


def test_nothing_is_shown_unasked(tmp_path: Path) -> None:
    assert lines(tmp_path, "caffe.log('hidden')\n" + BUILD) == []


def test_init_log_shows_lines_from_a_level_on(tmp_path: Path) -> None:
    shown = lines(tmp_path, "caffe.init_log()\ncaffe.log('Using devices [0, 1]')\n" + BUILD)
    assert shown[0] == "I Using devices [0, 1]"
    assert "I Network initialization done." in shown
    say = "caffe.log('no')\nlogging.getLogger('caffepy').warning('yes')\n"
    assert lines(tmp_path, "caffe.init_log(1)\n" + say) == ["W yes"]
    assert lines(tmp_path, "caffe.init_log(0)\ncaffe.init_log(2)\n" + say) == []
    assert lines(tmp_path, "caffe.init_log()\n" + say, GLOG_minloglevel="1") == ["W yes"]


def test_the_environment_shows_lines_of_nets(tmp_path: Path) -> None:
    assert "I Network initialization done." in lines(tmp_path, BUILD + BUILD, GLOG_minloglevel="0")
    assert lines(tmp_path, BUILD, GLOG_minloglevel="2") == []
    chosen = "logging.getLogger('caffepy').setLevel(logging.ERROR)\n"
    assert lines(tmp_path, chosen + BUILD, GLOG_minloglevel="0") == []


def test_scripts_written_for_caffe_show_what_caffe_shows(tmp_path: Path) -> None:
    assert "I Network initialization done." in lines(tmp_path, BUILD, CAFFEPY_AS_CAFFE="1")
    assert lines(tmp_path, BUILD, CAFFEPY_AS_CAFFE="1", GLOG_minloglevel="2") == []
    assert lines(tmp_path, BUILD, CAFFEPY_AS_CAFFE="0") == []


def test_lines_may_go_to_a_file(tmp_path: Path) -> None:
    assert (
        lines(tmp_path, "caffe.init_log(0, False)\ncaffe.log('kept')", GLOG_log_dir=str(tmp_path))
        == []
    )
    assert "] kept" in (tmp_path / "caffepy.INFO").read_text()


@pytest.mark.parametrize("level", ["7", "-1"])
def test_levels_are_checked(level: str, tmp_path: Path) -> None:
    script = f"try:\n    caffe.init_log({level})\nexcept RuntimeError as error:\n    caffe.init_log(); caffe.log(str(error))"
    (said,) = lines(tmp_path, script)
    assert (
        said
        == f"I a log level is 0 (all), 1 (warnings and errors), 2 (errors) or 3 (none), not '{level}'"
    )
