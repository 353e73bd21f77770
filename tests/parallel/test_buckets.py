from caffepy.net import Net
from caffepy.parallel.buckets import LEAST, Bucket, Progress, adders, buckets
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import parse

MIB = LEAST // 4  # elements


def alone(*layers: int) -> list[frozenset[int]]:
    return [frozenset([layer]) for layer in layers]


def test_ranges_of_about_equal_size_with_the_last_part_first() -> None:
    ends = [3 * MIB, 4 * MIB, 6 * MIB, 12 * MIB]
    assert buckets(ends, alone(1, 1, 4, 6), 4) == [
        Bucket(6 * MIB, 12 * MIB, frozenset([6])),
        Bucket(3 * MIB, 6 * MIB, frozenset([1, 4])),
        Bucket(0, 3 * MIB, frozenset([1])),
    ]


def test_every_element_is_in_one_bucket() -> None:
    ends = [16, 32, 5 * MIB, 5 * MIB + 16, 9 * MIB, 9 * MIB + 160]
    for count in (0, 1, 2, 6, 100):
        found = buckets(ends, alone(0, 0, 2, 2, 3, 3), count)
        assert [bucket.stop for bucket in found] == [ends[-1], *(bucket.start for bucket in found[:-1])]
        assert found[-1].start == 0
        assert all(bucket.stop - bucket.start >= MIB for bucket in found[:-1])


def test_the_last_bucket_is_small_if_another_can_take_the_rest() -> None:
    first = MIB // 8
    assert buckets([first, 2 * first, 4 * MIB, 8 * MIB], alone(0, 1, 2, 3), 2) == [
        Bucket(4 * MIB, 8 * MIB, frozenset([3])),
        Bucket(2 * first, 4 * MIB, frozenset([2])),
        Bucket(0, 2 * first, frozenset([0, 1])),
    ]
    assert buckets([first, MIB, 8 * MIB], alone(0, 1, 2), 2) == [
        Bucket(MIB, 8 * MIB, frozenset([2])),
        Bucket(0, MIB, frozenset([0, 1])),
    ]


def test_small_nets_have_one_bucket_and_nets_without_parameters_none() -> None:
    assert buckets([16, 48], alone(1, 2)) == [Bucket(0, 48, frozenset([1, 2]))]
    assert buckets([1], []) == []


def test_a_bucket_is_complete_after_all_its_layers_and_all_buckets_before_it() -> None:
    first, second, third = Bucket(20, 30, frozenset([5, 2])), Bucket(10, 20, frozenset([4])), Bucket(0, 10, frozenset())
    progress = Progress([first, second, third])
    for _ in range(2):
        assert progress.after(5) == []
        assert progress.after(4) == []
        assert progress.after(2) == [first, second, third]
        assert progress.rest() == []
    assert progress.after(4) == []
    assert progress.rest() == [first, second, third]


def test_layers_that_share_a_parameter_all_add_to_it() -> None:
    text = """
    layer { name: "data" type: "DummyData" top: "a" dummy_data_param { shape { dim: 2 dim: 3 } } }
    layer { name: "one" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" } inner_product_param
            { num_output: 3 weight_filler { type: "xavier" } } }
    layer { name: "two" type: "InnerProduct" bottom: "b" top: "c" param { name: "w" } inner_product_param
            { num_output: 3 weight_filler { type: "xavier" } } }
    layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "a" top: "loss" }
    """
    net = Net(parse(text, NetParameter(), "net.prototxt"))
    try:
        index = {name: i for i, name in enumerate(net.layer_names)}
        one, two = index["one"], index["two"]
        assert adders(net) == [{one, two}, {one}, {two}]
    finally:
        net.close()
