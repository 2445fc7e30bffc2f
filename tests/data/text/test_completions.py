"""The loss falls on completions only: each of their tokens is a target once, prompts and padding never are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data import IGNORE_INDEX, DataError, Instruction, load_instructions, tokenize_completions
from hyperion.data.text.instructions import fit
from hyperion.data.text.tokenizer import train_tokenizer

ROWS = load_instructions("synthetic")
TOKENIZER = train_tokenizer(ROWS.as_corpus())
# Byte-level: every text has tokens, also one that the tokenizer was not trained on.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
INSTRUCTIONS = st.builds(Instruction, TEXTS, TEXTS | st.just(""), TEXTS)


@given(st.lists(INSTRUCTIONS, min_size=1, max_size=4))
def test_targets_are_the_completion_and_the_end_of_text_and_nothing_else(rows):
    found = tokenize_completions(rows, TOKENIZER, 400)
    assert (found.prompts_cut, found.completions_cut) == (0, 0)
    for row, inputs, targets, size in zip(rows, found.inputs, found.targets, found.sizes, strict=True):
        assert TOKENIZER.decode(inputs[:size]) == row.prompt + row.output  # the end of text is only a target
        scored = targets != IGNORE_INDEX
        assert TOKENIZER.decode(targets[scored][:-1]) == row.output and targets[scored][-1] == TOKENIZER.eos_id
        assert np.array_equal(targets[: size - 1][scored[: size - 1]], inputs[1:size][scored[: size - 1]])
        prompt = len(TOKENIZER.encode([row.prompt])[0])
        assert scored.nonzero()[0].tolist() == list(range(prompt - 1, size)), "prompt and padding are no targets"
        assert (inputs[size:] == TOKENIZER.eos_id).all()
    assert found.tokens == found.sizes.sum() and found.completion_tokens == (found.targets != IGNORE_INDEX).sum()


@given(st.lists(INSTRUCTIONS, min_size=1, max_size=4), st.integers(1, 40))
def test_rows_that_are_too_long_are_cut_and_counted_and_keep_some_of_both(rows, length):
    found = tokenize_completions(rows, TOKENIZER, length)
    whole = tokenize_completions(rows, TOKENIZER, 400)
    assert len(found.inputs) == len(rows) and found.inputs.shape[1] == length
    scored = (found.targets != IGNORE_INDEX).sum(axis=1)
    assert (scored >= 1).all() and (found.sizes >= scored).all()
    assert (found.sizes == np.minimum(whole.sizes, length)).all(), "a row that is cut fills its length"
    lost = whole.completion_tokens - found.completion_tokens
    assert (found.completions_cut > 0) == (lost > 0)
    assert (found.prompts_cut + found.completions_cut > 0) == (found.tokens < whole.tokens)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 30), st.integers(0, 1))
def test_cutting_keeps_the_prompts_end_and_the_completions_beginning(prompt, completion, limit, beginning):
    p, c = list(range(prompt)), list(range(100, 100 + completion))
    kept_p, kept_c = fit(p, c, limit, beginning)
    assert len(kept_p) + len(kept_c) == min(limit, prompt + completion) and kept_p and kept_c
    assert kept_c == c[: len(kept_c)]
    assert kept_p == p[:beginning] + p[prompt - len(kept_p) + beginning :] or kept_p == p[-len(kept_p) :]
    if len(kept_c) < completion:
        assert len(kept_p) == min(prompt, max(1, limit // 4))


def test_a_tokenizer_with_a_beginning_of_text_puts_it_first():
    from dataclasses import replace

    rows = ROWS.train[:3]
    plain, begun = (tokenize_completions(rows, TOKENIZER, 60), tokenize_completions(rows, replace(TOKENIZER, bos_id=7), 60))
    assert (begun.inputs[:, 0] == 7).all() and (begun.sizes == plain.sizes + 1).all()
    assert np.array_equal(begun.targets[:, 1:], plain.targets[:, :-1])


@pytest.mark.parametrize("rows, length", [((), 8), (ROWS.train, 0)])
def test_senseless_requests_are_refused(rows, length):
    with pytest.raises(DataError, match="at least one row"):
        tokenize_completions(rows, TOKENIZER, length)
