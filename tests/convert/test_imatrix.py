"""Files of importance: llama.cpp's GGUF and .dat, what is read, written and refused."""

import hashlib
import struct

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from m3_convert import imatrix
from m3_convert.imatrix import Entry, ImportanceMatrix
from m3_runtime import InputError
from m3_runtime.errors import MachineError

PLAIN, STACKED = "blk.0.attn_q.weight", "blk.1.ffn_down_exps.weight"
SHAPES = {PLAIN: (1, 4), STACKED: (3, 2)}


def floats(*values):
    return np.array(values, np.float32)


def example(name="example"):
    """Expert 1 was never reached."""
    entries = {
        STACKED: Entry(floats([2, 4], [0, 0], [9, 0]), floats(2, 0, 3)),
        PLAIN: Entry(floats([5, 10, 0, 2.5]), floats(5)),
    }
    return ImportanceMatrix(name, entries, ("book.txt",), 2, 512)


# ------------------------------------------------------------------------------------------------ GGUF


def test_the_file_is_llama_cpps(tmp_path):
    """As the gguf package reads it; a GGUF has no trailing dimensions of 1."""
    path = tmp_path / "x.imatrix.gguf"
    assert example().save(path) == path.stat().st_size
    reader = GGUFReader(path)
    fields = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["book.txt"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 512,
    }
    found = {t.name: (list(t.shape), t.data.ravel().tolist(), t.tensor_type.name) for t in reader.tensors}
    assert found == {
        f"{PLAIN}.in_sum2": ([4], [5, 10, 0, 2.5], "F32"),
        f"{PLAIN}.counts": ([1], [5], "F32"),
        f"{STACKED}.in_sum2": ([2, 3], [2, 4, 0, 0, 9, 0], "F32"),
        f"{STACKED}.counts": ([1, 3], [2, 0, 3], "F32"),
    }
    assert [t.name for t in reader.tensors] == sorted(found, key=lambda n: (n.rsplit(".", 1)[0], n.endswith("counts")))


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "x.imatrix.gguf"
    example().save(path)
    found = ImportanceMatrix.load(path)
    assert (found.datasets, found.chunk_count, found.chunk_size, found.legacy) == (("book.txt",), 2, 512, False)
    assert found.name == str(path) and found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.fitted(SHAPES)[0].sha256 == found.sha256
    for name, entry in example().entries.items():
        np.testing.assert_array_equal(found.entries[name].sums, entry.sums)
        np.testing.assert_array_equal(found.entries[name].counts, entry.counts)
    again = tmp_path / "again.gguf"
    found.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_importance_is_the_mean_square():
    matrix = example()
    np.testing.assert_array_equal(matrix.for_matrix(PLAIN), floats(1, 2, 0, 0.5))
    np.testing.assert_array_equal(matrix.for_matrix(STACKED, 0), floats(1, 2))
    np.testing.assert_array_equal(matrix.for_matrix(STACKED, 2), floats(3, 0))
    assert matrix.for_matrix(STACKED, 1) is None and matrix.for_matrix("token_embd.weight") is None
    mean = matrix.for_matrix(STACKED, 2)
    assert mean.dtype == np.float32 and mean.flags.c_contiguous


