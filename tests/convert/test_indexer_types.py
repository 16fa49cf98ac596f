"""Types of the index projections: F32, F16 and BF16 where the values survive, less only with leave and said aloud."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from checkpoint_tensors import Tensor
from m3_convert.encode import lost
from m3_convert.recipe import recipe_names
from m3_runtime.quantize import TensorType

SOURCE = "language_model.model.layers.1.self_attn.index_q_proj.weight"
NAME = "blk.1.indexer.q_proj.weight"
SHAPE = (96, 64)  # two index heads of 48 and the hidden width
F16, BF16 = ("--rule", "*.indexer.*_proj.weight=f16"), ("--rule", "*.indexer.*_proj.weight=bf16")
ALLOW = "--allow-lossy-indexer"


@pytest.fixture
def converted(make_folder, m3_convert, tmp_path: Path) -> Callable[..., tuple[str, object, object]]:
    """converted(values, dtype, *options) -> (type, values, m3.indexer_lossy) of one index projection, or the error."""

    def call(values: np.ndarray | None, dtype: str, *options: str) -> tuple[str, object, object]:
        def change(tensors: dict[str, Tensor]) -> None:
            if values is not None:
                bits = values.astype(np.float32)
                data = (bits.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else bits
                tensors[SOURCE] = Tensor(dtype, SHAPE, data.tobytes())

        outcome = m3_convert(make_folder(tensors=change), tmp_path / "out.gguf", *options)
        if outcome.code:
            assert outcome.code == 2 and not list(tmp_path.glob("out.gguf*"))
            return outcome.error, None, None
        reader = gguf.GGUFReader(tmp_path / "out.gguf")
        tensor = next(t for t in reader.tensors if t.name == NAME)
        lossy = reader.fields.get("m3.indexer_lossy")
        found = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(SHAPE)
        return tensor.tensor_type.name, found, lossy and lossy.contents()

    return call


@pytest.fixture
def weights() -> np.ndarray:
    """Values of BF16 that F16 holds, but for one of 2^-20 with eight significant bits in a row that reaches 0.05."""
    drawn = np.random.default_rng(1).normal(0, 0.05, SHAPE).astype(np.float32)
    drawn = np.copysign(np.maximum(np.abs(drawn), 2.0**-14), drawn).astype(np.float32)
    values = (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    values[5, 7] = 2.0**-20 * 1.9921875
    return values


@pytest.mark.parametrize("name", ["f16", "bf16", *(n for n in recipe_names() if n not in ("iq1_m", "iq2_xxs"))])
def test_types_and_recipes_leave_them_f32(make_folder, m3_convert, name: str) -> None:
    plan = m3_convert(make_folder(), "--type", name, "--dry-run", "--json").json
    assert {t["type"] for t in plan["tensors"] if ".indexer." in t["name"]} == {"F32"}


def test_f16_where_the_values_survive(converted, weights) -> None:
    kind, found, lossy = converted(weights, "BF16", *F16)
    assert (kind, lossy) == ("F16", None)
    np.testing.assert_array_equal(found, weights.astype(np.float16).astype(np.float32))
    different = np.argwhere(found != weights)
    assert different.tolist() == [[5, 7]] and abs(found[5, 7] - weights[5, 7]) < 2.0**-25


def test_f16_of_f32_values_is_within_its_own_rounding(converted) -> None:
    values = np.random.default_rng(2).normal(0, 0.05, SHAPE).astype(np.float32)
    kind, found, _ = converted(values, "F32", *F16)
    assert kind == "F16" and not np.array_equal(found, values)


def test_f16_where_they_do_not(converted, weights) -> None:
    weights[9] *= 2.0**-16
    weights[70, 3:5] = 2.0**-22  # exact: F16 has this one
    error, _, _ = converted(weights, "BF16", *F16)
    n = int(lost(TensorType.F16, weights).sum())
    assert f"{NAME} ({SOURCE}): {n} index values are not within 2^-11 of themselves or 2^-18 of the largest" in error
    assert n > 30 and "as F16, the first in row 9, column " in error
    assert error.endswith("; F32 holds them, --allow-lossy-indexer takes them as they are")


def test_f16_with_leave(converted, weights) -> None:
    weights[9] *= 2.0**-16
    kind, found, lossy = converted(weights, "BF16", *F16, ALLOW)
    assert (kind, lossy) == ("F16", True)
    np.testing.assert_array_equal(found, weights.astype(np.float16).astype(np.float32))


def test_bf16_of_a_bf16_source_is_exact(converted, weights) -> None:
    kind, found, lossy = converted(weights, "BF16", *BF16)
    assert (kind, lossy) == ("BF16", None)
    np.testing.assert_array_equal(found, weights)


def test_bf16_of_an_f32_source_rounds_too_far(converted) -> None:
    values = np.full(SHAPE, 0.5, np.float32)
    values[3, 2] = 0.5 + 2.0**-10
    error, _, _ = converted(values, "F32", *BF16)
    assert "1 index values are not within 2^-11" in error and "as BF16, the first in row 3, column 2" in error


def test_f16_overflow(converted) -> None:
    values = np.full(SHAPE, 0.5, np.float32)
    values[3, 2] = 1e5
    assert "1 values overflow F16" in converted(values, "F32", *F16)[0]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_below_f16_only_with_leave(make_folder, m3_convert, tmp_path, kind: str) -> None:
    folder, rule = make_folder(), ("--rule", f"*.indexer.*_proj.weight={kind}")
    outcome = m3_convert(folder, tmp_path / "out.gguf", *rule)
    assert outcome.code == 2 and not list(tmp_path.glob("out.gguf*"))
    assert (
        f"would make blk.1.indexer.k_proj.weight {kind.upper()}: index projections choose the blocks" in outcome.error
    )
    assert outcome.error.endswith("need --allow-lossy-indexer")
    assert m3_convert(folder, tmp_path / "out.gguf", *rule, ALLOW).code == 0
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["m3.indexer_lossy"].contents() is True
    types = {t.tensor_type.name for t in reader.tensors if t.name.endswith("_proj.weight")}
    assert types == {kind.upper()}
    assert {t.tensor_type.name for t in reader.tensors if "norm" in t.name} == {"F32"}


def test_leave_that_nothing_needs_is_noted_and_not_in_the_file(make_folder, m3_convert, tmp_path) -> None:
    outcome = m3_convert(make_folder(), tmp_path / "out.gguf", ALLOW)
    assert outcome.code == 0 and "note: --allow-lossy-indexer changes nothing" in outcome.err
    assert "m3.indexer_lossy" not in gguf.GGUFReader(tmp_path / "out.gguf").fields


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        (TensorType.F16, [1.5 * 2.0**-24, 2.0**-7], False),  # off by 2^-25: 2^-18 of the largest
        (TensorType.F16, [1.5 * 2.0**-24, -(2.0**-7) * (1 - 2.0**-8)], True),
        (TensorType.BF16, [1 + 2.0**-11, 0], False),
        (TensorType.BF16, [1 + 2.0**-10, 0], True),
        (TensorType.BF16, [1 + 2.0**-10, 2.0**8], False),
        (TensorType.BF16, [1 + 2.0**-10, 2.0**8 - 2], True),
    ],
)
def test_the_border_of_what_is_lost(kind: TensorType, row: list[float], expected: bool) -> None:
    assert lost(kind, np.array([row, [0, 0]], np.float32)).tolist() == [[expected, False], [False, False]]


@pytest.mark.parametrize("kind", [TensorType.F16, TensorType.BF16])
@given(data=st.data())
def test_what_counts_as_lost(kind: TensorType, data: st.DataObject) -> None:
    elements = st.floats(-60000, 60000, width=32) | st.floats(-(2.0**-12), 2.0**-12, width=32)
    values = data.draw(arrays.arrays(np.float32, (3, 4), elements=elements))
    exact = values.astype(np.float64)
    if kind is TensorType.F16:
        stored = values.astype(np.float16).astype(np.float64)
    else:
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        stored = rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    limit = np.maximum(np.abs(exact) * 2.0**-11, np.abs(exact).max(axis=1, keepdims=True) * 2.0**-18)
    # Products of the smallest numbers are rounded in float32.
    sure = np.abs(np.abs(stored - exact) - limit) > 2.0**-140
    np.testing.assert_array_equal(lost(kind, values)[sure], (np.abs(stored - exact) > limit)[sure])
