import logging
from math import exp, inf, isclose

import pytest

from caffepy.core.errors import ConfigError
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.proto.text import parse
from caffepy.solver import Solver
from caffepy.solver.check import check_param
from caffepy.solver.policy import FIELDS, advance, policies, rate


def param(policy: str, **fields: object) -> SolverParameter:
    return SolverParameter(base_lr=0.1, lr_policy=policy, **fields)  # type: ignore[arg-type]


CASES = {
    "fixed": (param("fixed"), 7, 0.1),
    "step": (param("step", gamma=0.5, stepsize=10), 35, 0.1 * 0.5**3),
    "exp": (param("exp", gamma=0.99), 20, 0.1 * 0.99**20),
    "inv": (param("inv", gamma=0.01, power=0.75), 30, 0.1 * 1.3**-0.75),
    "multistep": (param("multistep", gamma=0.1, stepvalue=[5, 9]), 5, 0.01),
    "poly": (param("poly", power=2, max_iter=100), 25, 0.1 * 0.75**2),
    "poly_beyond_max_iter": (param("poly", power=0.5, max_iter=100), 120, 0.0),
    "poly_of_negative_power_at_max_iter": (param("poly", power=-1, max_iter=100), 100, inf),
    "sigmoid": (param("sigmoid", gamma=-0.0, stepsize=10), 10, 0.05),
    "sigmoid_late": (param("sigmoid", gamma=0.2, stepsize=10), 30, 0.1 / (1 + exp(-4))),
    "sigmoid_far": (param("sigmoid", gamma=1, stepsize=100000), 0, 0.0),
    "plateau": (param("plateau", gamma=0.1, plateau_winsize=[5]), 5, 0.1),
    "poly_to_a_least_rate": (param("poly", power=2, max_iter=100, min_lr=0.02), 50, 0.04),
    "stepdecr": (param("stepdecr", gamma=0.25, stepsize=10), 25, 0.05),
    "stepdecr at its end": (param("stepdecr", gamma=0.25, stepsize=10), 70, 0),
    "smoothstep": (param("smoothstep", gamma=0.25, stepsize=10), 15, 0.0125),
    "multifixed": (param("multifixed", stagelr=[0.3, 0.2], stageiter=[5, 9]), 5, 0.3),
    "multifixed_second": (param("multifixed", stagelr=[0.3, 0.2], stageiter=[5, 9]), 6, 0.2),
    "multifixed_last": (param("multifixed", stagelr=[0.3, 0.2], stageiter=[5, 9]), 99, 0.2),
    "overflow": (param("exp", gamma=1e30), 1000, inf),
}


@pytest.mark.parametrize("case", CASES)
def test_rate_follows_the_formula(case: str) -> None:
    settings, iteration, expected = CASES[case]
    value = rate(settings, iteration, advance(settings, iteration, 0))
    assert isclose(value, expected, rel_tol=1e-6, abs_tol=1e-12), f"{case}: {value}, not {expected}"


def test_every_policy_has_a_case() -> None:
    assert {settings.lr_policy for settings, _, _ in CASES.values()} == set(policies)
    assert set(FIELDS) < set(policies)


def test_rates_are_those_of_caffes_log() -> None:
    settings = SolverParameter(base_lr=0.05, lr_policy="inv", gamma=0.001, power=0.75)
    caffe = {0: "0.05", 20: "0.0492629", 100: "0.0465506", 260: "0.0420428", 480: "0.0372626"}
    assert {i: f"{rate(settings, i, 0):.6g}" for i in caffe} == caffe


def test_multistep_moves_one_step_a_call_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    settings = param("multistep", gamma=0.1, stepvalue=[5, 5, 8])
    with caplog.at_level(logging.INFO, "caffepy"):
        steps = [0]
        for iteration in range(9):
            steps.append(advance(settings, iteration, steps[-1]))
    assert steps[1:] == [0, 0, 0, 0, 0, 1, 2, 2, 3]
    assert caplog.messages[0] == "MultiStep Status: Iteration 5, step = 1"