def test_large_sums_and_counts():
    entry = Entry(floats([3e38, 1e-38]), floats(2**24))
    mean = ImportanceMatrix("m", {"w": entry}, (), 0, 0).for_matrix("w")
    np.testing.assert_allclose(mean, [3e38 / 2**24, 1e-38 / 2**24], rtol=1e-6, atol=1e-45)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "x.imatrix.gguf"
    example().save(path)
    before = path.read_bytes()

    def fail(_writer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(GGUFWriter, "write_tensors_to_file", fail)
    with pytest.raises(MachineError, match=r"part: cannot be written: No space left on device; nothing was kept"):
        example().save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and path.read_bytes() == before


def test_values_that_are_no_importance_are_not_written(tmp_path):
    broken = {"w": Entry(floats([1, np.inf]), floats(1))}
    with pytest.raises(InputError, match=r"^m: w: 1 sums are NaN, infinite or negative, the first inf in matrix 0, co"):
        ImportanceMatrix("m", broken, (), 1, 1).save(tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ a model's weights


def test_entries_of_weights_that_take_none_are_nothing_to_speak_of():
    entries = example().entries
    plain = {PLAIN: SHAPES[PLAIN]}
    assert example().fitted(plain)[1].unused == tuple(name for name in entries if name != PLAIN)
    coverage = example().fitted(plain, set(entries))[1]
    assert coverage.unused == () and coverage.notes() == []


def test_an_expert_that_was_never_reached_falls_back_alone():
    matrix, coverage = example().fitted(SHAPES)
    assert coverage.unreached == {STACKED: (1,)} and coverage.unreached_matrices == 1
    assert coverage.without == () == coverage.unused
    assert matrix.for_matrix(STACKED, 1) is None
    np.testing.assert_array_equal(matrix.for_matrix(STACKED, 0), floats(1, 2))
    (note,) = coverage.notes()
    assert note.startswith("1 expert matrices in 1 tensors were never reached") and f"{STACKED}, expert 1" in note


def test_gaps_are_counted():
    shapes = {**SHAPES, "blk.2.attn_q.weight": (1, 4), "blk.3.ffn_up_exps.weight": (2, 2)}
    nothing = Entry(np.zeros((2, 2), np.float32), np.zeros(2, np.float32))
    source = ImportanceMatrix(
        "m", {**example().entries, "blk.3.ffn_up_exps.weight": nothing, "other": nothing}, (), 1, 1
    )
    matrix, coverage = source.fitted(shapes)
    assert coverage.weights == 4 and coverage.unused == ("other",)
    assert coverage.without == ("blk.2.attn_q.weight", "blk.3.ffn_up_exps.weight")
    assert set(matrix.entries) == set(SHAPES)
    assert coverage.as_json() == {
        "tensors": 4,
        "without": list(coverage.without),
        "unreached": {STACKED: [1]},
        "unreached_matrices": 1,
        "unused": ["other"],
    }
    assert len(coverage.notes()) == 3
    everything = imatrix.Coverage(2)
    assert everything.notes() == []


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({PLAIN: (1, 5)}, f"m: {PLAIN}: sums of shape 4x1, expected 5x1"),
        ({STACKED: (4, 2)}, f"m: {STACKED}: sums of shape 2x3, expected 2x4"),
        ({STACKED: (2, 3)}, f"m: {STACKED}: sums of shape 2x3, expected 3x2"),
        ({STACKED: (1, 6)}, f"m: {STACKED}: sums of shape 2x3, expected 6x1"),
        ({"blk.0.attn_k.weight": (1, 4)}, "m: none of its 2 entries belongs to a tensor of the model"),
    ],
)
def test_another_model_is_refused(shapes, message):
    with pytest.raises(InputError) as error:
        example("m").fitted(shapes)
    assert str(error.value).startswith(message)


def test_one_count_for_all_experts(tmp_path):
    """As in files that were made from a .dat."""
    path = tmp_path / "shared.gguf"
    write(path, {STACKED: (floats(2, 4, 0, 0, 6, 0), floats(2))})
    matrix, coverage = ImportanceMatrix.load(path).fitted({STACKED: (3, 2)})
    assert coverage.unreached == {STACKED: (1,)}
    np.testing.assert_array_equal(matrix.for_matrix(STACKED, 2), floats(3, 0))


# ------------------------------------------------------------------------------------------------ bad GGUF files

GOOD_KEYS = {"general.type": "imatrix", "imatrix.datasets": ["a"], "imatrix.chunk_count": 1, "imatrix.chunk_size": 8}


