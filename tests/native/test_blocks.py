"""Every storage type is read as the `gguf` package reads it, bit for bit, by m3_dequantize and by a whole model."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from m3_runtime import Model
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows, row_bytes
from make_checkpoint import CheckpointSpec, make_checkpoint
from native.blocks import QUANTIZED, block_bytes, n_scales, oracle_dequantize, random_blocks, set_scales
from native.test_quant import assert_same_floats
from tiny_model import convert

every_quantized_type = pytest.mark.parametrize("type_", QUANTIZED, ids=lambda t: t.name)


def words(blocks, start, stop, dtype):
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype).astype(np.int64)


def parts(numbers, shifts, bits):
    """The bit fields of each number, side by side."""
    return (numbers[..., None] >> np.array(shifts) & (1 << bits) - 1).reshape(len(numbers), -1)


# The codebook entries and the sign codes that blocks refer to, by type: function of the blocks, size of the table.
GROUP = (0, 7, 14, 21)
CODES = {
    "IQ2_XXS entry": (TensorType.IQ2_XXS, lambda b: b[:, 2:].reshape(-1, 8, 8)[..., :4], 256),
    "IQ2_XXS signs": (TensorType.IQ2_XXS, lambda b: parts(words(b, 2, 66, np.uint32)[:, 1::2], GROUP, 7), 128),
    "IQ2_XS entry": (TensorType.IQ2_XS, lambda b: words(b, 2, 66, np.uint16) & 511, 512),
    "IQ2_XS signs": (TensorType.IQ2_XS, lambda b: words(b, 2, 66, np.uint16) >> 9, 128),
    "IQ2_S entry": (
        TensorType.IQ2_S,
        lambda b: b[:, 2:34] | parts(words(b, 66, 74, np.uint8), (0, 2, 4, 6), 2) << 8,
        1024,
    ),
    "IQ3_XXS entry": (TensorType.IQ3_XXS, lambda b: b[:, 2:66], 256),
    "IQ3_XXS signs": (TensorType.IQ3_XXS, lambda b: parts(words(b, 66, 98, np.uint32), GROUP, 7), 128),
    "IQ3_S entry": (TensorType.IQ3_S, lambda b: b[:, 2:66] | parts(words(b, 66, 74, np.uint8), range(8), 1) << 8, 512),
    "IQ1_S entry": (
        TensorType.IQ1_S,
        lambda b: b[:, 2:34] | parts(words(b, 34, 50, np.uint16), (0, 3, 6, 9), 3) << 8,
        2048,
    ),
    "IQ1_M entry": (TensorType.IQ1_M, lambda b: b[:, :32] | parts(words(b, 32, 48, np.uint8), (0, 4), 3) << 8, 2048),
}


@every_quantized_type
def test_sizes_are_those_of_gguf(type_):
    elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_.name]]
    assert int(gguf.GGMLQuantizationType[type_.name]) == type_
    assert type_.block_size == elements
    assert row_bytes(type_, 3 * elements) == 3 * n_bytes


@every_quantized_type
def test_random_blocks_are_read_as_gguf_reads_them(type_):
    blocks = random_blocks(type_, 1500, np.random.default_rng(type_))
    assert_same_floats(dequantize_rows(type_, blocks, type_.block_size), oracle_dequantize(type_, blocks))


@pytest.mark.parametrize("what", CODES)
def test_every_code_is_read_as_gguf_reads_it(what):
    type_, codes_of, size = CODES[what]
    blocks = random_blocks(type_, 1500, np.random.default_rng(77), scale=1.0)
    assert np.array_equal(np.unique(codes_of(blocks)), np.arange(size)), "the blocks do not reach every code"
    assert_same_floats(dequantize_rows(type_, blocks, type_.block_size), oracle_dequantize(type_, blocks))


@every_quantized_type
def test_rows_of_several_blocks(type_):
    n = 3 * type_.block_size
    rows = random_blocks(type_, 21, np.random.default_rng(8)).reshape(7, -1)
    one = dequantize_rows(type_, rows, n, threads=1)
    assert_same_floats(one, oracle_dequantize(type_, rows))
    for threads in (2, 8):
        assert_same_floats(dequantize_rows(type_, rows, n, threads=threads), one)


EXTREMES = (0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14, -1.0, 65504.0, -65504.0, np.inf, -np.inf, np.nan)


@every_quantized_type
def test_extreme_scales_are_read_as_gguf_reads_them(type_):
    if type_ is TensorType.MXFP4:
        blocks = random_blocks(type_, 256 * 8, np.random.default_rng(3))
        blocks[:, 0] = np.arange(len(blocks)) % 256  # 255, NaN in the OCP format, and 254 with 12 overflow
    else:
        grid = np.meshgrid(*[EXTREMES] * n_scales(type_))
        scales = np.stack([axis.ravel() for axis in grid], axis=1).astype(np.float16)
        blocks = np.repeat(random_blocks(type_, 8, np.random.default_rng(3)), len(scales), axis=0)
        set_scales(type_, blocks, np.tile(scales, (8, 1)))
    values = dequantize_rows(type_, blocks, type_.block_size)
    assert_same_floats(values, oracle_dequantize(type_, blocks))
    assert not np.isfinite(values).all()


@every_quantized_type
def test_rows_of_another_length_are_refused(type_):
    n = type_.block_size
    data = random_blocks(type_, 2, np.random.default_rng(2))
    for wrong in (n - 1, n + 1, n // 2):
        with pytest.raises(InputError, match=type_.name):
            row_bytes(type_, wrong)
        with pytest.raises(InputError, match=rf"{wrong} .*{type_.name}.* {n}"):
            dequantize_rows(type_, data, wrong)
    with pytest.raises(InputError, match="bytes"):
        dequantize_rows(type_, data[:, :-1].copy(), n)
    with pytest.raises(InputError, match="bytes"):
        dequantize_rows(type_, data, 2 * n)


@every_quantized_type
def test_data_at_an_odd_address_is_refused_or_read(type_):
    blocks = random_blocks(type_, 2, np.random.default_rng(4))
    room = np.empty(blocks.nbytes + 1, np.uint8)
    moved = room[1:].reshape(blocks.shape)
    moved[:] = blocks
    if type_ is TensorType.MXFP4:
        assert_same_floats(
            dequantize_rows(type_, moved, type_.block_size), dequantize_rows(type_, blocks, type_.block_size)
        )
    else:
        with pytest.raises(InputError, match="aligned"):
            dequantize_rows(type_, moved, type_.block_size)


# ---------------------------------------------------------------------------------------------- a whole model

# Every matrix has rows of 256.
SPEC = CheckpointSpec(
    layers=2,
    dense=1,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    rotary=32,
    index_dim=64,
    experts=3,
    top=2,
    inter=256,
    shared_inter=256,
    dense_inter=256,
    block=16,
    top_k=2,
    context=256,
    vit_layers=1,
)
IDS = np.random.default_rng(12).integers(0, 256, 90).astype(np.int32)


@pytest.fixture(scope="module")
def f32_model(tmp_path_factory: pytest.TempPathFactory) -> gguf.GGUFReader:
    folder = tmp_path_factory.mktemp("blocks")
    make_checkpoint(folder / "checkpoint", SPEC)
    return gguf.GGUFReader(convert(folder / "checkpoint", folder / "f32.gguf", "--type", "f32"))


def write_model(path: Path, model: gguf.GGUFReader, type_: TensorType, matrices: dict[str, np.ndarray]) -> Path:
    """A copy of the model with these tensors (bytes [..., row_bytes] of the type) in place of its own."""
    writer = gguf.GGUFWriter(path, "minimax-m3")
    for field in model.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in model.tensors:
        if tensor.name in matrices:
            writer.add_tensor(tensor.name, matrices[tensor.name], raw_dtype=gguf.GGMLQuantizationType(int(type_)))
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: Logits of rounded activations against unrounded ones, in standard deviations: the largest, and ten times the mean.
ROUNDED = 1.5e-3


def logits_and_blocks(path: Path, isa: str):
    with Model(path, isa=isa) as model, model.session(context=128, kv_type="f32", record=("blocks",)) as session:
        return session.eval(IDS, all_logits=True), session.selected_blocks(1)


@pytest.mark.parametrize("type_", list(TensorType), ids=lambda t: t.name)
def test_a_model_of_this_type_equals_it_in_f32(type_, f32_model, tmp_path):
    """Random bytes for all matrices but the router: logits and block lists are those of the values gguf reads. Without
    blocks to the bit, because a row is made float32 before it is multiplied; with blocks as far as activations
    rounded to 16 bits go."""
    random = np.random.default_rng(type_)
    quantized, plain = {}, {}
    for tensor in f32_model.tensors:
        if tensor.data.ndim < 2 or "ffn_gate_inp" in tensor.name:
            continue
        shape = (*tensor.data.shape[:-1], 256 // type_.block_size * block_bytes(type_))
        if type_ in QUANTIZED:
            n = tensor.data.size // type_.block_size
            data = random_blocks(type_, n, random, scale=1.0)
            spread = oracle_dequantize(type_, data).std()
            set_scales(type_, data, np.full((n, n_scales(type_)), 1 / (16 * spread), np.float16))
        else:
            values = random.standard_normal(tensor.data.shape, dtype=np.float32) / 16
            data = quantize_rows(type_, values.reshape(-1, 256))
        quantized[tensor.name] = data.reshape(shape)
        plain[tensor.name] = oracle_dequantize(type_, data.reshape(-1, shape[-1])).reshape(tensor.data.shape)
    quantized_path = write_model(tmp_path / "quantized.gguf", f32_model, type_, quantized)
    plain_path = write_model(tmp_path / "plain.gguf", f32_model, TensorType.F32, plain)
    for isa in ("scalar", "auto"):
        got, want = logits_and_blocks(quantized_path, isa), logits_and_blocks(plain_path, isa)
        assert np.isfinite(want[0]).all() and want[0].std() > 0.01
        if type_ in QUANTIZED:
            off = np.abs(got[0] - want[0]) / want[0].std()
            assert off.max() < ROUNDED and off.mean() < ROUNDED / 10, (isa, off.max(), off.mean())
        else:
            assert np.array_equal(got[0], want[0]), isa
        assert np.array_equal(got[1], want[1]), isa


def test_experts_are_bound_where_their_type_allows(f32_model, tmp_path):
    """One of three MXFP4 experts of 17 bytes a block may lie at an odd address; blocks that start with a float16 may
    not."""
    name, shape = "blk.1.ffn_gate_exps.weight", (3, 256)
    for type_, at_odd_address in ((TensorType.MXFP4, True), (TensorType.Q4_K, False)):
        data = np.zeros((*shape, 256 // type_.block_size * block_bytes(type_)), np.uint8)
        path = write_model(tmp_path / f"{type_.name}.gguf", f32_model, type_, {name: data})
        header = path.read_bytes()[: gguf.GGUFReader(path).data_offset]
        room = np.zeros(data[0].nbytes + 1, np.uint8)
        with Model.from_header(header, "header") as model:
            model.bind(name, room[:-1], 2)
            if at_odd_address:
                model.bind(name, room[1:], 2)
            else:
                with pytest.raises(InputError, match="aligned"):
                    model.bind(name, room[1:], 2)
            with pytest.raises(InputError, match=rf"{data[0].nbytes + 1} bytes, expected {data[0].nbytes}"):
                model.bind(name, room, 2)
