import numpy as np
import pytest

from tests.ops.cuda.compare import EXACT, agree
from tests.ops.cuda.test_boxes import some_boxes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("most", [1, 30, 5000])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 4500])
def test_suppressed_overlaps(count, most):
    boxes = np.round(some_boxes(2, count, seed=count) * 500)
    kept, counts = np.zeros((2, most), np.int32), np.zeros(2, np.int32)
    agree("suppress_overlaps", boxes, 0.5, 1.0, kept, counts, tolerance=EXACT)
