"""Change the contents of files as an attacker would: numbers out of range in complete, sealed
files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fuzzing.mutations import change_field, change_number, files
from fuzzing.seals import reseal
from numpy.typing import NDArray
from safetensors.torch import load, save_file

from stratarec.embedding.stores.row_files import write_rows
from stratarec.io.owned_directory import MARKER
from stratarec.kernels.blocks import Shape
from stratarec.kernels.blocks.cpu import seal as seal_blocks

Array = NDArray[Any]


def rewrite(path: Path, draws: random.Random) -> str:
    """Change the content of some files of the artifact in `path` and seal it again.

    Return a description of the changes.
    """
    descriptions = []
    for _ in range(draws.choice((1, 1, 1, 2, 3))):
        file = _chosen(files(path), draws)
        try:
            if file.suffix == ".json":
                change = change_number if draws.random() < 0.75 else change_field
                descriptions.append(change(path, draws, file))
            else:
                descriptions.append(f"{file.relative_to(path)} {_REWRITES[file.suffix](file, draws)}")
        except Exception as error:
            if not descriptions:
                raise
            # A file that an earlier change made unreadable cannot be changed again.
            descriptions.append(f"{file.relative_to(path)} left ({type(error).__name__})")
    adapt = draws.random() < 0.7
    reseal(path, adapt=adapt)
    return f"{'; '.join(descriptions)}{' adapted' if adapt else ''}"


def rewrite_unchanged(path: Path) -> None:
    """Write every file again with this module and seal the artifact, which must stay valid."""
    for file in files(path):
        if file.suffix == ".parquet":
            _write_parquet(file, *_read_parquet(file))
        elif file.suffix == ".log":
            _change_log(file, None)
        elif file.name.startswith("rows-"):
            rows, records = _read_rows(file)
            _write_rows(file, rows, records)
        elif file.suffix == ".safetensors":
            _write_tensors(file, load(file.read_bytes()))
    reseal(path, adapt=True)


def _chosen(all_files: list[Path], draws: random.Random) -> Path:
    """Draw a file. Each kind of file has the same probability, however many files there are."""
    kinds: dict[str, list[Path]] = {}
    for file in all_files:
        if file.suffix in (".json", *_REWRITES) and file.name != MARKER:
            # Manifests have most of the fields, but the numbers that kernels read are in other
            # files.
            kind = file.name if not file.name.startswith(("rows-", "shard-", "0")) else file.suffix
            kinds.setdefault(f"{kind} {file.name.count('.')} {file.parent.name == 'slots'}", []).append(
                file
            )
    chosen = sorted(kinds, key=lambda kind: (".json" in kind, kind))
    return draws.choice(kinds[draws.choice([*chosen, *(kind for kind in chosen if ".json" not in kind)])])


# Numbers

_WHOLE = (
    -1, -2, 0, 1, 2, 2**7, 2**8 - 1, 2**15, 2**16, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**32, 2**53, 2**61, 2**62,
    2**63 - 1, -(2**63), 2**64 - 1,
)  # fmt: skip
_FLOATS = (
    float("nan"),
    float("inf"),
    -float("inf"),
    -1.0,
    -0.0,
    1e38,
    -3.4e38,
    3.4028235e38,
    5e-324,
    1e-45,
    0.0,
    2.0,
)


def _spoil(values: Array, draws: random.Random) -> str:
    """Change some numbers of an array in place. Return a description."""
    if not values.size:
        return "empty as it is"
    flat = values.reshape(-1)
    share = draws.choice(("one", "one", "last", "first", "some", "all"))
    places: Any = {
        "one": [draws.randrange(len(flat))], "last": [-1], "first": [0],
        "some": draws.sample(range(len(flat)), max(len(flat) // 4, 1)), "all": slice(None),
    }[share]  # fmt: skip
    if flat.dtype.kind == "f":
        value: Any = draws.choice(_FLOATS)
    elif flat.dtype.kind == "b":
        value = draws.random() < 0.5
    else:
        most = int(flat.max())
        value = draws.choice((*_WHOLE, most, most + 1, most + 1, most * 2, int(flat.min()) - 1, len(flat)))
        # Wrap around on overflow, as a writer in another language would.
        value = np.array([value % 2**64], dtype=np.uint64).astype(flat.dtype)[0]
    how = draws.choice(("set", "set", "set", "moved", "shuffled"))
    if how == "shuffled":
        order = list(range(len(flat)))
        draws.shuffle(order)
        flat[:] = flat[order]
        return "shuffled"
    with np.errstate(all="ignore"):
        flat[places] = flat[places] + flat.dtype.type(draws.choice((1, 2))) if how == "moved" else value
    return f"{share} {'moved' if how == 'moved' else f'is {value}'}"


# Parquet


def _read_parquet(file: Path) -> tuple[list[pa.Table], bool]:
    result = pq.ParquetFile(file)
    return [result.read_row_group(place) for place in range(result.num_row_groups)], True


def _write_parquet(file: Path, groups: list[pa.Table], dictionary: bool = True) -> None:
    groups = groups or [pa.table({"nothing": pa.array([], pa.int32())})]
    with pq.ParquetWriter(file, groups[0].schema, compression="zstd", use_dictionary=dictionary) as writer:
        for table in groups:
            # Write row groups one at a time, because `write_table` leaves out a row group without
            # rows.
            writer.write_table(table.cast(groups[0].schema), row_group_size=max(len(table), 1))


def _change_parquet(file: Path, draws: random.Random) -> str:
    groups, _ = _read_parquet(file)
    kind = draws.choice(
        ("values", "values", "values", "lengths", "lengths", "nulls", "columns", "row groups")
    )
    place = draws.randrange(len(groups))
    table = groups[place]
    column = draws.randrange(table.num_columns)
    name = table.column_names[column]
    if kind == "columns":
        groups, description = _change_columns(groups, name, draws)
    elif kind == "row groups":
        groups, description = _change_groups(groups, place, draws)
    else:
        change = {"values": _change_values, "lengths": _change_lengths, "nulls": _add_nulls}[kind]
        changed_column, description = change(_whole(table[name]), draws)
        groups[place] = table.set_column(
            column,
            table.schema.field(column).with_nullable(True).with_type(changed_column.type),
            changed_column,
        )
        schema = groups[place].schema
        groups = [each.cast(schema) for each in groups]
    _write_parquet(file, groups, draws.random() < 0.7)
    return f"{name}[{place}] {description}"


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _change_values(column: pa.Array, draws: random.Random) -> tuple[pa.Array, str]:
    if pa.types.is_list(column.type):
        values, description = _change_values(column.flatten(), draws)
        return pa.ListArray.from_arrays(_offsets(column), values), description
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return _change_texts(column, draws)
    missing = np.asarray(column.is_null())
    values = np.array(column.fill_null(0) if column.null_count else column)
    description = _spoil(values, draws)
    return pa.array(values, column.type, mask=missing if missing.any() else None), description


def _change_texts(column: pa.Array, draws: random.Random) -> tuple[pa.Array, str]:
    result = column.to_pylist()
    place = draws.randrange(max(len(result), 1))
    value = draws.choice(
        ("", "x" * 100_000, result[-1] if result else "", result[0] if result else "", "\0", "a\n", None)
    )
    result[place : place + 1] = [value]
    return pa.array(result, column.type), f"text {str(value)[:20]!r}"


def _offsets(column: pa.Array) -> pa.Array:
    lengths = np.asarray(column.value_lengths().fill_null(0))
    return pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))


def _change_lengths(column: pa.Array, draws: random.Random) -> tuple[pa.Array, str]:
    """Make lists longer or shorter. In columns without lists, remove or duplicate rows."""
    if not pa.types.is_list(column.type):
        return _change_values(column, draws)
    values, offsets = column.flatten(), np.array(_offsets(column))
    how = draws.choice(("longer", "shorter", "empty", "all in one", "border", "twice"))
    if how in ("longer", "twice"):
        more = values if how == "twice" else values.slice(max(len(values) - draws.choice((1, 7)), 0))
        values = pa.concat_arrays([values, more])
        offsets[-1] = len(values)
    elif how == "shorter":
        values = values.slice(0, max(len(values) - draws.choice((1, 1, len(values) // 2 + 1)), 0))
        offsets = np.minimum(offsets, len(values))
    elif how == "empty":
        values, offsets = values.slice(0, 0), offsets * 0
    elif how == "all in one":
        offsets[1:] = len(values)
    elif len(offsets) > 2:
        place = draws.randrange(1, len(offsets) - 1)
        offsets[place] = draws.choice((offsets[place - 1], offsets[place + 1]))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values), how


def _add_nulls(column: pa.Array, draws: random.Random) -> tuple[pa.Array, str]:
    inside = pa.types.is_list(column.type) and draws.random() < 0.6
    inner = column.flatten() if inside else column
    missing = np.zeros(len(inner), bool)
    missing[draws.randrange(len(inner)) if len(inner) and draws.random() < 0.7 else slice(None)] = True
    with_nulls = pa.array(
        [
            None if is_missing else value
            for is_missing, value in zip(missing, inner.to_pylist(), strict=True)
        ],
        inner.type,
    )
    return (
        pa.ListArray.from_arrays(_offsets(column), with_nulls) if inside else with_nulls
    ), f"nulls{' inside' if inside else ''}"


def _change_columns(groups: list[pa.Table], name: str, draws: random.Random) -> tuple[list[pa.Table], str]:
    how = draws.choice(
        ("dropped", "renamed", "twice", "of another type", "of another type", "reversed", "another one")
    )
    changed_tables = []
    for table in groups:
        place = table.column_names.index(name)
        if how == "dropped":
            changed_tables.append(table.drop_columns([name]) if table.num_columns > 1 else table)
        elif how == "renamed":
            changed_tables.append(
                table.rename_columns([f"{each}x" if each == name else each for each in table.column_names])
            )
        elif how == "twice":
            changed_tables.append(table.append_column(table.schema.field(place), table[name]))
        elif how == "another one":
            changed_tables.append(table.append_column("more", table[name]))
        elif how == "reversed":
            changed_tables.append(table.select(table.column_names[::-1]))
        else:
            changed_tables.append(table)
    if how == "of another type":
        changed_tables, how = _other_type(changed_tables, name, draws)
    return changed_tables, how


def _other_type(groups: list[pa.Table], name: str, draws: random.Random) -> tuple[list[pa.Table], str]:
    kind = groups[0].schema.field(name).type
    listed = pa.types.is_list(kind)
    inner = kind.value_type if listed else kind
    other = draws.choice([each for each in (
        pa.int64(), pa.int32(), pa.int16(), pa.uint32(), pa.uint64(), pa.float32(), pa.float64(), pa.float16(),
        pa.string(), pa.large_string(), pa.bool_(), pa.binary(), pa.timestamp("us"), pa.decimal128(38, 2), pa.null(),
    ) if each != inner])  # fmt: skip
    target = (
        draws.choice((pa.list_(other), pa.large_list(inner), pa.list_(pa.list_(inner)), inner))
        if listed
        else (draws.choice((other, other, pa.list_(inner), pa.dictionary(pa.int32(), inner))))
    )
    changed_tables = []
    for table in groups:
        place, column = table.column_names.index(name), _whole(table[name])
        try:
            converted = column.cast(target, safe=False)
        except (pa.ArrowException, NotImplementedError):
            converted = pa.nulls(len(column), target)
        changed_tables.append(table.set_column(place, name, converted))
    return changed_tables, f"is {target}"


def _change_groups(groups: list[pa.Table], place: int, draws: random.Random) -> tuple[list[pa.Table], str]:
    how = draws.choice(("none", "dropped", "twice", "swapped", "shorter", "longer", "joined", "empty"))
    result, table = list(groups), groups[place]
    if how == "none":
        result = [table.slice(0, 0)]
    elif how == "dropped":
        result = [*groups[:place], *groups[place + 1 :]] or [table.slice(0, 0)]
    elif how == "twice":
        result.insert(place, table)
    elif how == "swapped":
        result.reverse()
    elif how == "shorter":
        result[place] = table.slice(0, max(len(table) - 1, 0))
    elif how == "longer":
        result[place] = pa.concat_tables([table, table.slice(0, 1)])
    elif how == "joined":
        result = [pa.concat_tables(groups)]
    else:
        result[place] = table.slice(0, 0)
    return result, f"row group {how}"


# Tensors


def _write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, file)


def _change_tensors(file: Path, draws: random.Random) -> str:
    if file.name.startswith("rows-"):
        return _change_rows(file, draws)
    results = {name: tensor.clone() for name, tensor in load(file.read_bytes()).items()}
    if not results:
        return "has no tensor"
    name = draws.choice(sorted(results))
    tensor = results[name]
    how = draws.choice(("values", "values", "values", "values", "shape", "type", "name", "bytes"))
    if how == "values":
        values = tensor.numpy()
        how = _spoil(values.reshape(-1), draws) if tensor.numel() else how
    elif how == "bytes":
        raw = (
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            if tensor.numel()
            else np.zeros(0, np.uint8)
        )
        how = f"bytes {_spoil(raw, draws)}"
    elif how == "shape":
        flat = tensor.flatten()
        other = tensor.movedim(0, -1) if tensor.dim() else flat
        results[name] = draws.choice((flat, tensor[None], flat[:-1], flat[:0], other)).contiguous()
    elif how == "type":
        kinds = (torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
        results[name] = tensor.to(draws.choice(kinds))
    else:
        results[draws.choice((f"{name}x", "weights/x", "0.x", "-1.exp_avg", "10.exp_avg", "@rows/x"))] = (
            results.pop(name)
        )
    _write_tensors(file, results)
    return f"{name} {how}"


def _read_rows(file: Path) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    result = load(file.read_bytes())
    return result["rows"].numpy().copy(), result["records"].numpy().copy()


class _Listed:
    """Records in the order of writing, whatever row numbers they have."""

    def __init__(self, records: NDArray[np.uint8]) -> None:
        self._records = records
        self._next = 0
        self.shape = records.shape

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        first, self._next = self._next, self._next + len(rows)
        return self._records[first : self._next]


def _write_rows(file: Path, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
    file.unlink()  # never through a hard link
    write_rows(file, lambda: iter([rows] if len(rows) else []), _Listed(records))


_HEAD = {"row": (0, "<i8"), "stamp": (8, "<i4"), "count": (12, "<u4")}


def _change_rows(file: Path, draws: random.Random) -> str:
    rows, records = _read_rows(file)
    slots = file.parent.name == "slots"
    how = draws.choice(
        ("rows", "records", "records", "records", "number", *(["head"] * 3 if slots else []))
    )
    if how == "rows":
        how = f"rows {_spoil(rows, draws)}"
    elif how == "number":
        most = draws.choice((0, 1, len(rows) // 2, len(rows) * 2))
        rows, records = np.resize(rows, most), np.resize(records, (most, records.shape[1]))
        how = f"{most} rows"
    elif not len(rows):
        how = "empty as it is"
    elif how == "head":
        name = draws.choice(sorted(_HEAD))
        place, kind = _HEAD[name]
        size = np.dtype(kind).itemsize
        values = np.ascontiguousarray(records[:, place : place + size]).view(kind)[:, 0].copy()
        how = f"{name} {_spoil(values, draws)}"
        records[:, place : place + size] = values[:, None].view(np.uint8)
    else:
        how = f"records {_spoil_records(records, draws)}"
    _write_rows(file, rows, records)
    return how


def _spoil_records(records: NDArray[np.uint8], draws: random.Random) -> str:
    """Change a field of some width at some offset of some records."""
    kind = np.dtype(draws.choice(("<f4", "<f4", "<f2", "<i4", "<u4", "<i8", "u1")))
    if records.shape[1] < kind.itemsize:
        kind = np.dtype("u1")
    last = records.shape[1] - kind.itemsize
    place = draws.choice((0, last, max(last - 4, 0), draws.randrange(last + 1)))
    values = np.ascontiguousarray(records[:, place : place + kind.itemsize]).view(kind)[:, 0].copy()
    description = _spoil(values, draws)
    records[:, place : place + kind.itemsize] = values[:, None].view(np.uint8)
    return f"{kind} at {place}: {description}"


# Segments of logs


def _change_log(file: Path, draws: random.Random | None) -> str:
    """Change cells of a segment, with correct checksums."""
    state = json.loads((file.parents[3] / "state.json").read_text())
    home = next(
        group["home"] for group in state["tables"]["groups"] if group["name"] == file.parents[1].name
    )
    block = int(home["block_bytes"])
    record, tag = int(home["record_bytes"]), int(home["tag_bytes"])
    shape = Shape(
        block // 8,
        -(-(2 * tag + record) // 8),
        int(home["per_block"]),
        record,
        tag // 4,
        int(home["segment_blocks"]),
    )
    words = np.frombuffer(file.read_bytes(), np.uint64).copy()
    description = ""
    if draws is not None:
        cells = words.reshape(-1, block // 8)[:, : shape.per_block * shape.cell_words].reshape(
            -1, shape.cell_words
        )
        view = np.ascontiguousarray(cells).view(np.uint8)
        part = draws.choice(("tags", "tags", "records", "all", "blocks"))
        if part == "blocks":
            words = np.resize(words, len(words) * draws.choice((0, 1, 2)))
            description = f"{len(words)} words"
        elif part == "tags":
            tags = np.ascontiguousarray(view[:, tag : 2 * tag]).view("<u4" if tag == 4 else "<u8").copy()
            description = f"tags {_spoil(tags, draws)}"
            view[:, tag : 2 * tag] = tags.view(np.uint8).reshape(len(view), -1)
        else:
            part_of_cell = slice(2 * tag, 2 * tag + record) if part == "records" else slice(tag, None)
            inner = np.ascontiguousarray(view[:, part_of_cell])
            description = f"{part} {_spoil_records(inner, draws)}"
            view[:, part_of_cell] = inner
        if part != "blocks":
            words.reshape(-1, block // 8)[:, : shape.per_block * shape.cell_words] = view.view(
                np.uint64
            ).reshape(len(words) * 8 // block, -1)
    sequence = int(file.stem.split("-")[1])
    seal_blocks(words, shape, len(words) * 8 // block, np.uint64(sequence), 0)
    file.unlink()
    file.write_bytes(words.tobytes())
    return description


def _change_towers(file: Path, draws: random.Random) -> str:
    """Return a list of lists of names, in YAML."""
    lines = file.read_text().splitlines()
    place = draws.randrange(len(lines))
    value = draws.choice(
        ("- []", "- [item]", "[]", "{}", "- {a: b}", "- [1, 2]", "- [null]", "- - - item", "x: &x [*x]", "- [.nan]",
         "- &a [x]\n- *a", "-", "- [\"\\0\"]", "\0", "- !!python/object:os.system {}", "- "
                                                                                       f"[{'x, ' * 5000}]",
         "[" * 900, "- [item, seen, where]", lines[place], "")
    )  # fmt: skip
    lines[place] = value
    if draws.random() < 0.3:
        lines.append(value)
    file.write_text("\n".join(lines) + "\n")
    return repr(value)[:60]


_REWRITES: dict[str, Callable[[Path, random.Random], str]] = {
    ".parquet": _change_parquet,
    ".safetensors": _change_tensors,
    ".log": _change_log,
    ".yaml": _change_towers,
}
