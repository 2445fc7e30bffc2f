import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data.store.folders import DataError
from hyperion.data.text.corpus import (
    LINE_UNITS,
    LINE_WORDS,
    LINES_LIKE_WIKITEXT2,
    SPLITS,
    VOCABULARY,
    EchoLanguage,
    TextCorpus,
    corpus_of_files,
    count_non_empty,
    count_words_with_eos,
    read_lines,
    require_counts,
)
from hyperion.data.text.ngram import bigram_baseline, unigram_baseline


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])), min_size=1))
def test_lines_come_back_as_they_were_written(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("lines") / "file"
    lines = [text + "\n" for text in texts]
    path.write_bytes("".join(lines).encode())
    assert read_lines(path) == lines


def test_counts():
    lines = [" \n", " = a title = \n", " one two \n", "\n"]
    assert count_words_with_eos(lines) == 1 + 5 + 3 + 1
    assert count_non_empty(lines) == 2


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_named_with_line_and_offset(tmp_path, encoding):
    path = tmp_path / "wiki.valid.tokens"
    path.write_bytes(b"first line\n" + " café \n".encode(encoding))
    with pytest.raises(DataError, match=r"wiki.valid.tokens is not UTF-8: byte 0x.. at offset 1\d") as caught:
        read_lines(path)
    assert f"{path}, line 2" in str(caught.value) and "UTF-8" in caught.value.next_step


@pytest.mark.parametrize(("content", "fault"), [(b"a\nb\r\n", "carriage return"), (b"cut off", "newline"), (b"", "is empty")])
def test_cut_or_converted_files_are_refused(tmp_path, content, fault):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=fault):
        read_lines(tmp_path / "file")


def test_a_file_without_a_last_newline_may_be_complete(tmp_path):
    (tmp_path / "file").write_text("one\ntwo")
    with pytest.raises(DataError, match="line 2") as refused:
        read_lines(tmp_path / "file")
    assert "add a newline" in (refused.value.next_step or "")


def test_a_corpus_of_files_takes_text_as_paths_and_names_what_is_missing(tmp_path):
    files = {split: str(tmp_path / f"{split}.txt") for split in SPLITS}
    for path in files.values():
        Path(path).write_text(f"{path}\n")
    corpus = corpus_of_files("mine", files)
    assert list(corpus.splits["test"]) == [f"{files['test']}\n"] and corpus.detail.startswith("train: train.txt")
    with pytest.raises(DataError, match=r"has the splits 'train', 'test', 'validation', expected 'train', 'valid', 'test'"):
        corpus_of_files("mine", {"train": files["train"], "test": files["test"], "validation": files["valid"]})
    with pytest.raises(DataError, match="no file for the split 'valid'") as refused:
        corpus_of_files("mine", files | {"valid": str(tmp_path / "absent")})
    assert "absent" in str(refused.value) and "correct its path" in (refused.value.next_step or "")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot read absent"):
        read_lines(tmp_path / "absent")


def test_a_wrong_count_is_named():
    with pytest.raises(DataError, match="file has 2 words, expected 3"):
        require_counts("file", (1, 2), (1, 3), ("lines", "words"), "here")


def test_the_hash_knows_the_splits():
    one = TextCorpus("n", "s", "d", {"train": ["a\n"], "valid": ["b\n"], "test": []})
    other = TextCorpus("n", "s", "d", {"train": ["a\n", "b\n"], "valid": [], "test": []})
    assert one.sha256 != other.sha256


LANGUAGE = EchoLanguage()


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return LANGUAGE.sample(40_000, seed=5)


@pytest.fixture(scope="module")
def units(lines) -> np.ndarray:
    """The text as unit numbers: ranks 0 .. 255, and 256 for the newline."""
    ranks = LANGUAGE.ranks(lines)
    return np.concatenate([ranks, np.full((len(ranks), 1), VOCABULARY)], axis=1).ravel()


def _entropy(counts: np.ndarray) -> float:
    """Plug-in entropy with the Miller-Madow correction, in nats."""
    counts = counts[counts > 0]
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum() + (len(counts) - 1) / (2 * counts.sum()))


def test_words_are_distinct_and_the_format_is_that_of_wikitext(lines):
    assert len(set(LANGUAGE.words)) == VOCABULARY and all(len(word) == 4 for word in LANGUAGE.words)
    assert all(line.startswith(" ") and line.endswith(" \n") for line in lines[:100])
    assert {len(line.split()) for line in lines} == {LINE_WORDS}
    sizes = [LINE_UNITS * count for count in LINES_LIKE_WIKITEXT2.values()]
    assert all(abs(size - like) < LINE_UNITS for size, like in zip(sizes, (2_088_628, 217_646, 245_569), strict=True))