def write(path, weights, keys=GOOD_KEYS, extra=()):
    """weights: sums and counts by name, None leaves one out."""
    writer = GGUFWriter(path, "")
    for key, value in keys.items():
        add = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    for name, (sums, counts) in weights.items():
        for end, data in (("in_sum2", sums), ("counts", counts)):
            if data is not None:
                writer.add_tensor(f"{name}.{end}", data)
    for name, data in extra:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_unknown_tensors_are_not_in_the_way(tmp_path):
    write(tmp_path / "x.gguf", {"w": (floats(1, 2), floats(1))}, extra=[("w.in_sum", floats(1, 2))])
    assert set(ImportanceMatrix.load(tmp_path / "x.gguf").entries) == {"w"}


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            (floats(1, np.nan), floats(1)),
            "w: 1 sums are NaN, infinite or negative, the first nan in matrix 0, column 1",
        ),
        (
            (floats(-1, np.inf), floats(1)),
            "w: 2 sums are NaN, infinite or negative, the first -1.0 in matrix 0, column",
        ),
        ((floats([1, 1], [1, -2]), floats([1], [1])), "the first -2.0 in matrix 1, column 1"),
        ((floats(1, 1), floats(np.nan)), "w: 1 counts are NaN, infinite or negative"),
        ((floats(1, 1), floats(-3)), "w: 1 counts are NaN, infinite or negative"),
        ((floats(1, 1), floats(1e-40)), "w: a count of"),
        ((floats(1, 1), floats(0)), "w: matrix 0 has sums above 0 and a count of 0"),
        ((floats([1, 1], [1, 1]), floats([1], [0])), "w: matrix 1 has sums above 0 and a count of 0"),
        ((floats(1, 1), None), "w.counts"),
        ((None, floats(1)), "w.in_sum2"),
        ((floats(1, 1), floats(1, 1)), "w.counts has shape 2x1, expected 1x1"),
        ((floats([1, 1], [1, 1]), floats([1], [1], [1])), "w.counts has shape 1x3, expected 1x2"),
        ((np.ones((2, 2, 2), np.float32), floats(1)), "w.in_sum2 has shape 2x2x2, expected two dimensions"),
        ((np.ones(2, np.float16), floats(1)), "w.in_sum2 is F16, expected F32"),
        ((floats(1, 1), np.ones(1, np.float16)), "w.counts is F16, expected F32"),
    ],
)
def test_broken_tensors_are_refused_by_name(tmp_path, weight, message):
    path = tmp_path / "x.gguf"
    write(path, {"w": weight})
    with pytest.raises(InputError) as error:
        ImportanceMatrix.load(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.type", "model", "general.type is 'model', expected 'imatrix'"),
        ("general.type", None, "general.type is None, expected 'imatrix'"),
        ("imatrix.datasets", None, "imatrix.datasets is None"),
        ("imatrix.datasets", "a", "imatrix.datasets is 'a'"),
        ("imatrix.chunk_count", None, "imatrix.chunk_count is None"),
        ("imatrix.chunk_size", 1.5, "imatrix.chunk_size is 1.5"),
    ],
)
def test_wrong_keys_are_refused_by_name(tmp_path, key, value, message):
    keys = {k: v for k, v in {**GOOD_KEYS, key: value}.items() if v is not None}
    write(tmp_path / "x.gguf", {"w": (floats(1), floats(1))}, keys)
    with pytest.raises(InputError, match=message):
        ImportanceMatrix.load(tmp_path / "x.gguf")


def test_files_that_are_something_else(tmp_path, tiny_gguf):
    with pytest.raises(InputError, match=r"general.type is 'model', expected 'imatrix'"):
        ImportanceMatrix.load(tiny_gguf)
    write(tmp_path / "empty.gguf", {}, extra=[("w", floats(1))])
    with pytest.raises(InputError, match=r"has no tensor that ends in '\.in_sum2'"):
        ImportanceMatrix.load(tmp_path / "empty.gguf")
    example().save(tmp_path / "x.gguf")
    content = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(content[:-24])
    with pytest.raises(InputError, match="truncated"):
        ImportanceMatrix.load(tmp_path / "half.gguf")
    with pytest.raises(InputError, match=r"absent: cannot be read: No such file"):
        ImportanceMatrix.load(tmp_path / "absent")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        ImportanceMatrix.load(tmp_path)


# ------------------------------------------------------------------------------------------------ .dat


def dat_entry(name, calls, values):
    raw = name.encode()
    return struct.pack(f"<i{len(raw)}sii{len(values)}f", len(raw), raw, calls, len(values), *values)


END = struct.pack("<ii5s", 7, 5, b"a.txt")


