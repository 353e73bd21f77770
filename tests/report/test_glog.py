import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from caffepy.core.errors import ConfigError, UsageError
from caffepy.report import logging_to
from caffepy.report.glog import Formatter

log = logging.getLogger("caffepy.somewhere")
LINE = re.compile(r"([IWEF])(\d{4}) \d\d:\d\d:\d\d\.\d{6} ([ \d]{5,}) test_glog\.py:\d+\] (.*)")


def test_one_line_has_severity_date_time_thread_place_and_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with logging_to():
        log.info("one %d", 1)
        log.warning("two")
        log.error("three")
        log.critical("four")
    found = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    assert [f and (f[1], f[4]) for f in found] == [
        ("I", "one 1"),
        ("W", "two"),
        ("E", "three"),
        ("F", "four"),
    ]
    assert {f and f[3] for f in found} == {f"{threading.get_native_id():5d}"}


def test_further_lines_of_a_message_have_no_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to():
        log.info("parameters: \n%s", 'name: "digits"\nlayer {')
    assert capsys.readouterr().err.splitlines()[1:] == ['name: "digits"', "layer {"]


def test_microseconds_are_six_digits_and_the_place_has_no_blank() -> None:
    record = logging.LogRecord("caffepy", logging.INFO, "/a/my layer.py", 7, "m", (), None)
    record.created = 1_000_000_000.000007
    assert re.search(r"\d\d\.00000[67] +\d+ my_layer\.py:7\] m$", Formatter().format(record))


def test_levels_below_the_least_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(level=logging.WARNING):
        log.info("unseen")
        log.warning("seen")
    assert "unseen" not in (err := capsys.readouterr().err)
    assert "seen" in err


def test_the_logger_is_left_as_it_was() -> None:
    logger = logging.getLogger("caffepy")
    before = logger.level, logger.propagate, list(logger.handlers)
    with logging_to(level=logging.DEBUG):
        pass
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_a_log_file_has_glogs_name_header_and_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(stderr=False, log_dir=str(tmp_path / "logs")):
        log.info("hello")
    link = tmp_path / "logs" / "caffepy.INFO"
    name = os.readlink(link)
    assert re.fullmatch(rf"caffepy\.\S+\.\S+\.log\.INFO\.\d{{8}}-\d{{6}}\.{os.getpid()}", name)
    created, machine, form, line = link.read_text().splitlines()
    assert re.fullmatch(r"Log file created at: \d{4}/\d\d/\d\d \d\d:\d\d:\d\d", created)
    assert machine.startswith("Running on machine: ")
    assert form == "Log line format: [IWEF]mmdd hh:mm:ss.uuuuuu threadid file:line] msg"
    assert line.endswith("hello")
    assert capsys.readouterr().err == ""


def test_the_file_tells_what_ended_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), logging_to(stderr=False, log_dir=str(tmp_path)):
        raise ConfigError("too many axes", "net.prototxt:3:1")
    assert re.search(
        r"\nF\d{4} .* test_glog.py:\d+\] net.prototxt:3:1: too many axes\n", _text(tmp_path)
    )
    assert "Traceback" not in _text(tmp_path)


def test_the_file_keeps_the_traceback_of_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), logging_to(stderr=False, log_dir=str(tmp_path)):
        _ = 1 / 0
    assert "Traceback" in _text(tmp_path)


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot write log files"),
        logging_to(log_dir=str(tmp_path / "file")),
    ):
        pass


def _text(folder: Path) -> str:
    return (folder / "caffepy.INFO").read_text()


def test_the_log_file_has_the_lines_in_the_order_of_stderr_whatever_threads_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(log_dir=str(tmp_path)), ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: [log.info("line %d", i) for i in range(300)])
    (link,) = tmp_path.glob("*.INFO")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1200
    assert link.read_text().endswith(shown)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_run_goes_on_without_a_log_file_whose_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        logging.FileHandler, "_open", lambda _: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    )
    with logging_to(log_dir=str(tmp_path)):
        for i in range(3):
            log.info("line %d", i)
    told = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    path = r".*/caffepy\..*\.log\.INFO\..*"
    warned = f"The log file {path} cannot be written: no space left on device; the log goes on"
    assert sorted(told)[1:] == ["line 0", "line 1", "line 2"]
    assert re.fullmatch(f"{warned} without it", sorted(told)[0])
