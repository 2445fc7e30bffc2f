import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data.faults import DataError
from hyperion.data.packing import IGNORE_INDEX, pack, pad


@given(st.integers(2, 200), st.integers(1, 20))
def test_packing_uses_each_token_once_and_targets_are_one_ahead(count, length):
    tokens = np.arange(count, dtype=np.uint16)
    if count <= length:
        with pytest.raises(DataError, match=f"{count} tokens fill no window"):
            pack(tokens, length)
        return
    packed = pack(tokens, length)
    np.testing.assert_array_equal(packed.inputs.ravel(), np.arange(packed.inputs.size))
    np.testing.assert_array_equal(packed.targets, packed.inputs + 1)
    assert packed.inputs.size + 1 + packed.left_over == count and packed.left_over < length


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(1, 10))
def test_padding_is_counted_apart_and_carries_no_loss(samples, length):
    padded = pad([np.array(sample) for sample in samples], length, padding_id=0)
    assert padded.inputs.shape == (len(samples), length)
    assert padded.tokens == (padded.inputs != 0).sum() and padded.padding == (padded.inputs == 0).sum()
    assert padded.truncated == sum(max(0, len(sample) - length) for sample in samples)
    assert padded.padding_share == padded.padding / padded.inputs.size
    for row, sample in enumerate(samples):
        kept = sample[:length]
        assert padded.inputs[row, : len(kept)].tolist() == kept
        assert padded.targets[row].tolist() == kept[1:] + [IGNORE_INDEX] * (length - len(kept) + 1)


@pytest.mark.parametrize("samples", [[], [np.array([1]), np.array([], int)]])
def test_empty_samples_are_an_error(samples):
    with pytest.raises(DataError, match="is empty"):
        pad(samples, 4, 0)
