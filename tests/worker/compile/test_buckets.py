import pytest

from worker.compile.buckets import batch_sizes, fit, split


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_batch_sizes_end_with_the_largest_batch(most, sizes):
    assert batch_sizes(most) == sizes


def test_fit_is_the_smallest_size_that_holds():
    assert [fit(n, (16, 32, 96)) for n in (1, 16, 17, 96)] == [16, 16, 32, 96]
    assert fit(97, (16, 32, 96)) is None


@pytest.mark.parametrize("n", range(20))
def test_split_uses_every_row_once(n):
    parts = split(n, (1, 2, 4, 8))

    assert sum(parts) == n
    assert list(parts) == sorted(parts, reverse=True)
    assert len(parts) <= 3 + n // 8
