"""The instruction rows: from each source, by record when they are wrong, and never a prompt in both splits."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data import IGNORE_INDEX, DataError, DataUnavailable, Instruction, load_instructions, tokenize_completions
from hyperion.data.store.folders import cache_root
from hyperion.data.text.instructions import COUNT, FILE, fit, published, split_by_prompt
from hyperion.data.text.tokenizer import train_tokenizer


@pytest.fixture
def rows() -> list[dict]:
    """As many records as the real file has, ten of them with a prompt that occurs twice."""
    return [
        {"instruction": f"Count to {number % (COUNT - 10)}.", "input": "", "output": f"Answer {number}."}
        for number in range(COUNT)
    ]


@pytest.fixture
def put(tmp_path, monkeypatch):
    """A function that makes a mirror whose file holds this text."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(folder))
    return lambda text: (folder / FILE).write_text(text, encoding="utf-8")


@pytest.mark.mirror
def test_the_mirror_has_the_published_rows(mirror, monkeypatch, capsys):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    found = load_instructions("mirror")
    assert (found.name, found.source, found.least_loss_nats) == ("instructions", "mirror", None)
    assert len(found.train) + len(found.held_out) == COUNT and ", official (" in found.detail
    assert not {row.prompt for row in found.train} & {row.prompt for row in found.held_out}
    assert found.train[1].prompt == (
        "### Instruction:\nEdit the following sentence for grammar.\n\n"
        "### Input:\nHe go to the park every day.\n\n### Response:\n"
    )
    assert "source = MIRROR" in capsys.readouterr().out


def test_a_row_without_input_has_no_heading_for_one():
    assert Instruction("Say hello.", "", "Hello.").prompt == "### Instruction:\nSay hello.\n\n### Response:\n"


def test_rows_that_are_not_the_published_ones_are_said_to_be_others(put, rows):
    put(json.dumps(rows))
    assert "not official (0 of 1 files" in load_instructions("mirror").detail


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda rows: json.dumps(rows)[:-2], "not a valid JSON document"),
        (lambda rows: json.dumps({"rows": rows}), "not a list"),
        (lambda rows: json.dumps(rows[1:]), f"has {COUNT - 1} records, expected {COUNT}"),
        (lambda rows: json.dumps([*rows[:7], {"instruction": "Hm?", "output": "x"}, *rows[8:]]), "record 7 lacks"),
        (lambda rows: json.dumps([*rows[:9], rows[9] | {"output": " "}, *rows[10:]]), "record 9 has an empty"),
        (lambda rows: json.dumps([*rows[:3], rows[3] | {"input": None}, *rows[4:]]), "record 3 lacks"),
    ],
    ids=["cut off", "no list", "one short", "key missing", "empty answer", "no text"],
)
def test_wrong_rows_are_named(put, rows, spoil, message):
    put(spoil(rows))
    with pytest.raises(DataError, match=message):
        load_instructions("auto")


def test_staged_once_served_from_the_cache_and_damage_is_told(put, rows, monkeypatch, refused):
    with pytest.raises(DataUnavailable):
        published(refused + "/rows.json").stage()
    put(json.dumps(rows))
    assert [published().stage(), published().stage()] == ["copied from the mirror", "present"]
    monkeypatch.delenv("HYPERION_DATA_MIRROR")
    found = load_instructions("auto", url=refused)
    assert found.source == "cache" and "copied from the mirror" in found.detail
    (cache_root() / "instructions" / FILE).write_text(json.dumps(rows)[:-1] + " ]")
    with pytest.raises(DataError, match="truncated or edited"):
        load_instructions("cache")


def test_a_download_of_other_content_is_refused(rows, serve, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(DataUnavailable, match="has sha256"):
        load_instructions("download", url=f"{serve(tmp_path)}/rows.json")
    assert not (cache_root() / "instructions").exists()


def test_without_any_source_synthetic_rows_under_their_own_name_or_an_error(refused, capsys):
    found = load_instructions("auto", url=refused)
    assert (found.name, found.source, found.least_loss_nats) == ("synthetic-instructions", "synthetic", 0.0)
    assert "the cache has no instructions.json" in capsys.readouterr().out
    assert found.sha256 == load_instructions("synthetic").sha256 != load_instructions("synthetic", seed=1).sha256
    prompts = [row.prompt for row in found.train + found.held_out]
    assert len(set(prompts)) == len(prompts) == COUNT
    with pytest.raises(DataError, match="no source has instructions"):
        load_instructions("auto", allow_synthetic=False, url=refused)


def test_synthetic_answers_follow_from_their_prompts():
    rows = {row.instruction: row for row in load_instructions("synthetic").train}
    assert (
        rows["Write the words in reverse order."].output.split()
        == (rows["Write the words in reverse order."].input.split()[::-1])
    )
    counted = rows["How many words are there?"]
    assert counted.output == f"There are {len(counted.input.split())} words."


@given(st.lists(st.tuples(st.sampled_from("abcdefghijklmnopqrst"), st.sampled_from("xy")), max_size=60))
def test_no_prompt_stands_in_both_splits_and_no_row_is_lost(pairs):
    rows = [Instruction(prompt, "", answer) for prompt, answer in pairs]
    train, held_out = split_by_prompt(rows)
    assert not {row.prompt for row in train} & {row.prompt for row in held_out}
    assert sorted(map(str, train + held_out)) == sorted(map(str, rows))
    assert len({row.prompt for row in held_out}) == len({row.prompt for row in rows}) // 10


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