BAD = {
    "missing": (SolverParameter(base_lr=1), "lr_policy is missing"),
    "early": (param("stepearly"), 'does not have; "plateau" goes by the loss'),
    "unknown": (param("stepp"), 'unknown lr_policy "stepp", did you mean "step"?'),
    "gamma": (param("exp", gamma=-1), "needs a gamma of 0 or more, not -1"),
    "stepsize": (param("step", gamma=0.1), "needs a stepsize above 0; it is missing"),
    "stepsize_0": (param("sigmoid", stepsize=0), "needs a stepsize above 0; it is 0"),
    "max_iter": (param("poly", power=1), "needs a max_iter above 0; it is missing"),
    "type": (param("fixed", type="Adm"), 'unknown solver type "Adm", did you mean "Adam"?'),
    "average_loss": (param("fixed", average_loss=0), "average_loss must be 1 or more, not 0"),
    "iter_size": (param("fixed", iter_size=0), "iter_size must be 1 or more, not 0"),
    "regularization": (param("fixed", weight_decay=1, regularization_type="L3"), "(known: L1, L2)"),
    "multifixed": (param("multifixed", stagelr=[1]), "as many stagelr as stageiter, not 1 and 0"),
    "min_lr": (param("poly", power=1, max_iter=9, min_lr=1), "between 0 and base_lr, not at 1"),
    "adagrad": (
        param("fixed", type="AdaGrad", momentum=0.9),
        "momentum cannot be used with AdaGrad",
    ),
    "rmsprop": (
        param("fixed", type="RMSProp", momentum=0.9),
        "momentum cannot be used with RMSProp",
    ),
    "rms_decay": (
        param("fixed", type="RMSProp", rms_decay=1),
        "rms_decay must lie in [0, 1), not at 1",
    ),
    "adam": (
        param("fixed", type="Adam", momentum=1),
        "momentum must lie in [0, 1) for Adam, not at 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_cannot_work_are_refused(case: str) -> None:
    settings, message = BAD[case]
    with pytest.raises(ConfigError) as error:
        check_param(settings, None)
    assert message in str(error.value)


def test_forgotten_fields_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_param(SolverParameter(lr_policy="inv", gamma=1), None)
    assert caplog.messages == [
        'lr_policy "inv" reads power, which is missing and counts as 0',
        "base_lr is missing and counts as 0: nothing will be learned",
    ]


BEGINNINGS = {
    "warm-up begins": (param("fixed", warmup_iter=10, warmup_start_lr=0.02), 0, 0.02),
    "warm-up": (param("exp", gamma=0.5, warmup_iter=10, warmup_start_lr=0.02), 5, 0.06),
    "after warm-up": (param("exp", gamma=0.9, warmup_iter=10), 10, 0.1 * 0.9**10),
    "ramp-up": (param("fixed", rampup_interval=10, rampup_lr=0.02), 5, 0.02 + 0.08 / 4),
    "after ramp-up": (param("fixed", rampup_interval=10, rampup_lr=0.02), 10, 0.1),
    "least rate": (param("exp", gamma=0.5, min_lr=0.03), 50, 0.03),
    "least rate while it ramps up": (param("fixed", rampup_interval=10, min_lr=0.03), 0, 0.03),
}


@pytest.mark.parametrize("case", BEGINNINGS)
def test_rate_in_the_first_iterations(case: str) -> None:
    settings, iteration, expected = BEGINNINGS[case]
    assert rate(settings, iteration, 0) == pytest.approx(expected), case


def test_steps_wait_for_the_end_of_the_warm_up() -> None:
    settings = param("multistep", gamma=0.1, stepvalue=[2, 3], warmup_iter=5)
    steps = [0]
    for iteration in range(8):
        steps.append(advance(settings, iteration, steps[-1]))
    assert steps[1:] == [0, 0, 0, 0, 0, 1, 2, 2]


def test_settings_of_forks_without_effect_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_param(param("fixed", larc=True, momentum_policy="poly"), None)
    assert caplog.messages == ["momentum_policy, larc: of a fork of Caffe, without effect here"]


@pytest.mark.parametrize("field", ["breadth_decay", "force_decay", "prune_threshold"])
def test_decays_of_ssl_are_refused_unless_they_are_0(field):
    check_param(param("fixed", **{field: 0}), None)
    with pytest.raises(ConfigError, match=f"{field} is one of S.*, which caffepy does not have"):
        check_param(param("fixed", **{field: 0.01}), None)


WEIGHTS = """layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" %s
  inner_product_param { num_output: 1 weight_filler { type: "xavier" } } }"""
LOSS = """layer { name: "loss" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("connectivity_mode: DISCONNECTED_ELTWISE", "DISCONNECTED_ELTWISE, a field of SSL"),
        ('param { regularization_type: "L1" }', 'regularization_type "L1" of one parameter'),
    ],
)
def test_what_ssl_says_of_layers_is_refused_in_training(setting, message):
    net = parse(WEIGHTS % setting, NetParameter())
    Net(net).forward()
    with pytest.raises(ConfigError, match=message):
        Solver(param("fixed", train_net_param=net, weight_decay=0.1))


def test_a_net_without_a_loss_is_warned_of(caplog):
    for text, warnings in ((WEIGHTS % "" + LOSS, 0), (WEIGHTS % "", 1)):
        Solver(param("fixed", train_net_param=parse(text, NetParameter())))
        assert [record.levelname for record in caplog.records].count("WARNING") == warnings
    said = "no layer of the train net is a loss or has a loss_weight: nothing will be learned"
    assert said in caplog.messages


def test_a_kind_of_decay_that_is_the_solvers_says_nothing(caplog):
    setting = 'connectivity_mode: CONNECTED param { regularization_type: "L2" }'
    net = parse(WEIGHTS % setting + LOSS, NetParameter())
    Solver(param("fixed", train_net_param=net, weight_decay=0.1))
    setting = 'param { regularization_type: "L1" decay_mult: 0 }'
    net = parse(WEIGHTS % setting + LOSS, NetParameter())
    Solver(param("fixed", train_net_param=net, weight_decay=0.1))
    assert not [record for record in caplog.records if record.levelname != "INFO"]
