from caffepy.proto import caffe_pb2, forks


def test_fields_are_foreign() -> None:
    for fork, messages in forks._FIELDS.items():
        for message, names in messages.items():
            known = caffe_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name
            assert set(names.split()) & set(known) == set(), f"{fork}: {message} has them"


def test_names_are_given_once() -> None:
    for names in [n for messages in forks._FIELDS.values() for n in messages.values()] + list(
        forks._LAYERS.values()
    ):
        assert len(names.split()) == len(set(names.split()))


def test_look_ups() -> None:
    assert (
        forks.fork_of_field("LayerParameter", "bn_param")
        == "PSPNet or SegNet or Temporal Segment Networks"
    )
    assert forks.fork_of_field("SolverParameter", "rampup_lr") == "NVCaffe"
    assert forks.fork_of_field("SolverParameter", "bn_param") is None
    assert forks.fork_of_value("MKL2017") == "Intel Caffe"
    assert forks.fork_of_value("CUDNN") is None
    assert forks.fork_of_layer("MultiBoxLoss") == "SSD"
    assert forks.fork_of_layer("Convolution") is None
