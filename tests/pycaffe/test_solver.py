from pathlib import Path

import pytest

import caffepy as caffe
from tests.solver.cases import NET, SETTINGS


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "solver.prototxt"
    file.write_text(f'{SETTINGS} type: "AdaDelta" delta: 1e-6 net_param {{ {NET} }}')
    return str(file)


@pytest.mark.parametrize("kind", ["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_classes_ignore_the_type_of_the_file(kind: str, path: str) -> None:
    if kind in ("AdaGrad", "RMSProp"):
        Path(path).write_text(Path(path).read_text().replace("momentum: 0.9", ""))
    solver = getattr(caffe, f"{kind}Solver")(path)
    assert solver.param.type == kind
    solver.step(2)
    assert solver.iter == 2
    assert caffe.get_solver(path).param.type == "AdaDelta"


def test_lr_is_the_rate_of_the_next_iteration(path: str) -> None:
    settings = 'lr_policy: "step" gamma: 0.5 stepsize: 2'
    Path(path).write_text(Path(path).read_text().replace('lr_policy: "fixed"', settings))
    solver = caffe.SGDSolver(path)
    assert solver.lr == pytest.approx(0.1)
    solver.step(2)
    assert solver.lr == pytest.approx(0.05)
