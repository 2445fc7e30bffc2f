"""The instruction rows: from each source, by record when they are wrong, and never a prompt in both splits."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data import DataError, DataUnavailable, load_instructions
from hyperion.data.store.folders import cache_root
from hyperion.data.text.instructions import COUNT, FILE, Instruction, published, split_by_prompt


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
        (lambda rows: json.dumps(rows)[:-2], "not a JSON document"),
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
