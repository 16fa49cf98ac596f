"""m3-convert --imatrix: which tensors it changes, what it refuses, what the file says of it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from m3_convert.imatrix import Entry, ImportanceMatrix
from m3_runtime import GGUF
from m3_runtime.quantize import TensorType, dequantize_rows

NANO = Path(__file__).parents[2] / "models" / "m3-nano"
EXPERTS = "blk.2.ffn_up_exps.weight"


@pytest.fixture(scope="module")
def matrix() -> ImportanceMatrix:
    """One for all weights of m3-nano, the first half of the columns a hundred times as important."""
    weights = np.ones(256, np.float32)
    weights[:128] = 100
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    entries = {"output.weight": Entry(weights[None], np.ones(1, np.float32))}
    for layer in range(5):
        for kind in (*kinds, *(f"{kind}_shexp" for kind in kinds[4:])):
            columns = {"attn_output": 4, "ffn_down": 4}.get(kind, 1)
            sums = np.tile(weights, columns)[None]
            entries[f"blk.{layer}.{kind}.weight"] = Entry(sums, np.ones(1, np.float32))
        for kind in kinds[4:]:
            entries[f"blk.{layer}.{kind}_exps.weight"] = Entry(np.tile(weights, (8, 1)), np.ones(8, np.float32))
    return ImportanceMatrix("nano.imatrix.gguf", entries, ("fox.txt",), 3, 512)


def values(path: Path, name: str) -> np.ndarray:
    """float32 [experts, rows, columns] of a stacked tensor."""
    with GGUF(path) as gguf:
        tensor = next(t for t in gguf.tensors if t.name == name)
        data = np.frombuffer(gguf.tensor_data(name), np.uint8)
        ne = tensor.ne
        rows = dequantize_rows(TensorType(tensor.type), data.reshape(ne[1] * ne[2], -1).copy(), ne[0])
    return rows.reshape(ne[2], ne[1], ne[0])


def test_errors_move_to_columns_that_matter_less(matrix, m3_convert, tmp_path):
    matrix.save(tmp_path / "m.gguf")
    assert m3_convert(NANO, tmp_path / "f32.gguf", "--type", "f32").code == 0
    assert m3_convert(NANO, tmp_path / "plain.gguf", "--type", "q2_k").code == 0
    with_it = m3_convert(NANO, tmp_path / "weighed.gguf", "--type", "q2_k", "--imatrix", tmp_path / "m.gguf")
    assert with_it.code == 0
    exact = values(tmp_path / "f32.gguf", EXPERTS)
    plain, weighed = ((values(tmp_path / f"{n}.gguf", EXPERTS) - exact) ** 2 for n in ("plain", "weighed"))
    assert weighed[..., :128].sum() < plain[..., :128].sum()
    with GGUF(tmp_path / "weighed.gguf") as gguf:
        keys = {key: gguf.metadata[f"quantize.imatrix.{key}"] for key in ("file", "dataset", "chunks_count")}
    assert keys == {"file": "m.gguf", "dataset": "fox.txt", "chunks_count": 3}


def test_types_that_need_it(matrix, m3_convert, tmp_path):
    refused = m3_convert(NANO, tmp_path / "out.gguf", "--type", "iq2_xxs")
    assert refused.code == 2
    assert "--imatrix" in refused.err
    matrix.save(tmp_path / "m.gguf")
    assert m3_convert(NANO, tmp_path / "out.gguf", "--type", "iq2_xxs", "--imatrix", tmp_path / "m.gguf").code == 0
    lacking = {name: entry for name, entry in matrix.entries.items() if name != EXPERTS}
    dataclasses.replace(matrix, entries=lacking).save(tmp_path / "m.gguf")
    refused = m3_convert(NANO, tmp_path / "out2.gguf", "--type", "iq2_xxs", "--imatrix", tmp_path / "m.gguf")
    assert refused.code == 2
    assert refused.error.endswith(f"{tmp_path / 'm.gguf'}: IQ2_XXS needs importance, which it lacks (for {EXPERTS})")
    assert not (tmp_path / "out2.gguf").exists()


def test_an_expert_that_the_text_never_reached_falls_back_alone(matrix, m3_convert, tmp_path):
    entry = matrix.entries[EXPERTS]
    counts = entry.counts.copy()
    counts[3] = 0
    sums = entry.sums.copy()
    sums[3] = 0
    gap = dataclasses.replace(matrix, entries={**matrix.entries, EXPERTS: Entry(sums, counts)})
    for name, some in (("whole", matrix), ("gap", gap)):
        some.save(tmp_path / "m.gguf")
        run = m3_convert(
            NANO, tmp_path / f"{name}.gguf", "--type", "q4_k_m", "--imatrix", tmp_path / "m.gguf", "--json"
        )
        assert run.code == 0
        assert run.json["importance"]["unreached"] == ({EXPERTS: [3]} if name == "gap" else {})
        assert ("1 expert matrices in 1 tensors were never reached" in run.err) == (name == "gap")
    assert m3_convert(NANO, tmp_path / "plain.gguf", "--type", "q4_k_m").code == 0
    whole, gap_values, plain = (values(tmp_path / f"{n}.gguf", EXPERTS) for n in ("whole", "gap", "plain"))
    same = [np.array_equal(a, b) for a, b in zip(gap_values, whole, strict=True)]
    assert same == [expert != 3 for expert in range(8)]
    assert np.array_equal(gap_values[3], plain[3])


def test_one_of_another_model(matrix, m3_convert, tmp_path):
    short = {name: Entry(entry.sums[:, :-1], entry.counts) for name, entry in matrix.entries.items()}
    dataclasses.replace(matrix, entries=short).save(tmp_path / "m.gguf")
    refused = m3_convert(NANO, tmp_path / "out.gguf", "--type", "q4_k_m", "--imatrix", tmp_path / "m.gguf")
    assert refused.code == 2
    assert "expected 256x1" in refused.err
    assert m3_convert(NANO, tmp_path / "out.gguf", "--imatrix", tmp_path / "absent").code == 2
