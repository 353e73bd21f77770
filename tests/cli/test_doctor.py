import json

import pytest

from caffepy.cli import main
from caffepy.commands.doctor import MISSING, OK, WRONG, Finding, Health

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(("state", "code"), [(OK, 0), (MISSING, 0), (WRONG, 6)])
def test_the_exit_code_tells_what_is_broken(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    health = Health([Finding("CuPy", OK, "14.2.0"), Finding("cuDNN", state, "9.19.0")])
    monkeypatch.setattr("caffepy.commands.doctor.examine", lambda: health)
    assert main.run(["doctor"]) == code
    assert capsys.readouterr().out.splitlines() == [
        "CuPy   ok       14.2.0",
        f"cuDNN  {state:7}  9.19.0",
    ]
    assert main.run(["doctor", "--json"]) == code
    health = json.loads(capsys.readouterr().out)
    assert health["works"] == (code == 0)
    assert health["findings"][1] == {
        "name": "cuDNN",
        "state": state,
        "details": "9.19.0",
        "remedy": "",
    }


@pytest.mark.gpu
def test_a_machine_with_a_gpu_is_well(capsys: Captured) -> None:
    code = main.run(["doctor"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "GPU 0 self-test" in shown
    assert "agree with the CPU's" in shown
