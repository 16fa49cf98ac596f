"""A GGUF file as the source of m3-convert: what is kept, what changes, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFReader

from m3_convert.precision import always_f32, is_index_projection
from m3_runtime.engine import GGUF
from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows
from make_checkpoint import CheckpointSpec

Make = Callable[..., Path]

DOWN = "blk.1.ffn_down_exps.weight"
UP = "blk.1.ffn_up_exps.weight"
INDEX = "blk.1.indexer.q_proj.weight"


@pytest.fixture
def convert(m3_convert, tmp_path):
    """convert(source, "name.gguf", ...) -> path, which must succeed."""

    def call(source: Path, name: str, *arguments: object) -> Path:
        outcome = m3_convert(source, tmp_path / name, *arguments)
        assert outcome.code == 0, outcome.err
        return tmp_path / name

    return call


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    with GGUF(path) as file:
        return {t.name: (t.type, bytes(file.tensor_data(t.name))) for t in file.tensors}


def keys(path: Path) -> dict[str, object]:
    with GGUF(path) as file:
        return dict(file.metadata)


@pytest.mark.parametrize("type_", ["auto", "q8_0", "f32", "q4_0", "iq4_nl"])
@pytest.mark.parametrize("full", ["bf16", "f32"])
def test_from_a_full_file_as_from_the_folder(make_folder: Make, convert, type_: str, full: str) -> None:
    folder = make_folder()
    direct = convert(folder, "direct.gguf", "--type", "bf16" if type_ == "auto" and full == "bf16" else type_)
    again = convert(convert(folder, "full.gguf", "--type", full), "again.gguf", "--type", type_)
    if type_ == "auto" and full == "f32":
        assert again.read_bytes() == (again.parent / "full.gguf").read_bytes()
    else:
        assert again.read_bytes() == direct.read_bytes()


def test_auto_keeps_every_byte(make_folder: Make, convert) -> None:
    q8 = convert(make_folder(), "q8.gguf", "--type", "q4_k_m", "--rule", f"{INDEX}=f16")
    for options in ((), ("--rule", f"{INDEX}=f16")):
        assert convert(q8, "plain.gguf", *options).read_bytes() == q8.read_bytes()


def test_split_and_joined_again(make_folder: Make, convert, tmp_path: Path) -> None:
    whole = convert(make_folder(), "whole.gguf", "--type", "q4_0")
    assert not convert(whole, "parts.gguf", "--split-max-size", "100000").exists()
    first = sorted(tmp_path.glob("parts-*.gguf"))[0]
    assert len(list(tmp_path.glob("parts-*.gguf"))) > 2
    assert convert(first, "joined.gguf").read_bytes() == whole.read_bytes()
    (tmp_path / "folder").mkdir()
    for part in tmp_path.glob("parts-*.gguf"):
        part.rename(tmp_path / "folder" / part.name)
    assert convert(tmp_path / "folder", "joined2.gguf").read_bytes() == whole.read_bytes()


def test_q8_0_is_rounded_from_its_own_values(make_folder: Make, convert, small: CheckpointSpec) -> None:
    q8 = convert(make_folder(), "q8.gguf", "--type", "q8_0")
    q4 = contents(convert(q8, "q4.gguf", "--type", "q4_1"))
    for name, (type_, data) in contents(q8).items():
        if type_ != TensorType.Q8_0:
            assert q4[name] == (type_, data), name
            continue
        columns = small.inter if "ffn_down_exps" in name else None
        with GGUF(q8) as file:
            columns = next(t.ne[0] for t in file.tensors if t.name == name)
        rows = dequantize_rows(TensorType.Q8_0, np.frombuffer(data, np.uint8).reshape(-1, columns // 32 * 34), columns)
        assert q4[name] == (TensorType.Q4_1, quantize_rows(TensorType.Q4_1, rows).tobytes()), name


def test_metadata_is_carried_over(make_folder: Make, convert, tmp_path: Path) -> None:
    (folder := make_folder()).joinpath("README.md").write_text("---\nlicense: mit\ntags: [a, b]\n---\n")
    first = convert(folder, "first.gguf", "--type", "q8_0", "--split-max-size", "300000")
    second = convert(
        sorted(tmp_path.glob("first-*.gguf"))[0], "second.gguf", "--type", "q4_k_m", "--rule", f"{DOWN}=f16"
    )
    assert not first.exists()
    direct = keys(convert(folder, "direct.gguf", "--type", "q4_k_m", "--rule", f"{DOWN}=f16"))
    assert keys(second) == direct
    assert direct["general.license"] == "mit" and "q4_k_m" in direct["m3.recipe_name"]


def test_what_a_first_conversion_said_of_its_types_is_not_repeated(make_folder: Make, convert) -> None:
    q8 = convert(make_folder(), "q8.gguf", "--type", "q8_0", "--rule", f"{DOWN}=f16")
    assert {"m3.recipe", "m3.rules"} <= keys(q8).keys()
    f32 = keys(convert(q8, "f32.gguf", "--type", "f32"))
    assert f32["general.file_type"] == 0 and not [key for key in f32 if key.startswith("m3.")]


def test_keys_of_any_type_survive(make_folder: Make, convert, tmp_path: Path) -> None:
    source = convert(make_folder(), "source.gguf", "--type", "f16")
    writer = gguf.GGUFWriter(tmp_path / "more.gguf", "minimax-m3")
    reader = GGUFReader(source)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    kind = gguf.GGUFValueType
    extra = {
        "x.u8": (255, kind.UINT8, None),
        "x.i64": (-(2**63), kind.INT64, None),
        "x.f64": (1e-300, kind.FLOAT64, None),
        "x.flags": ([True, False], kind.ARRAY, kind.BOOL),
        "x.i16s": ([-1, 2], kind.ARRAY, kind.INT16),
        "x.names": (["ä", ""], kind.ARRAY, kind.STRING),
    }
    for key, (value, type_, sub) in extra.items():
        writer.add_key_value(key, value, type_, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = GGUFReader(convert(tmp_path / "more.gguf", "out.gguf", "--type", "q8_0"))
    for key, (value, type_, sub) in extra.items():
        field = out.fields[key]
        assert field.types[0] is type_ and (sub is None or field.types[-1] is sub) and field.contents() == value


def test_below_q8_0_only_with_leave(make_folder: Make, convert, m3_convert, tmp_path: Path) -> None:
    q4 = convert(make_folder(), "q4.gguf", "--type", "q4_0")
    outcome = m3_convert(q4, tmp_path / "out.gguf", "--type", "q8_0")
    assert outcome.code == 2 and "output.weight (Q4_0 -> Q8_0)" in outcome.error
    assert "--allow-requantize" in outcome.error and not (tmp_path / "out.gguf").exists()
    assert "m3.requantized" not in keys(convert(q4, "f32.gguf", "--type", "f32"))
    again = convert(q4, "again.gguf", "--type", "q5_0", "--allow-requantize")
    assert keys(again)["m3.requantized"] is True
    # It stays said, whatever becomes of the file.
    assert keys(convert(again, "later.gguf", "--type", "f32"))["m3.requantized"] is True
    kept = m3_convert(q4, tmp_path / "kept.gguf", "--allow-requantize")
    assert kept.code == 0 and "--allow-requantize changes nothing" in kept.err


def test_values_of_a_lower_type_stay_marked(make_folder: Make, convert, m3_convert, tmp_path: Path) -> None:
    """A larger type does not give back what was lost: what is made of it needs the same leave, and says the same."""
    q4 = convert(make_folder(), "q4.gguf", "--type", "q8_0", "--rule", f"{DOWN}=q4_0", "--rule", f"{UP}=q4_1")
    origins = [f"{UP}=Q4_1", f"{DOWN}=Q4_0"]
    outcome = m3_convert(q4, tmp_path / "f32.gguf", "--type", "f32", "--json")
    f32 = tmp_path / "f32.gguf"
    note = f"2 tensors hold values of types below Q8_0 ({DOWN}: F32 of Q4_0): the file says so (m3.dequantized)"
    assert outcome.code == 0 and f"note: {note}" in outcome.err and outcome.json["warnings"] == [note]
    assert sorted(keys(f32)["m3.dequantized"]) == sorted(origins) and "m3.requantized" not in keys(f32)

    for again in (convert(f32, "again.gguf"), convert(f32, "other.gguf", "--rule", "output.weight=q4_0")):
        assert sorted(keys(again)["m3.dequantized"]) == sorted(origins)
    for type_ in ("f16", "bf16", "q8_0", "q4_0"):
        outcome = m3_convert(f32, tmp_path / "out.gguf", "--type", type_)
        assert outcome.code == 2 and not (tmp_path / "out.gguf").exists()
        assert f"2 tensors of the source are below Q8_0 already: {DOWN} (F32 of Q4_0 -> {type_.upper()})" in (
            outcome.error
        )
        assert "--allow-requantize" in outcome.error
    assert m3_convert(f32, tmp_path / "rest.gguf", "--rule", "output.weight=q4_0").code == 0

    plan = m3_convert(f32, "--type", "bf16", "--allow-requantize", "--dry-run", "--json")
    twice = f"2 tensors that were below Q8_0 are rounded once more ({DOWN}: F32 of Q4_0 -> BF16): "
    assert any(warning.startswith(twice) for warning in plan.json["warnings"]) and f"note: {twice}" in plan.err
    assert plan.json["requantized"] is True and plan.json["dequantized"] == {UP: "Q4_1", DOWN: "Q4_0"}
    assert {t["name"]: t["origin"] for t in plan.json["tensors"] if t["origin"]} == {UP: "Q4_1", DOWN: "Q4_0"}
    bf16 = convert(f32, "bf16.gguf", "--type", "bf16", "--allow-requantize")
    assert sorted(keys(bf16)["m3.dequantized"]) == sorted(origins) and keys(bf16)["m3.requantized"] is True
    assert m3_convert(bf16, tmp_path / "out.gguf", "--type", "q8_0").code == 2
    low = convert(bf16, "low.gguf", "--type", "q8_0", "--rule", f"{DOWN}=q2_k", "--allow-requantize")
    assert keys(low)["m3.dequantized"] == [f"{UP}=Q4_1"] and keys(low)["m3.requantized"] is True
    shown = m3_convert(f32, "--explain", DOWN).out
    assert f"from {DOWN} (F32 of Q4_0)" in shown


@pytest.mark.parametrize("word", [b"=Q8_0", b"=Q4_9", b"=f16_", b"_Q4_0"])
def test_a_mark_that_cannot_be_right(make_folder: Make, convert, m3_convert, tmp_path: Path, word: bytes) -> None:
    q4 = convert(make_folder(), "q4.gguf", "--rule", f"{DOWN}=q4_0")
    f32 = convert(q4, "f32.gguf", "--type", "f32")
    f32.write_bytes(f32.read_bytes().replace(f"{DOWN}=Q4_0".encode(), DOWN.encode() + word))
    outcome = m3_convert(f32, tmp_path / "out.gguf", "--type", "q4_0")
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
    assert "f32.gguf: m3.dequantized: expected a tensor of the file and a type below Q8_0, found " in outcome.error


def test_auto_keeps_a_rounded_index_and_says_so(make_folder: Make, convert, m3_convert, tmp_path: Path) -> None:
    rules = ("--rule", "*.indexer.q_proj.weight=q8_0", "--rule", "*.indexer.k_proj.weight=f16")
    lossy = convert(make_folder(), "lossy.gguf", *rules, "--allow-lossy-indexer")
    outcome = m3_convert(lossy, tmp_path / "same.gguf", "--json")
    assert outcome.code == 0 and "index projections of the source are rounded already" in outcome.err
    assert (tmp_path / "same.gguf").read_bytes() == lossy.read_bytes()
    assert m3_convert(lossy, "--explain", INDEX).out.startswith(f"{INDEX}: Q8_0 by --type auto: the source's own")
    ruled = convert(lossy, "ruled.gguf", "--rule", f"{DOWN}=q8_0")
    assert contents(ruled)[INDEX] == contents(lossy)[INDEX] and keys(ruled)["m3.indexer_lossy"] is True
    # Another program's file may not say it.
    silent = tmp_path / "silent.gguf"
    silent.write_bytes(lossy.read_bytes().replace(b"m3.indexer_lossy", b"x3.indexer_lossy"))
    told = convert(silent, "told.gguf")
    assert contents(told) == contents(lossy) and keys(told)["m3.indexer_lossy"] is True
    # As F32 it is no longer to be seen from the types.
    full = convert(lossy, "full.gguf", "--type", "f32")
    outcome = m3_convert(full, "--type", "q8_0", "--dry-run", "--json")
    assert outcome.json["lossy_indexer"] is True
    assert "index projections of the source were rounded before (m3.indexer_lossy): the file may read" in outcome.err
    useless = m3_convert(lossy, "--allow-lossy-indexer", "--dry-run")
    assert "--allow-lossy-indexer changes nothing" in useless.err


def test_one_tensor_only(make_folder: Make, convert, m3_convert, tmp_path: Path) -> None:
    q4 = convert(make_folder(), "q4.gguf", "--type", "q4_0")
    outcome = m3_convert(q4, tmp_path / "out.gguf", "--rule", f"{DOWN}=q4_1")
    assert outcome.code == 2 and "1 tensors of the source are below Q8_0" in outcome.error
    out = convert(q4, "out.gguf", "--rule", f"{DOWN}=q4_1", "--allow-requantize")
    before, after = contents(q4), contents(out)
    assert [name for name in before if before[name] != after[name]] == [DOWN]


def test_an_index_that_is_rounded_already_is_said(make_folder: Make, convert, m3_convert, tmp_path: Path) -> None:
    folder = make_folder()
    lossy = convert(folder, "lossy.gguf", "--rule", "*.indexer.?_proj.weight=q8_0", "--allow-lossy-indexer")
    outcome = m3_convert(lossy, tmp_path / "out.gguf", "--type", "f32")
    assert (
        outcome.code == 0 and "index projections of the source are rounded already (blk.1.indexer.k_proj" in outcome.err
    )
    assert keys(tmp_path / "out.gguf")["m3.indexer_lossy"] is True
    half = convert(folder, "half.gguf", "--rule", f"{INDEX}=f16")
    outcome = m3_convert(half, tmp_path / "full.gguf", "--type", "f32")
    assert outcome.code == 0 and "rounded already" not in outcome.err
    assert "m3.indexer_lossy" not in keys(tmp_path / "full.gguf")
    with GGUF(tmp_path / "full.gguf") as file:
        assert all(t.type == TensorType.F32 for t in file.tensors if is_index_projection(t.name) or always_f32(t.name))


def test_broken_scales_are_found(make_folder: Make, convert, m3_convert, tmp_path: Path) -> None:
    q8 = convert(make_folder(), "q8.gguf", "--type", "q8_0")
    with GGUF(q8) as file:
        place = next(t for t in file.tensors if t.name == DOWN)
    content = bytearray(q8.read_bytes())
    content[place.offset + 34 * 5 : place.offset + 34 * 5 + 2] = b"\x00\x7e"  # NaN
    q8.write_bytes(content)
    for arguments in ((), ("--type", "q4_0"), ("--type", "f32")):
        outcome = m3_convert(q8, tmp_path / "out.gguf", *arguments)
        assert outcome.code == 2 and f"{DOWN}, expert 0" in outcome.error and "NaN" in outcome.error
        assert "row 5, column 0" in outcome.error
        assert not (tmp_path / "out.gguf").exists()


def test_the_source_is_not_written_over(make_folder: Make, convert, m3_convert, tmp_path: Path) -> None:
    q8 = convert(make_folder(), "q8.gguf", "--type", "q8_0")
    before = q8.read_bytes()
    outcome = m3_convert(q8, q8, "--type", "q4_0")
    assert outcome.code == 2 and "is part of the source" in outcome.error and q8.read_bytes() == before
    convert(q8, "p.gguf", "--split-max-size", "300000")
    first = sorted(tmp_path.glob("p-*.gguf"))[0]
    outcome = m3_convert(first, tmp_path / "p.gguf", "--type", "f16", "--split-max-size", "300000")
    assert outcome.code == 0 or "is part of the source" in outcome.error
    assert contents(first)


@pytest.mark.parametrize("damage", ["truncated", "noise", "empty", "other architecture"])
def test_files_that_are_no_models(make_folder: Make, convert, m3_convert, tmp_path: Path, damage: str) -> None:
    q8 = convert(make_folder(), "q8.gguf", "--type", "q8_0")
    content = q8.read_bytes()
    broken = {
        "truncated": content[:-1000],
        "noise": b"not a GGUF file, but long enough to be looked at",
        "empty": b"",
        "other architecture": content.replace(b"minimax-m3", b"minimax-mX"),
    }
    (tmp_path / "bad.gguf").write_bytes(broken[damage])
    outcome = m3_convert(tmp_path / "bad.gguf", tmp_path / "out.gguf")
    assert outcome.code == 2 and "bad.gguf" in outcome.error and outcome.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.glob("out*")) == []


def test_resumed_from_a_gguf(make_folder: Make, convert, m3_convert, tmp_path: Path, monkeypatch) -> None:
    q8 = convert(make_folder(), "q8.gguf", "--type", "q8_0")
    whole = convert(q8, "whole.gguf", "--type", "q4_0").read_bytes()
    monkeypatch.setattr("m3_convert.part_file.RECORD_BYTES", 1)
    with monkeypatch.context() as patch:
        calls = iter(range(30))

        def interrupted(*_: object) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt

        patch.setattr("m3_convert.part_file.PartFile._record", _after(interrupted))
        assert m3_convert(q8, tmp_path / "out.gguf", "--type", "q4_0").code == 130
    assert (tmp_path / "out.gguf.part").exists()
    outcome = m3_convert(q8, tmp_path / "out.gguf", "--type", "q4_0")
    assert outcome.code == 0 and "goes on after" in outcome.err
    assert (tmp_path / "out.gguf").read_bytes() == whole


def _after(call: Callable[..., None]) -> Callable[..., None]:
    from m3_convert.part_file import PartFile

    record = PartFile._record

    def replaced(self: PartFile) -> None:
        record(self)
        call()

    return replaced


def test_with_importance(make_folder: Make, convert, m3_imatrix, tmp_path: Path, small: CheckpointSpec) -> None:
    folder = make_folder(replace(small, hidden=256, inter=256, shared_inter=256))
    full = convert(folder, "full.gguf", "--type", "bf16")
    (tmp_path / "text").write_text("Some words to read, over and over. " * 40)
    assert m3_imatrix(full, tmp_path / "i.gguf", "--text", tmp_path / "text", "--context", 64).code == 0
    options = ("--type", "iq2_xxs", "--imatrix", tmp_path / "i.gguf")
    assert convert(full, "a.gguf", *options).read_bytes() == convert(folder, "b.gguf", *options).read_bytes()