def dat(*entries, end=END):
    return struct.pack("<i", len(entries)) + b"".join(entries) + end


def test_the_older_format(tmp_path):
    path = tmp_path / "x.dat"
    path.write_bytes(dat(dat_entry(PLAIN, 4, [4, 8, 0, 2]), dat_entry(STACKED, 2, [6, 4, 2, 2, 0, 0, 8, 0])))
    found = ImportanceMatrix.load(path)
    assert (found.datasets, found.chunk_count, found.chunk_size, found.legacy) == (("a.txt",), 7, 0, True)
    np.testing.assert_array_equal(found.for_matrix(PLAIN), floats(1, 2, 0, 0.5))
    matrix, coverage = found.fitted({PLAIN: (1, 4), STACKED: (4, 2)})
    # Expert 1 has the ones and expert 2 the zeros that stand for no data.
    assert coverage.unreached == {STACKED: (1, 2)}
    assert matrix.for_matrix(STACKED, 1) is None and matrix.for_matrix(STACKED, 2) is None
    np.testing.assert_array_equal(matrix.for_matrix(STACKED, 0), floats(3, 2))
    np.testing.assert_array_equal(matrix.for_matrix(STACKED, 3), floats(4, 0))
    with pytest.raises(InputError, match="expected 4x3"):
        found.fitted({PLAIN: (1, 4), STACKED: (3, 4)})
    path.write_bytes(dat(dat_entry(PLAIN, 4, [4]), end=b""))  # the oldest ones end here
    assert ImportanceMatrix.load(path).datasets == ()
    matrix.save(tmp_path / "new.gguf")
    again, coverage = ImportanceMatrix.load(tmp_path / "new.gguf").fitted({PLAIN: (1, 4), STACKED: (4, 2)})
    assert coverage.unreached == {STACKED: (1, 2)}
    np.testing.assert_array_equal(again.for_matrix(STACKED, 0), floats(3, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the number of entries takes 4 bytes, 0 are left"),
        (struct.pack("<i", 0), "the number of entries is 0, expected at least 1"),
        (struct.pack("<i", -1), "the number of entries is -1"),
        (
            struct.pack("<ii", 1, 2**31 - 1) + b"x" * 50,
            "the length of the name of entry 0 is 2147483647, expected at mo",
        ),
        (struct.pack("<ii", 1, -5), "the length of the name of entry 0 is -5"),
        (dat(struct.pack("<i2sii", 2, b"\xff\xfe", 1, 1)), "the name of entry 0 is not UTF-8"),
        (dat(struct.pack("<i1sii", 1, b"w", 1, 2**31 - 1)), "the values of 'w' takes 8589934588 bytes"),
        (dat(struct.pack("<i1sii", 1, b"w", 1, 0)), "the number of values of 'w' is 0"),
        (dat(dat_entry("w", 1, [1]), dat_entry("w", 1, [1])), "two entries are named 'w'"),
        (dat(dat_entry("w", 0, [1])), "w: a count of 0, expected at least 1"),
        (dat(dat_entry("w", 1, [1, float("nan")])), "w: 1 sums are NaN, infinite or negative"),
        (dat(dat_entry("w", 1, [-1.0])), "w: 1 sums are NaN, infinite or negative, the first -1.0"),
        (dat(dat_entry("w", 1, [1])) + b"tail", "4 bytes after its end"),
        (b"some text that is no importance matrix at all", "no importance matrix (neither GGUF nor .dat)"),
    ],
)
def test_broken_dat_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.dat"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        ImportanceMatrix.load(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_no_cut_of_a_dat_file_is_read_as_whole(tmp_path):
    content = dat(dat_entry(PLAIN, 4, [4, 8]), dat_entry(STACKED, 2, [6, 4]))
    whole = len(content) - 13  # where the oldest files end
    for n in range(len(content)):
        (tmp_path / "x.dat").write_bytes(content[:n])
        if n in (whole, whole + 4):
            ImportanceMatrix.load(tmp_path / "x.dat")
            continue
        with pytest.raises(InputError):
            ImportanceMatrix.load(tmp_path / "x.dat")
