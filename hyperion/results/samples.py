"""Read files of samples safely: Parquet tables of numbers, texts and lists of numbers, whose size is checked before decoding."""

import pandas as pd

from hyperion.results.files import StoreError

# Generous limits: the largest experiment of Hyperion records 50,000 rows.
LARGEST_ROWS, LARGEST_CELLS, LARGEST_DECODED_BYTES = 20_000_000, 100_000_000, 2**30
_NEXT = "restore the file from where it was copied, or delete the run and measure again"


def read_samples(content: bytes, where: object) -> pd.DataFrame:
    """Return the table of a Parquet file. Its size is checked before it is decoded, and nothing in it is executed.

    Types come from the Parquet schema. The pandas metadata is ignored, because it can name Python types.

    Args:
        content: the file's bytes.
        where: the file, for the error.

    Raises:
        StoreError: it is not Parquet, has other types than numbers, dates, texts and lists of numbers, has two columns of the
            same name, or is larger than anything that Hyperion records.
    """
    import pyarrow as pa

    try:
        table = _table(content, where)
        table.validate(full=True)  # texts that are no UTF-8 would fail later, in pandas
        return table.to_pandas(ignore_metadata=True)
    except (pa.ArrowException, ValueError, OSError, OverflowError) as error:
        raise StoreError(f"unreadable samples: {str(error)[:200]}", where=where, next_step=_NEXT) from error


def _table(content: bytes, where: object):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(pa.BufferReader(content))
    # Columns whose metadata contradict each other raise an error here; `group.column` below would abort the process.
    next(file.iter_batches(batch_size=1, use_threads=False), None)
    metadata = file.metadata
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    chunks = [group.column(column) for group in groups for column in range(group.num_columns)]
    _require(0 <= metadata.num_rows <= LARGEST_ROWS, f"{metadata.num_rows} rows", where)
    cells = sum(chunk.num_values for chunk in chunks)
    _require(all(chunk.num_values >= 0 for chunk in chunks) and cells <= LARGEST_CELLS, f"{cells} values", where)
    decoded = sum(chunk.total_uncompressed_size for chunk in chunks)
    _require(0 <= decoded <= LARGEST_DECODED_BYTES, f"{decoded} bytes", where)

    schema = metadata.schema.to_arrow_schema()
    if len(set(schema.names)) != len(schema.names):
        raise StoreError("samples with two columns of the same name", where=where, next_step=_NEXT)
    for field in schema:
        if not _plain(field.type):
            fault = f"samples with a column of type {field.type} ({field.name!r:.40})"
            raise StoreError(fault, where=where, next_step="record numbers, dates, texts and lists of numbers")
    # A text that is stored once and repeated a million times is small until it is decoded, so its decoded size is computed
    # first.
    texts = [field.name for field in schema if _is_text(field.type)]
    table = parquet.ParquetFile(pa.BufferReader(content), read_dictionary=texts).read(use_threads=False)
    for name in texts:
        column = table.column(name)
        if pa.types.is_dictionary(column.type):
            decoded += sum(map(_text_bytes, column.chunks))
            _require(decoded <= LARGEST_DECODED_BYTES, f"{decoded} bytes", where)
            table = table.set_column(table.column_names.index(name), name, column.cast(column.type.value_type))
    return table


def _text_bytes(chunk) -> int:
    import pyarrow.compute as compute

    # By name, because pyarrow creates these functions at import and type checkers do not see them.
    lengths = compute.call_function("binary_length", [chunk.dictionary])
    return compute.call_function("sum", [lengths.take(chunk.indices).cast("int64")]).as_py() or 0


def _plain(kind) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return types.is_primitive(kind.value_type)
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    return types.is_primitive(kind) or types.is_null(kind) or _is_text(kind)


def _is_text(kind) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind)


def _require(holds: bool, size: str, where: object) -> None:
    if not holds:
        raise StoreError(f"samples of {size} are more than Hyperion records", where=where, next_step=_NEXT)
