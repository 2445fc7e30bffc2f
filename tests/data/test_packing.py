"""Rows are counted as they are built."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data.packing import Padding, packed_windows
from hyperion.data.store.folders import DataError


@given(st.integers(2, 200), st.integers(1, 20))
def test_windows_use_each_token_once_and_the_last_one_as_a_target(count, length):
    if count <= length:
        with pytest.raises(DataError, match=f"{count} tokens do not fill a window"):
            packed_windows(count, length)
        return
    windows, left_over = packed_windows(count, length)
    assert windows * length + 1 + left_over == count and left_over < length


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.lists(st.integers(1, 12)), st.integers(1, 10))
def test_padding_is_counted_apart(sizes, more, length):
    rows = [[1] * min(size, length) + [0] * (length - size) for size in sizes + more]
    padding = Padding.of(np.array(sizes), length) + Padding.of(np.array(more, dtype=np.int64), length)
    assert padding.samples == len(rows) and padding.tokens == sum(map(sum, rows))
    assert padding.padding == sum(row.count(0) for row in rows) and padding.share == pytest.approx(1 - np.mean(rows))
    assert padding.truncated == sum(max(0, size - length) for size in sizes + more)
