"""Folders, indexes and shards that are broken, each with its own message."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tensors import Tensor, make_tensors, write_safetensors
from m3_convert.checkpoint import listed, load_checkpoint, read_shard_header
from m3_convert.plan import plan_conversion
from m3_runtime.errors import InputError

INDEX = "model.safetensors.index.json"


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / INDEX
    value = json.loads(path.read_text())
    change(value["weight_map"])
    path.write_text(json.dumps(value))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_loads_every_tensor_with_its_place(make_folder, small) -> None:
    folder = make_folder()
    checkpoint = load_checkpoint(folder)
    expected = make_tensors(small)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        found = checkpoint.tensors[name]
        assert (found.dtype, found.shape, found.n_bytes) == (tensor.dtype, tensor.shape, len(tensor.data))
        with found.shard.open("rb") as file:
            file.seek(found.offset)
            assert file.read(found.n_bytes) == tensor.data
    assert len({t.shard for t in checkpoint.tensors.values()}) > 3
    assert checkpoint.prefix == "language_model."
    assert checkpoint.name == "source"


def test_a_single_file_without_an_index(make_folder, small) -> None:
    folder = make_folder()
    for path in (*shards(folder), folder / INDEX):
        path.unlink()
    write_safetensors(folder / "model.safetensors", make_tensors(small))
    assert set(load_checkpoint(folder).tensors) == set(make_tensors(small))


def test_absent_shards(make_folder) -> None:
    folder = make_folder()
    gone = shards(folder)[2]
    gone.unlink()
    with pytest.raises(InputError, match=rf"1 of \d+ shards absent: {gone.name}"):
        load_checkpoint(folder)
    for path in shards(folder):
        path.unlink()
    with pytest.raises(
        InputError, match=r"(\d+) of \1 shards absent: (model-\S+, ){4}model-\S+ and \d more \(\d+ in all\)"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["shard", INDEX, "model.safetensors", "config.json"])
@pytest.mark.parametrize("kind", ["a link to elsewhere, which does not exist", "a named pipe", "a folder"])
def test_what_is_no_file_is_not_absent(make_folder, name: str, kind: str) -> None:
    """Nor does a pipe keep the command waiting for its other end."""
    folder = make_folder()
    path = shards(folder)[0] if name == "shard" else folder / name
    if name == "model.safetensors":
        (folder / INDEX).unlink()
    path.unlink(missing_ok=True)
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
    with pytest.raises(InputError) as error:
        load_checkpoint(folder)
    assert str(error.value) == f"{path}: expected a file, found {kind}"


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1], ids=["empty", "length", "no header", "header", "last byte"])
def test_truncated_shard(make_folder, keep: int) -> None:
    folder = make_folder()
    shard = shards(folder)[1]
    os.truncate(shard, keep if keep >= 0 else shard.stat().st_size - 1)
    with pytest.raises(InputError, match=rf"{shard.name}: shard is damaged or truncated \(\d+ bytes\)"):
        load_checkpoint(folder)


def test_a_shard_that_may_not_be_read(make_folder) -> None:
    folder = make_folder()
    shard = shards(folder)[1]
    shard.chmod(0)
    # For a user that may read everything another file that cannot be opened: a link to itself.
    if os.access(shard, os.R_OK):
        shard.unlink()
        shard.symlink_to(shard.name)
        with pytest.raises(InputError, match=f"{shard.name}: shard cannot be read: Too many levels of symbolic links"):
            read_shard_header(shard)
    else:
        with pytest.raises(InputError, match=f"{shard.name}: shard cannot be read: Permission denied"):
            load_checkpoint(folder)


HEADERS = {
    "length of 2^63": (1 << 63).to_bytes(8, "little") + b"{}",
    "length beyond the file": (1000).to_bytes(8, "little") + b"{}",
    "not JSON": (4).to_bytes(8, "little") + b"nope",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "not UTF-8": (2).to_bytes(8, "little") + b"\xff\xff",
}
ENTRIES = {
    "beyond the file": {"a": ("F32", [4], [0, 16]), "b": ("F32", [1 << 40], [16, 16 + (1 << 42)])},
    "before the start": {"a": ("F32", [4], [-16, 0])},
    "overlap": {"a": ("F32", [4], [0, 16]), "b": ("F32", [4], [8, 24])},
    "hole": {"a": ("F32", [4], [0, 16]), "b": ("F32", [2], [24, 32])},
    "size unlike the shape": {"a": ("F32", [3], [0, 16])},
    "shape whose product wraps": {"a": ("F32", [1 << 33, 1 << 33], [0, 16])},
    "negative dimension": {"a": ("F32", [-1, -4], [0, 16])},
    "unknown dtype": {"a": ("Q9", [4], [0, 16])},
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_hostile_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.safetensors: shard is damaged"):
        read_shard_header(path)


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_hostile_entries(tmp_path: Path, entries: dict[str, Any]) -> None:
    header = json.dumps({n: {"dtype": d, "shape": s, "data_offsets": o} for n, (d, s, o) in entries.items()}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    with pytest.raises(InputError, match=r"x\.safetensors: shard is damaged"):
        read_shard_header(path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "..", ".", "a\\b", "", "sub/x.safetensors", 7])
def test_index_entry_that_leaves_the_folder(make_folder, name: object) -> None:
    folder = make_folder()
    edit_index(folder, lambda m: m.update({"language_model.model.norm.weight": name}))
    with pytest.raises(InputError, match=r"language_model\.model\.norm\.weight: expected a file name in this folder"):
        load_checkpoint(folder)


def test_tensor_of_the_index_that_no_shard_has(make_folder) -> None:
    folder = make_folder()
    edit_index(folder, lambda m: m.update({f"ghost.{i}": shards(folder)[0].name for i in range(7)}))
    with pytest.raises(
        InputError, match=r"7 tensors are not where the index says: ghost\.0 .*found in: no shard\).*2 more"
    ):
        load_checkpoint(folder)


def test_tensor_in_another_shard_than_the_index_says(make_folder) -> None:
    folder = make_folder()
    name = "language_model.model.norm.weight"
    edit_index(folder, lambda m: m.update({name: next(s.name for s in shards(folder) if s.name != m[name])}))
    with pytest.raises(InputError, match=rf"1 tensors are not where the index says: {name}"):
        load_checkpoint(folder)


def test_tensor_of_a_shard_that_the_index_lacks(make_folder) -> None:
    folder = make_folder()
    edit_index(folder, lambda m: m.pop("language_model.model.norm.weight"))
    with pytest.raises(InputError, match=r"1 tensors of the shards are not in it: language_model\.model\.norm\.weight"):
        load_checkpoint(folder)


def test_tensor_in_two_shards(make_folder) -> None:
    folder = make_folder()
    name = "language_model.model.norm.weight"
    write_safetensors(
        folder / "model-twice.safetensors", {name: Tensor("F32", (2,), bytes(8)), "x": Tensor("F32", (), bytes(4))}
    )
    edit_index(folder, lambda m: m.update({"x": "model-twice.safetensors"}))
    with pytest.raises(InputError, match=rf"{name}: is in two shards"):
        load_checkpoint(folder)


def test_shard_beside_the_index_is_named_as_left_out(make_folder) -> None:
    folder = make_folder()
    write_safetensors(folder / "mtp.safetensors", {"mtp.0": Tensor("F32", (1,), bytes(4))})
    checkpoint = load_checkpoint(folder)
    assert "mtp.0" not in checkpoint.tensors
    assert "left out: mtp.safetensors" in plan_conversion(checkpoint).warnings[0]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json: cannot be read: No such file"),
        ("config.json", b"{", "config.json: is not valid JSON"),
        ("config.json", b"[1]", "config.json: expected a JSON object, found list"),
        ("config.json", b"\xff\xfe", "config.json: is not UTF-8"),
        ("config.json", b"[" * 100_000, "config.json: is not valid JSON"),
        (INDEX, b"{}", "weight_map: expected an object"),
        (INDEX, b'{"weight_map": []}', "weight_map: expected an object"),
        (INDEX, b'{"weight_map": {}}', "weight_map: expected an object"),
        (INDEX, b"nope", "index.json: is not valid JSON"),
        (INDEX, None, "expected model.safetensors.index.json or model.safetensors, found neither"),
    ],
)
def test_broken_json_files(make_folder, file: str, content: bytes | None, message: str) -> None:
    folder = make_folder()
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_checkpoint(folder)


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a checkpoint folder, found nothing"):
        load_checkpoint(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="expected a checkpoint folder, found a file"):
        load_checkpoint(tmp_path / "file")


def test_listed_names_five_and_the_total() -> None:
    assert listed("abcde") == "a, b, c, d, e"
    assert listed("abcdefg") == "a, b, c, d, e and 2 more (7 in all)"
