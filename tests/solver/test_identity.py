from google.protobuf import text_format

from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.solver.identity import difference, identity

NET = 'layer { name: "d" type: "Input" top: "x" } layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" }'
SOLVER = 'base_lr: 0.1 lr_policy: "multistep" gamma: 0.5 stepvalue: 3 stepvalue: 5 max_iter: 9 '


def of(solver: str = SOLVER, net: str = NET) -> dict[str, object]:
    return identity(
        text_format.Merge(solver, SolverParameter()), text_format.Merge(net, NetParameter())
    )


SAME = {
    "longer": (SOLVER.replace("9", "10"), NET),
    "seen_otherwise": (f"{SOLVER} display: 3 snapshot: 4", NET),
    "other_data": (SOLVER, NET.replace('"Input"', '"DummyData"')),
    "empty_state": (SOLVER, NET + 'state { phase: TRAIN level: 0 stage: "" }'),
    "test_layer": (SOLVER, NET + 'layer { name: "a" bottom: "y" include { phase: TEST } }'),
}
OTHER = {
    "rate": (SOLVER.replace("0.1", "0.2"), NET, "base_lr 0.2 instead of 0.1"),
    "steps": (SOLVER + "stepvalue: 7", NET, "stepvalue [3, 5, 7] instead of [3, 5]"),
    "policy": (
        SOLVER.replace("multistep", "exp"),
        NET,
        "lr_policy exp instead of multistep, stepvalue unset instead of [3, 5]",
    ),
    "seed": (SOLVER + "random_seed: 4", NET, "random_seed 4 instead of -1"),
    "stage": (SOLVER, NET + 'state { stage: "big" }', "another net"),
    "layer": (SOLVER, NET.replace('"ip"', '"fc"'), "another net"),
}


def test_what_makes_another_run() -> None:
    for name, (solver, net) in SAME.items():
        assert not difference(of(), of(solver, net)), name
    for name, (solver, net, told) in OTHER.items():
        assert difference(of(), of(solver, net)) == told, name
