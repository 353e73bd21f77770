import numpy as np

from caffepy.device.blob import Blob
from caffepy.solver import Params


def blobs() -> list[Blob]:
    made = [Blob((2, 3)), Blob(()), Blob((0, 4)), Blob((5,))]
    for i, blob in enumerate(made):
        blob.data[...] = i + 1
        blob.diff[...] = -i
    return made


def test_blobs_keep_their_values_and_become_views() -> None:
    own = blobs()
    params = Params(own)
    assert params.segments == [(0, 6), (16, 1), (32, 0), (32, 5)]
    assert params.ends.tolist() == [16, 32, 32, 48]
    assert params.data[params.data != 0].tolist() == [1] * 6 + [2] + [4] * 5
    assert params.diff[params.diff != 0].tolist() == [-1] + [-3] * 5
    params.data[:] = 7
    own[0].diff[1, 2] = 9
    assert own[3].data.tolist() == [7] * 5
    assert params.diff[5] == 9


def test_sharing_blobs_follow() -> None:
    owner, sharer = Blob((4,)), Blob((2, 2))
    sharer.share_data(owner)
    params = Params([owner])
    params.data[:4] = [1, 2, 3, 4]
    assert sharer.data.tolist() == [[1, 2], [3, 4]]


def test_split_gives_views_in_the_blobs_shapes() -> None:
    params = Params(blobs())
    flat = np.arange(48.0)
    parts = params.split(flat)
    assert [p.shape for p in parts] == [(2, 3), (), (0, 4), (5,)]
    assert all(np.shares_memory(p, flat) for p in parts if p.size)


def test_no_blobs_still_give_one_element() -> None:
    assert Params([]).data.shape == Params([]).diff.shape == (1,)


def test_views_of_all_but_some_blobs_are_as_few_as_can_be() -> None:
    params = Params([Blob((20,)), Blob((3,)), Blob((16,)), Blob((16,))])
    params.diff[...] = np.arange(params.diff.size)
    parts = [part.tolist() for part in params.without([0, 2])]
    assert parts == [[*range(20, 48)], [*range(64, 80)]]
    assert [part.size for part in params.without([])] == [params.diff.size]
    assert [part.size for part in params.without([3, 2])] == [48]
    params.without([1])[0].fill(-1)
    assert (params.diff < 0).sum() == 32
