"""The command `hyperion megatron tokens` with the real WikiText-2 and GPT-2's tokenizer."""

import json
import sys

import pytest

from hyperion.cli import main

# Of the splits whose text has the published checksum in every mirror.
SHA256 = {
    "validation": "f4c360ae7b9bc7de495679026961899fefd32484ef825528f690846eee990fc2",
    "test": "168ffa6386070ee01e565e9da2e8d6f3c91fd7ad098d6db3699090df3a714001",
}


@pytest.fixture
def tokens(monkeypatch, capsys):
    """A function that runs the command and returns its exit code, its output and its errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hyperion", "megatron", "tokens", *map(str, arguments)])
        return main(), *capsys.readouterr()

    return run


@pytest.mark.slow
@pytest.mark.mirror
def test_wikitext2_has_the_same_tokens_on_every_machine(mirror, tmp_path, tokens):
    code, output, _ = tokens(tmp_path / "wiki")
    assert code == 0 and "wiki_test: 60 documents, 2,891 sequences, 293,003 tokens as uint16, sha256 168ffa638607" in output
    splits = json.loads((tmp_path / "wiki.json").read_text())["splits"]
    assert {split: found["documents"] for split, found in splits.items()} == {"train": 600, "validation": 60, "test": 60}
    assert {split: found["sequences"] for split, found in splits.items()} == {"train": 23767, "validation": 2461, "test": 2891}
    assert {split: splits[split]["sha256"] for split in SHA256} == SHA256
    code, _, errors = tokens(tmp_path / "wiki")
    assert code == 2 and "wiki_train.bin exists" in errors
    code, output, _ = tokens("--check", tmp_path / "wiki")
    assert code == 0 and "the files are unchanged" in output
    with open(tmp_path / "wiki_train.bin", "r+b") as file:
        file.write(b"\xff")
    code, _, errors = tokens("--check", tmp_path / "wiki")
    assert code == 2 and "wiki_train.bin was changed" in errors


@pytest.mark.slow
@pytest.mark.mirror
def test_a_file_of_json_lines_and_its_first_bad_line(mirror, tmp_path, tokens):
    lines = [json.dumps({"text": f"document {number}"}) for number in range(60)]
    (tmp_path / "c4.jsonl").write_text("\n".join(lines))
    assert tokens(tmp_path / "c4", "--input", tmp_path / "c4.jsonl")[0] == 0
    names = {"c4.json", "c4.jsonl", "c4_test.bin", "c4_test.idx", "c4_train.bin", "c4_train.idx"}
    assert {path.name for path in tmp_path.iterdir()} == names
    (tmp_path / "c4.jsonl").write_text("\n".join([*lines, "{}"]))
    code, _, errors = tokens(tmp_path / "other", "--input", tmp_path / "c4.jsonl")
    assert code == 2 and "c4.jsonl, line 61" in errors


def test_check_and_input_contradict_each_other(tmp_path, tokens):
    code, _, errors = tokens(tmp_path / "a", "--check", "--input", "c4.jsonl")
    assert code == 2 and "leave out --input" in errors
