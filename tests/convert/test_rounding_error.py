"""Errors of types in tensors, and which types a tensor may get."""

import numpy as np
import pytest

from m3_convert import rounding_error
from m3_convert.checkpoint import load_checkpoint
from m3_convert.decode import SourceReader, read_values
from m3_convert.imatrix import Entry, ImportanceMatrix
from m3_convert.plan import plan_conversion
from m3_convert.precision import choose
from m3_convert.rounding_error import rounding_errors
from m3_convert.type_ladder import bits, flat, free_tensors, ladder, tensor_bytes
from m3_runtime.quantize import TensorType as T
from m3_runtime.quantize import dequantize_rows, quantize_rows

EXPERTS = "blk.1.ffn_down_exps.weight"


@pytest.fixture
def plan(tiny_checkpoint):
    return plan_conversion(load_checkpoint(tiny_checkpoint), choose("q4_0"))


def errors(plan, name, types, importance=None):
    with SourceReader(plan.source.shards) as reader:
        return rounding_errors(plan.tensor(name), types, importance, reader, 1)


def values(plan, name):
    tensor = plan.tensor(name)
    with SourceReader(plan.source.shards) as reader:
        for m in tensor.matrices:
            reader.fetch(m)
        return [read_values(reader, m, 0, m.rows) for m in tensor.matrices]


def noise(x, type_, importance, weights):
    q = dequantize_rows(type_, quantize_rows(type_, x, 1, importance), x.shape[1])
    return ((q - x).astype(np.float64) ** 2 @ weights).sum(), (x.astype(np.float64) ** 2 @ weights).sum()


def test_the_error_is_weighted_by_importance_and_by_how_often_an_expert_is_used(plan):
    random = np.random.default_rng(4)
    experts = values(plan, EXPERTS)
    columns = experts[0].shape[1]
    means = random.uniform(0.1, 5, (len(experts), columns)).astype(np.float32)
    counts = np.array([100, 0, 7, 30], np.float32)
    known = ImportanceMatrix("m", {EXPERTS: Entry(means * counts[:, None], counts)}, (), 1, 1)
    error = power = 0.0
    for i in (0, 2, 3):
        weights = known.for_matrix(EXPERTS, i)
        e, p = noise(experts[i], T.Q4_0, weights, weights.astype(np.float64))
        error, power = error + counts[i] * e, power + counts[i] * p
    found = errors(plan, EXPERTS, [T.Q4_0, T.BF16, T.Q8_0], known)
    assert found[T.Q4_0] == pytest.approx(error / power, rel=1e-6)
    assert found[T.BF16] == 0 and 0 < found[T.Q8_0] < found[T.Q4_0] / 50


def test_without_importance_all_columns_count_alike(plan):
    (x,) = values(plan, "token_embd.weight")
    e, p = noise(x, T.Q4_0, None, np.ones(x.shape[1]))
    assert errors(plan, "token_embd.weight", [T.Q4_0])[T.Q4_0] == pytest.approx(e / p, rel=1e-6)


def test_a_sample_stands_for_a_large_tensor(plan, monkeypatch):
    whole = errors(plan, "output.weight", [T.Q4_0])[T.Q4_0]
    monkeypatch.setattr(rounding_error, "SAMPLE_VALUES", 1 << 12)
    part = errors(plan, "output.weight", [T.Q4_0])[T.Q4_0]
    assert part != whole and part == pytest.approx(whole, rel=0.1)
    monkeypatch.setattr(rounding_error, "SAMPLE_EXPERTS", 2)
    assert errors(plan, EXPERTS, [T.Q4_0])[T.Q4_0] == pytest.approx(0.0067, rel=0.5)


def test_what_a_search_may_choose(plan):
    free = {t.name: t for t in free_tensors(plan, {"output.weight"})}
    assert EXPERTS in free and "output.weight" not in free
    assert not any("indexer" in name or "norm" in name or "gate_inp" in name for name in free)
    # Rows of 128: K types fall back to types with blocks of 32. Ascending, up to the precision of the source.
    types = ladder(free["blk.0.attn_q.weight"], {T.Q4_0}, None)
    assert types == (T.Q4_0, T.IQ4_NL, T.Q4_1, T.Q5_1, T.Q8_0, T.BF16)
    sizes = [tensor_bytes(free["blk.0.attn_q.weight"], t) for t in types]
    assert sizes == sorted(sizes)


def test_types_that_need_importance_are_for_tensors_that_have_some(plan, tiny_checkpoint):
    tensor = next(t for t in plan.tensors if t.shape[-1] % 256 == 0 and t.name.endswith("attn_output.weight"))
    known = ImportanceMatrix("m", {tensor.name: Entry(np.ones((1, 256), np.float32), np.ones(1, np.float32))}, (), 1, 1)
    assert T.IQ2_XXS not in ladder(tensor, {T.IQ3_S}, None) and T.IQ3_S in ladder(tensor, {T.IQ3_S}, None)
    assert T.IQ2_XXS in ladder(tensor, {T.IQ3_S}, known)
    assert T.IQ3_S not in ladder(tensor, {T.Q4_K}, known)  # not asked for by the recipe


def test_one_type_for_all():
    ladders = {"a": (T.Q4_K, T.Q8_0, T.BF16), "b": (T.Q4_1, T.Q8_0, T.F32)}
    assert flat(ladders, T.Q4_K) == {"a": T.Q4_K, "b": T.Q4_1}
    assert flat(ladders, T.Q8_0) == {"a": T.Q8_0, "b": T.Q8_0}
    assert flat(ladders, T.F32) == {"a": T.BF16, "b": T.F32}
    assert bits(T.Q4_K) == 4.5 and bits(T.BF16) == 16
