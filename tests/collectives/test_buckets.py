from caffepy.collectives.buckets import LEAST, Bucket, Progress, buckets

MIB = LEAST // 4  # elements


def alone(*layers: int) -> list[frozenset[int]]:
    return [frozenset([layer]) for layer in layers]


def test_ranges_of_about_equal_size_with_the_last_part_first() -> None:
    ends = [3 * MIB, 4 * MIB, 6 * MIB, 12 * MIB]
    assert buckets(ends, alone(1, 1, 4, 6), 4) == [
        Bucket(((6 * MIB, 12 * MIB),), frozenset([6])),
        Bucket(((3 * MIB, 6 * MIB),), frozenset([1, 4])),
        Bucket(((0, 3 * MIB),), frozenset([1])),
    ]


def test_every_element_is_in_one_bucket() -> None:
    ends = [16, 32, 5 * MIB, 5 * MIB + 16, 9 * MIB, 9 * MIB + 160]
    for count in (0, 1, 2, 6, 100):
        found = buckets(ends, alone(0, 0, 2, 2, 3, 3), count)
        ranges = [one for bucket in found for one in bucket.ranges]
        assert len(ranges) == len(found)
        assert [stop for _, stop in ranges] == [ends[-1], *(start for start, _ in ranges[:-1])]
        assert ranges[-1][0] == 0
        assert all(stop - start >= MIB for start, stop in ranges[:-1])


def test_the_last_bucket_is_small_if_another_can_take_the_rest() -> None:
    first = MIB // 8
    assert buckets([first, 2 * first, 4 * MIB, 8 * MIB], alone(0, 1, 2, 3), 2) == [
        Bucket(((4 * MIB, 8 * MIB),), frozenset([3])),
        Bucket(((2 * first, 4 * MIB),), frozenset([2])),
        Bucket(((0, 2 * first),), frozenset([0, 1])),
    ]
    assert buckets([first, MIB, 8 * MIB], alone(0, 1, 2), 2) == [
        Bucket(((MIB, 8 * MIB),), frozenset([2])),
        Bucket(((0, MIB),), frozenset([0, 1])),
    ]


def test_small_nets_have_one_bucket_and_nets_without_parameters_none() -> None:
    assert buckets([16, 48], alone(1, 2)) == [Bucket(((0, 48),), frozenset([1, 2]))]
    assert buckets([1], []) == []


def test_a_bucket_is_complete_after_all_its_layers_and_all_buckets_before_it() -> None:
    first, second, third = (
        Bucket(((20, 30),), frozenset([5, 2])),
        Bucket(((10, 20),), frozenset([4])),
        Bucket(((0, 10),), frozenset()),
    )
    progress = Progress([first, second, third])
    for _ in range(2):
        assert progress.after(5) == []
        assert progress.after(4) == []
        assert progress.after(2) == [first, second, third]
        assert progress.rest() == []
    assert progress.after(4) == []
    assert progress.rest() == [first, second, third]


def test_segments_that_are_left_out_make_gaps() -> None:
    ends = [MIB // 4, 2 * MIB, 12 * MIB, 12 * MIB + 16, 22 * MIB, 22 * MIB + 16]
    layers = [*alone(0, 1, 2, 2, 3), frozenset[int]()]
    assert buckets(ends, layers, without={2, 4}) == [
        Bucket(
            ((MIB // 4, 2 * MIB), (12 * MIB, 12 * MIB + 16), (22 * MIB, 22 * MIB + 16)),
            frozenset([1, 2]),
        ),
        Bucket(((0, MIB // 4),), frozenset([0])),
    ]
    assert buckets(ends, layers, without={0, 2, 3, 4, 5}) == [
        Bucket(((MIB // 4, 2 * MIB),), frozenset([1]))
    ]
    assert buckets(ends, layers, without=range(6)) == []
