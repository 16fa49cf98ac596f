"""--split-max-size: the same tensors in several files, which any reader takes for one model."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from m3_convert import part_file
from m3_runtime.engine import GGUF, Model
from m3_runtime.errors import InputError
from m3_runtime.quantities import parse_size

OPTIONS = ("--type", "q8_0")


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.is_file()}


@pytest.fixture
def both(make_folder: Any, m3_convert: Any, tmp_path: Path) -> tuple[Path, list[Path]]:
    """The model whole, and the files of it that are at most 200 kB."""
    folder = make_folder()
    assert m3_convert(folder, tmp_path / "whole.gguf", *OPTIONS).code == 0
    (tmp_path / "split").mkdir()
    outcome = m3_convert(folder, tmp_path / "split" / "m3.gguf", "--split-max-size", "130000", "--json", *OPTIONS)
    assert outcome.code == 0
    return tmp_path / "whole.gguf", [Path(p) for p in outcome.json["files"]]


def test_sizes() -> None:
    parse = partial(parse_size, option="--split-max-size")
    assert [parse(text) for text in ("1", "500M", "40G", "2g", "3m")] == [
        1,
        500 * 10**6,
        40 * 10**9,
        2 * 10**9,
        3 * 10**6,
    ]
    assert parse("0" * 5000 + "7m") == 7 * 10**6 and parse(str(2**63 - 1)) == 2**63 - 1
    for text in ("", "0", "00", "0G", "-1G", "1.5G", "40 G", "4T", "G", "1e9", "٣"):
        with pytest.raises(InputError, match=r"--split-max-size .*: expected a number of bytes above 0"):
            parse(text)
    for text in (str(2**63), "9" * 19 + "M", "9" * 30, "9" * 5000):
        with pytest.raises(InputError, match=r"^--split-max-size 9[0-9M.]+: more than a file can have, expected") as e:
            parse(text)
        assert len(str(e.value)) < 130


def test_files_are_llama_cpps(both) -> None:
    """Keys and types as the gguf package names them; every tensor in one file, in the order of the whole."""
    whole, paths = both
    count = len(paths)
    assert count > 2 and names(paths[0].parent) == {f"m3-{i + 1:05}-of-{count:05}.gguf" for i in range(count)}
    assert all(p.stat().st_size <= 130_000 for p in paths)
    reference = gguf.GGUFReader(whole)
    readers = [gguf.GGUFReader(p) for p in paths]
    found = [t for reader in readers for t in reader.tensors]
    assert [t.name for t in found] == [t.name for t in reference.tensors]
    for a, b in zip(found, reference.tensors, strict=True):
        assert a.tensor_type == b.tensor_type and list(a.shape) == list(b.shape) and np.array_equal(a.data, b.data)
    own = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    split = {"split.no", "split.count", "split.tensors.count"}
    id_ = readers[0].fields["m3.split.id"].contents()
    assert len(id_) == 64 and int(id_, 16)
    for no, reader in enumerate(readers):
        keys = set(reader.fields) - own - {"m3.split.id"}
        assert reader.fields["m3.split.id"].contents() == id_
        assert keys == (set(reference.fields) - own) | split if no == 0 else keys == split
        values = {key: (reader.fields[key].contents(), reader.fields[key].types) for key in split}
        assert values == {
            "split.no": (no, [gguf.GGUFValueType.UINT16]),
            "split.count": (count, [gguf.GGUFValueType.UINT16]),
            "split.tensors.count": (len(reference.tensors), [gguf.GGUFValueType.INT32]),
        }


def split_id(path: Path) -> str:
    with GGUF(path) as model:
        return str(model.metadata["m3.split.id"])


def test_the_id_is_that_of_the_conversion(both, m3_convert, tmp_path) -> None:
    _, paths = both
    found = {"first": split_id(paths[0])}
    size, source = ("--split-max-size", "130000"), tmp_path / "source"
    for name, arguments in {
        "again": (source, *OPTIONS),
        "rule": (source, *OPTIONS, "--rule", "blk.1.attn_q.weight=q4_0"),
        "type": (source, "--type", "q4_0"),
    }.items():
        assert m3_convert(arguments[0], tmp_path / f"{name}.gguf", *size, *arguments[1:]).code == 0
        found[name] = split_id(sorted(tmp_path.glob(f"{name}-*"))[0])
    shard = min(source.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    assert m3_convert(source, tmp_path / "copy.gguf", *size, *OPTIONS).code == 0
    found["copy"] = split_id(sorted(tmp_path.glob("copy-*"))[0])
    content = bytearray(shard.read_bytes())
    at = 8 + int.from_bytes(content[:8], "little") + 1  # a bit of the first weight
    content[at] ^= 1
    shard.write_bytes(content)
    assert m3_convert(source, tmp_path / "source.gguf", *size, *OPTIONS).code == 0
    found["source"] = split_id(sorted(tmp_path.glob("source-*.gguf"))[0])
    assert found.pop("again") == found.pop("copy") == found["first"]
    assert len(set(found.values())) == len(found) == 4


def test_files_of_two_models_are_no_model(both, make_folder, small, m3_convert, m3_check_selection, tmp_path) -> None:
    """Of the same shape, names and number of files."""
    whole, paths = both
    other = tmp_path / "other" / "m3.gguf"
    other.parent.mkdir()
    folder = make_folder(replace(small, seed=8), name="tuned")
    assert m3_convert(folder, other, "--split-max-size", "130000", *OPTIONS).code == 0
    assert names(other.parent) == {p.name for p in paths}
    paths[1].write_bytes((other.parent / paths[1].name).read_bytes())
    says = f"{paths[1].name}: is of another conversion than {paths[0].name} (m3.split.id), expected files of one"
    for path in (paths[0], paths[0].parent):
        for outcome in (m3_convert(path, tmp_path / "out.gguf"), m3_check_selection(whole, path)):
            assert outcome.code == 2 and outcome.error.endswith(says) and len(outcome.err.splitlines()) == 1
    says = f"{paths[0].name}: is of another conversion than {paths[1].name} (m3.split.id), expected files of one"
    assert m3_convert(paths[1], tmp_path / "out.gguf").error.endswith(says)


def test_as_full_as_may_be(both) -> None:
    """The first tensor of each file would not have fitted into the file before."""
    _, paths = both
    for before, after in itertools.pairwise(paths):
        first = gguf.GGUFReader(after).tensors[0]
        assert before.stat().st_size + first.n_bytes > 130_000 - 200


def test_the_engine_sees_one_model(both) -> None:
    whole, paths = both
    logits = []
    for path in (whole, paths[0], paths[-1], paths[0].parent):
        with Model(path, device="cpu") as model, model.session(context=128) as session:
            logits.append(session.eval(np.arange(100, dtype=np.int32)).tobytes())
    assert len(set(logits)) == 1


def test_the_selection_check_takes_them(both, m3_check_selection, tmp_path) -> None:
    whole, paths = both
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    reports = []
    for path in (whole, paths[1], paths[0].parent):
        outcome = m3_check_selection(whole, path, "--text", text, "--context", 120, "--json")
        assert outcome.code == 0, outcome.err
        reports.append(outcome.json)
    assert reports[1]["candidate"]["bytes"] == sum(p.stat().st_size for p in paths)
    for part in ("verdict", "model", "tested"):
        assert reports[0][part] == reports[1][part] == reports[2][part]
    assert reports[0]["candidate"]["types"] == reports[1]["candidate"]["types"]


def test_m3_run_takes_them_and_names_a_missing_one(both) -> None:
    _, paths = both
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def m3_run(path: Path) -> "subprocess.CompletedProcess[str]":
        script = "from m3_runtime.cli import main; main()"
        command = [sys.executable, "-c", script, path, "--raw", "-p", "a b", "-n", "1", "--json", "--context", "64"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    for path in (paths[1], paths[0].parent):
        done = m3_run(path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["file"] == str(path)
    paths[1].unlink()
    for path in (paths[0], paths[0].parent):
        done = m3_run(path)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"{paths[1].name}: is missing (1 of the {len(paths)} files" in done.stderr


def test_the_plan_says_the_files(make_folder, m3_convert, tmp_path) -> None:
    folder, out, size = make_folder(), tmp_path / "m3.gguf", ("--split-max-size", "130000")
    plan = m3_convert(folder, out, "--dry-run", "--json", *size, *OPTIONS).json
    assert names(tmp_path) == set()
    outcome = m3_convert(folder, out, "--json", *size, *OPTIONS)
    assert [(f["name"], f["bytes"]) for f in plan["files"]] == [
        (p.name, p.stat().st_size) for p in sorted(tmp_path.glob("*.gguf"))
    ]
    assert sum(f["tensors"] for f in plan["files"]) == len(plan["tensors"])
    assert plan["file_bytes"] == outcome.json["bytes"] and outcome.json["file"] == outcome.json["files"][0]
    shown = m3_convert(folder, out, "--dry-run", *size, *OPTIONS).out
    assert all(f"file: {f['name']}: {f['tensors']} tensors, {f['bytes']} bytes\n" in shown for f in plan["files"])
    assert f" and {len(plan['files']) - 1} more: " in m3_convert(folder, out, *size, *OPTIONS).out


def test_what_fits_is_one_file(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    assert m3_convert(folder, tmp_path / "a.gguf", *OPTIONS).code == 0
    assert m3_convert(folder, tmp_path / "b.gguf", "--split-max-size", "1G", *OPTIONS).code == 0
    assert names(tmp_path) == {"a.gguf", "b.gguf"}
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("options", [(), ("--split-max-size", "150000"), ("--dry-run",)])
def test_a_name_that_only_one_of_several_files_has(make_folder, m3_convert, tmp_path, options: tuple[str, ...]) -> None:
    """It would take the place of a part of another model."""
    part = tmp_path / "out-00001-of-00003.gguf"
    part.write_text("a part of another model", encoding="utf-8")
    refused = m3_convert(make_folder(), part, *OPTIONS, *options)
    assert refused.code == 2 and f"{part}: expected the name of the whole, without -0000M-of-0000N" in refused.error
    assert part.read_text(encoding="utf-8") == "a part of another model" and names(tmp_path) == {part.name}


def test_another_number_of_files_by_the_same_name(make_folder, m3_convert, tmp_path) -> None:
    """A folder would stand for two models, or for the older one."""
    folder = make_folder()
    out = tmp_path / "out.gguf"
    split = m3_convert(folder, out, *OPTIONS, "--split-max-size", "150000", "--json")
    shards = [Path(path) for path in split.json["files"]]
    before = {path: path.read_bytes() for path in shards}
    says = f"and {len(shards) - 1} more: of an earlier conversion with this name, to another number of files; remove"
    for options in ((), ("--split-max-size", "120000"), ("--dry-run",), ("--restart",)):
        refused = m3_convert(folder, out, *OPTIONS, *options)
        assert refused.code == 2 and says in refused.error and str(shards[0]) in refused.error
    assert {path: path.read_bytes() for path in tmp_path.glob("*.gguf")} == before
    # As many files again replace them. A part of them that was left is in the way too.
    assert m3_convert(folder, out, *OPTIONS, "--split-max-size", "150000").code == 0
    assert {path: path.read_bytes() for path in tmp_path.glob("*.gguf")} == before
    for path in shards[1:]:
        path.unlink()
    refused = m3_convert(folder, out, *OPTIONS)
    assert refused.error.endswith(
        f"{shards[0]}: of an earlier conversion with this name, to another number of files; remove it or take another "
        "name"
    )
    shards[0].unlink()
    assert m3_convert(folder, out, *OPTIONS).code == 0
    refused = m3_convert(folder, out, *OPTIONS, "--split-max-size", "150000")
    assert refused.code == 2 and f"{out}: of an earlier conversion with this name" in refused.error
    out.unlink()
    # Joined, they may stay.
    assert m3_convert(folder, out, *OPTIONS, "--split-max-size", "150000").code == 0
    assert m3_convert(shards[0], out).code == 0


def test_a_tensor_that_is_larger(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    outcome = m3_convert(folder, tmp_path / "m3.gguf", "--split-max-size", "20000", *OPTIONS)
    assert outcome.code == 2 and "a tensor is not divided" in outcome.error and names(tmp_path) == set()
    needed = outcome.error.split("expected at least ")[1].split(",")[0]
    first = m3_convert(folder, tmp_path / "m3.gguf", "--split-max-size", needed, "--dry-run", "--json", *OPTIONS)
    assert first.code == 2 or first.json["files"][0]["bytes"] <= int(needed)


def test_an_interrupted_split_goes_on(both, m3_convert, tmp_path, monkeypatch) -> None:
    """Stopped in the second file, and again between two renames: all files are those of an undisturbed run."""
    _, paths = both
    expected = {p.name: p.read_bytes() for p in paths}
    source, out = tmp_path / "source", tmp_path / "m3.gguf"
    command = (source, out, "--split-max-size", "130000", "--json", *OPTIONS)
    monkeypatch.setattr(part_file, "RECORD_BYTES", 20_000)
    write, written = part_file.write_all, [0]

    def stop(file: int, data: bytes | memoryview) -> None:
        written[0] += len(data)
        if written[0] > 170_000:
            raise KeyboardInterrupt
        write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "write_all", stop)
        assert m3_convert(*command).code == 130
    assert names(tmp_path) - {"whole.gguf"} == {f"{paths[0].name}.part", f"{paths[1].name}.part", "m3.gguf.journal"}

    move, moved = Path.replace, []

    def stop_second(path: Path, target: Path) -> Path:
        moved.append(path.name)
        if len(moved) == 2:
            raise KeyboardInterrupt
        return move(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", stop_second)
        assert m3_convert(*command).code == 130
    assert f"{paths[-1].name}" in names(tmp_path) and paths[0].name not in names(tmp_path)
    outcome = m3_convert(*command)
    assert outcome.code == 0 and outcome.json["resumed_bytes"] == outcome.json["bytes"]
    assert names(tmp_path) == {"whole.gguf", *expected}
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected


def test_another_size_does_not_go_on(both, m3_convert, tmp_path, monkeypatch) -> None:
    source, out = tmp_path / "source", tmp_path / "m3.gguf"
    monkeypatch.setattr(part_file, "RECORD_BYTES", 20_000)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        assert m3_convert(source, out, "--split-max-size", "130000", *OPTIONS).code == 130
    outcome = m3_convert(source, out, "--split-max-size", "150000", *OPTIONS)
    assert outcome.code == 2 and "what goes into which file (--split-max-size: " in outcome.error
    assert m3_convert(source, out, "--split-max-size", "150000", "--restart", *OPTIONS).code == 0
    assert not any(name.endswith((".part", ".journal")) for name in names(tmp_path))
    with GGUF(next(tmp_path.glob("m3-00001-*"))) as model:
        assert len(model.files) > 1
