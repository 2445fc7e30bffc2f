"""Token files in Megatron's format: the round trip, the exact bytes, and damaged files."""

import struct
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data.store.folders import DataError
from hyperion.data.text.indexed_tokens import IndexedTokensWriter, read_index, stored_dtype, token_fingerprint

# Documents with sequences, for a dtype and the number of its values. Empty documents and sequences are allowed in the format.
STORED = st.sampled_from([("<u2", 1 << 16), ("<i4", 1 << 31), ("u1", 1 << 8)]).flatmap(
    lambda kind: st.tuples(st.just(kind[0]), st.lists(st.lists(st.lists(st.integers(0, kind[1] - 1), max_size=9), max_size=4)))
)


def write(prefix: Path, dtype: str, documents: list[list[list[int]]]):
    with IndexedTokensWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(np.array(sequence, np.int64))
            writer.end_document()
        return writer.close()


@given(STORED)
def test_what_is_written_is_read(stored):
    dtype, documents = stored
    with TemporaryDirectory() as folder:
        prefix = Path(folder) / "c4.en"
        written = write(prefix, dtype, documents)
        index, tokens = read_index(Path(f"{prefix}.idx")), np.fromfile(f"{prefix}.bin", dtype)
        assert token_fingerprint(prefix) == written
    starts = index.starts // index.dtype.itemsize
    sequences = [tokens[start : start + length].tolist() for start, length in zip(starts, index.lengths, strict=True)]
    assert [sequences[first:last] for first, last in pairwise(index.documents)] == documents
    assert written.documents == len(documents) and written.sequences == sum(map(len, documents))
    assert written.tokens == len(tokens) and index.dtype == np.dtype(dtype)


def test_the_bytes_are_those_of_the_format(tmp_path):
    write(tmp_path / "a", "<u2", [[[1, 2], [515]], [[4]]])
    assert (tmp_path / "a.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 2, 4, 0])
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    assert (tmp_path / "a.idx").read_bytes() == header + struct.pack("<3i3q3q", 2, 1, 1, 0, 4, 6, 0, 2, 3)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_every_changed_byte_changes_the_fingerprint_or_is_refused(suffix, place, change):
    with TemporaryDirectory() as folder:
        written = write(Path(folder) / "a", "<u2", [[[1, 2], [3]], [[4, 5, 6]], [[7]]])
        content = bytearray((Path(folder) / f"a{suffix}").read_bytes())
        content[place % len(content)] ^= change
        (Path(folder) / f"a{suffix}").write_bytes(content)
        try:
            assert token_fingerprint(Path(folder) / "a") != written
        except DataError as error:
            assert "a.idx" in str(error) or "a.bin" in str(error)


def index_with(folder: Path, lengths: list[int], starts: list[int], documents: list[int]) -> Path:
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents))
    numbers = struct.pack(f"<{len(lengths)}i{len(starts)}q{len(documents)}q", *lengths, *starts, *documents)
    (folder / "a.idx").write_bytes(header + numbers)
    return folder / "a.idx"


@pytest.mark.parametrize(
    ("lengths", "starts", "documents", "what"),
    [
        ([2, 1], [0, 2], [0, 2], "sequence 1 has a wrong length or start"),
        ([-1, 1], [0, -2], [0, 2], "sequence 0 has a wrong length or start"),
        ([2, 1], [0, 4], [0, 1], "the documents do not divide the 2 sequences"),
        ([2, 1], [0, 4], [1, 2], "the documents do not divide the 2 sequences"),
        ([2, 1], [0, 4], [0, 2, 1, 2], "the documents do not divide the 2 sequences"),
        ([2, 1], [0, 4], [], "the documents do not divide the 2 sequences"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path, lengths, starts, documents, what):
    with pytest.raises(DataError, match=what):
        read_index(index_with(tmp_path, lengths, starts, documents))


def test_a_missing_or_truncated_file_is_named(tmp_path):
    write(tmp_path / "a", "<u2", [[[1, 2]]])
    (tmp_path / "a.bin").write_bytes(b"\x01\x00\x02")
    with pytest.raises(DataError, match=r"a\.bin has 3 bytes, but its index states 2 tokens of 2 bytes"):
        token_fingerprint(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin is missing"):
        token_fingerprint(tmp_path / "a")
    with pytest.raises(DataError, match=r"cannot read b\.idx"):
        read_index(tmp_path / "b.idx")


def test_a_token_that_the_dtype_cannot_represent_is_refused(tmp_path):
    with pytest.raises(DataError, match="value 1 is 65536, which uint16 cannot represent"):
        write(tmp_path / "a", "<u2", [[[1, 1 << 16]]])


def test_the_dtype_is_the_one_that_megatron_core_chooses():
    assert [stored_dtype(size).name for size in (50257, 65499, 65500, 128256)] == ["uint16", "uint16", "int32", "int32"]