def test_the_same_seed_gives_the_same_text():
    assert LANGUAGE.sample(50, (0, 1)) == LANGUAGE.sample(50, (0, 1)) != LANGUAGE.sample(50, (0, 2))


def test_the_rate_is_the_entropy_of_the_transition_matrix():
    q, p = LANGUAGE.probabilities, LANGUAGE.echo_probability
    transition = p * np.eye(VOCABULARY) + (1 - p) * q[None, :]
    np.testing.assert_allclose(q @ transition, q)  # q is stationary
    rate = -(q[:, None] * transition * np.log(transition)).sum()
    assert LANGUAGE.entropy_rate_nats_per_word() == pytest.approx(rate, rel=1e-12)


def test_generated_text_has_the_stated_rate(lines):
    words = LINE_WORDS * (len(lines) - 1)
    realised = LANGUAGE.true_negative_log_likelihood(lines) - LANGUAGE.true_negative_log_likelihood(lines[:1])
    assert realised / words == pytest.approx(LANGUAGE.entropy_rate_nats_per_word(), abs=0.01)


def test_the_likelihood_of_a_text_is_computed_word_by_word():
    lines = LANGUAGE.sample(3, seed=1)
    ranks, q, p = LANGUAGE.ranks(lines), LANGUAGE.probabilities, LANGUAGE.echo_probability
    total = -sum(np.log(q[rank]) for rank in ranks[0])
    for above, row in itertools.pairwise(ranks):
        total -= sum(np.log(p * (x == y) + (1 - p) * q[y]) for x, y in zip(above, row, strict=True))
    assert LANGUAGE.true_negative_log_likelihood(lines) == pytest.approx(total)


def entropy_of_a_word():
    """Return the entropy in nats of a word if no previous text is known."""
    q = LANGUAGE.probabilities
    return -(q * np.log(q)).sum()


def entropy_of_a_unit(order):
    """Return the entropy in nats of a unit given the previous order - 1 units, for an order from 1 to 16.

    Let k = order - 1. At k of the 16 positions in a line, the previous k units contain a newline, so the position of the next
    unit is known. At the other 16 - k positions, the next unit is the newline with probability 1 / (16 - k).
    """
    unknown = LINE_UNITS + 1 - order
    newline = 1 / unknown
    # Binary entropy of "is the next unit the newline?". It is 0 if the position is known.
    position = -newline * np.log(newline) - (0.0 if unknown == 1 else (1 - newline) * np.log1p(-newline))
    return entropy_of_a_word() * LINE_WORDS / LINE_UNITS + unknown / LINE_UNITS * position


def test_unigram_and_bigram_models_reach_the_stated_entropies_and_no_less(units):
    train, held_out = units[: len(units) // 2], units[len(units) // 2 :]
    for score, entropy in (
        (unigram_baseline(train, held_out, 257), entropy_of_a_unit(1)),
        (bigram_baseline(train, held_out, 257, prefix_id=256), entropy_of_a_unit(2)),
    ):
        assert score.total_nll_nats / score.tokens == pytest.approx(entropy, abs=0.02)


def test_the_floor_lies_well_below_what_short_histories_reach():
    floor = LANGUAGE.entropy_rate_nats_per_word() * 15 / 16
    assert floor <= entropy_of_a_unit(1) - 1
    assert floor <= entropy_of_a_unit(2) - 0.5
    entropies = [entropy_of_a_unit(order) for order in range(1, 17)]
    assert all(a >= b for a, b in itertools.pairwise(entropies))
    assert entropies[0] - entropies[7] < 0.05, "eight units of history tell only where the line ends"
    assert entropies[15] == pytest.approx(entropy_of_a_word() * 15 / 16)
    assert floor < entropies[15] - 2, "sixteen units do"


def test_units_tell_nothing_of_each_other_but_a_line_apart(lines):
    groups = 8  # of words: few enough cells that the estimate has no bias to speak of
    flat = LANGUAGE.ranks(lines).ravel() % groups  # without newlines a line is 15 apart

    def information(lag: int) -> float:
        joint = np.bincount(flat[:-lag] * groups + flat[lag:], minlength=groups**2).reshape(groups, groups)
        return _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - _entropy(joint)

    assert all(abs(information(lag)) < 0.001 for lag in range(1, LINE_WORDS))
    assert information(LINE_WORDS) > 0.5


def test_a_foreign_line_is_named():
    with pytest.raises(DataError, match="not in the synthetic language") as caught:
        LANGUAGE.ranks([*LANGUAGE.sample(1, 0), " some English \n"])
    assert "line 2: ' some English" in str(caught.value)


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_tiny_texts(lines):
    assert len(LANGUAGE.sample(lines, 0)) == lines
