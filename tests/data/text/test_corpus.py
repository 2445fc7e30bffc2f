import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data.store.folders import DataError
from hyperion.data.text.corpus import TextCorpus, count_non_empty, count_words_with_eos, read_lines, require_counts


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


@pytest.mark.parametrize(("content", "fault"), [(b"a\nb\r\n", "carriage return"), (b"cut off", "newline"), (b"", "newline")])
def test_cut_or_converted_files_are_refused(tmp_path, content, fault):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=fault):
        read_lines(tmp_path / "file")


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
