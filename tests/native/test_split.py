"""Split models whose files do not belong together, and good ones however they are opened."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from m3_runtime.engine import GGUF, Model
from m3_runtime.errors import InputError
from native.hostile import STRING, U16, U32, U64, GGUFFile, Key, Tensor, model_file, small_file

COUNT = 3


def split_keys(no: int, count: int = COUNT, tensors: int = 4) -> tuple[Key, ...]:
    return Key("split.no", U16, no), Key("split.count", U16, count), Key("split.tensors.count", U32, tensors)


def name(no: int, count: int = COUNT) -> str:
    return f"m3-{no + 1:05}-of-{count:05}.gguf"


def tensor(name: str, value: float) -> Tensor:
    return Tensor(name, (4,), data=struct.pack("<4f", *[value] * 4))


def good() -> list[GGUFFile]:
    """Three files of small_file's keys and four tensors; the second has another alignment."""
    first = replace(small_file().with_keys(*split_keys(0)), tensors=(tensor("a", 1), tensor("b", 2)))
    second = GGUFFile((*split_keys(1), Key("general.alignment", U32, 64)), (tensor("c", 3),), alignment=64)
    return [first, second, GGUFFile(split_keys(2), (tensor("d", 4),))]


def write(folder: Path, files: list[GGUFFile]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / name(no) for no in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file.pack())
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2, "folder", "folder/"])
def test_any_file_or_the_folder_opens_all(tmp_path, opened: int | str) -> None:
    paths = write(tmp_path / "model", good())
    (tmp_path / "model" / "mmproj.gguf").write_bytes(small_file().pack())
    path = paths[opened] if isinstance(opened, int) else f"{tmp_path / 'model'}{opened[6:]}"
    with GGUF(path) as gguf:
        assert gguf.files == [str(p) for p in paths]
        assert gguf.file_bytes == sum(p.stat().st_size for p in paths)
        assert gguf.metadata["general.architecture"] == "minimax-m3" and gguf.metadata["split.no"] == 0
        assert [(t.name, t.file) for t in gguf.tensors] == [("a", 0), ("b", 0), ("c", 1), ("d", 2)]
        for value, t in enumerate(gguf.tensors, 1):
            assert list(gguf.tensor_data(t.name).cast("f")) == [value] * 4
            content = paths[t.file].read_bytes()
            assert content[t.offset : t.offset + t.n_bytes] == bytes(gguf.tensor_data(t.name))


@pytest.mark.parametrize("id_", ["", "abc"])
def test_files_of_one_conversion(tmp_path, id_: str) -> None:
    files = good()
    ids(id_, id_, id_)(files)
    for path in write(tmp_path, files):
        with GGUF(path) as gguf:
            assert len(gguf.tensors) == 4 and gguf.metadata["m3.split.id"] == id_
            assert b"split" not in gguf.header()


def test_in_the_working_folder(tmp_path, monkeypatch) -> None:
    write(tmp_path, good())
    monkeypatch.chdir(tmp_path)
    for path in (name(1), ".", f"./{name(2)}"):
        with GGUF(path) as gguf:
            assert len(gguf.tensors) == 4


def test_a_model_in_two_files_runs_as_in_one(tmp_path) -> None:
    whole = model_file()
    n = len(whole.tensors)
    first = replace(whole.with_keys(*split_keys(0, 2, n)), tensors=whole.tensors[: n // 2])
    second = GGUFFile(split_keys(1, 2, n), whole.tensors[n // 2 :])
    for no, file in enumerate((first, second)):
        (tmp_path / name(no, 2)).write_bytes(file.pack())
    (tmp_path / "whole.gguf").write_bytes(whole.pack())
    logits = []
    for path in (tmp_path / "whole.gguf", tmp_path / name(1, 2)):
        with Model(path, device="cpu") as model, model.session(context=64) as session:
            logits.append(session.eval(list(range(40))).tobytes())
    assert logits[0] == logits[1]


def test_the_joined_header(tmp_path) -> None:
    whole = model_file()
    (tmp_path / "whole.gguf").write_bytes(whole.pack())
    with GGUF(tmp_path / "whole.gguf") as gguf, Model.from_header(gguf.header(), "joined", device="cpu") as model:
        assert dict(model.gguf.metadata) == dict(gguf.metadata)
        assert [(t.name, t.ne, t.type) for t in model.gguf.tensors] == [(t.name, t.ne, t.type) for t in gguf.tensors]
    with GGUF(write(tmp_path / "split", good())[0]) as gguf:
        header = gguf.header()
    assert b"split." not in header and all(word in header for word in (b"some.words", b"one", b"two"))


def change(which: int, new: Callable[[GGUFFile], GGUFFile]) -> Callable[[list[GGUFFile]], None]:
    def apply(files: list[GGUFFile]) -> None:
        files[which] = new(files[which])

    return apply


def swap(files: list[GGUFFile]) -> None:
    files[1], files[2] = files[2], files[1]


def ids(*values: object) -> Callable[[list[GGUFFile]], None]:
    """m3.split.id of each file; None: it has none."""

    def apply(files: list[GGUFFile]) -> None:
        for i, value in enumerate(values):
            if value is not None:
                files[i] = files[i].with_keys(Key("m3.split.id", STRING if isinstance(value, str) else U32, value))

    return apply


OTHER_ID = r"m3-0000[123]-of-00003.gguf: is of another conversion than m3-00001-of-00003.gguf \(m3.split.id\)"

HOSTILE = {
    "other id": (ids("a", "a", "b"), OTHER_ID.replace("[123]", "3")),
    "longer id": (ids("a", "ab", "a"), OTHER_ID),
    "no id": (ids("a", None, "a"), OTHER_ID),
    "an id": (ids(None, "a", "a"), OTHER_ID),
    "an empty id": (ids(None, "", None), OTHER_ID),
    "id is a number": (ids("a", 7, "a"), "00002-of-00003.gguf: key 'm3.split.id' has value type"),
    "wrong order": (swap, "-00002-of-00003.gguf: is file 3 of 3 of a split model, expected a name that ends in "),
    "count differs": (change(1, lambda f: f.with_keys(Key("split.count", U16, 2))), "is file 2 of 2 of a split model"),
    "count is 0": (
        change(2, lambda f: f.with_keys(Key("split.count", U16, 0))),
        "split.count is 0, expected 2 to",
    ),
    "count is 1": (
        change(2, lambda f: f.with_keys(Key("split.count", U16, 1))),
        "split.count is 1, expected 2 to",
    ),
    "count is huge": (
        change(0, lambda f: f.with_keys(Key("split.count", U32, 99999))),
        "split.count is 99999, ",
    ),
    "count is 2^64-1": (change(0, lambda f: f.with_keys(Key("split.count", U64, 2**64 - 1))), "too large"),
    "count is missing": (change(1, lambda f: f.without_keys("split.count")), "key 'split.count' is missing"),
    "no is missing": (change(1, lambda f: f.without_keys("split.no")), "key 'split.no' is missing"),
    "no is too large": (change(0, lambda f: f.with_keys(Key("split.no", U16, 3))), "split.no is 3, expected 0 to 2"),
    "no is 2^64-1": (change(0, lambda f: f.with_keys(Key("split.no", U64, 2**64 - 1))), "too large"),
    "tensors missing": (change(0, lambda f: f.without_keys("split.tensors.count")), "'split.tensors.count' is missing"),
    "tensors differ": (
        change(2, lambda f: f.with_keys(Key("split.tensors.count", U32, 5))),
        "split.tensors.count is 5, in another file 4",
    ),
    "too few tensors": (
        change(2, lambda f: replace(f, tensors=())),
        "split.tensors.count is 4, its files have 3 tensors",
    ),
    "twice": (
        change(2, lambda f: replace(f, tensors=(tensor("a", 9),))),
        "m3-0000[13]-of-00003.gguf: tensor 'a' stands in .*m3-0000[13]-of-00003.gguf as well",
    ),
    "no GGUF": (change(1, lambda f: replace(f, magic=b"JUNK")), "00002-of-00003.gguf: not a GGUF file"),
    "truncated": (
        change(1, lambda f: replace(f, tensors=(replace(tensor("c", 3), data=b""),))),
        "00002-of-00003.gguf: truncated or broken: tensor 'c'",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_do_not_belong_together(tmp_path, case: str) -> None:
    damage, says = HOSTILE[case]
    files = good()
    damage(files)
    paths = write(tmp_path / "model", files)
    for path in (paths[0], tmp_path / "model"):
        with pytest.raises(InputError, match=says) as error:
            GGUF(path)
        assert len(str(error.value).splitlines()) == 1
        with pytest.raises(InputError, match=says):
            Model(path, device="cpu")


@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_a_missing_file_is_named(tmp_path, missing: tuple[int, ...]) -> None:
    paths = write(tmp_path / "model", good())
    for no in missing:
        paths[no].unlink()
    says = f"{name(missing[0])}: is missing .{len(missing)} of the 3 files of this model are"
    for path in (*(p for p in paths if p.exists()), tmp_path / "model"):
        with pytest.raises(InputError, match=says):
            GGUF(path)


def test_one_file_under_another_name(tmp_path) -> None:
    path = write(tmp_path / "model", good())[0]
    path.rename(tmp_path / "model" / "renamed.gguf")
    with pytest.raises(
        InputError, match=r"renamed.gguf: is file 1 of 3 of a split model, expected a name that ends in"
    ):
        GGUF(tmp_path / "model" / "renamed.gguf")


def test_a_link_to_the_same_file(tmp_path) -> None:
    paths = write(tmp_path / "model", good())
    paths[2].unlink()
    paths[2].symlink_to(paths[1])
    with pytest.raises(InputError, match=f"{paths[2].name}: is file 2 of 3"):
        GGUF(paths[0])


def test_folders(tmp_path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "whole.gguf").write_bytes(small_file().pack())
    with pytest.raises(InputError, match="empty: is a folder without a split model"):
        GGUF(empty)
    write(tmp_path / "two", good())
    (tmp_path / "two" / "other-00001-of-00002.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="two: holds files of two models, "):
        GGUF(tmp_path / "two")
    with GGUF(tmp_path / "two" / name(0)) as gguf:
        assert len(gguf.files) == 3


def test_a_split_into_one(tmp_path) -> None:
    path = tmp_path / "m3-00001-of-00001.gguf"
    path.write_bytes(small_file().with_keys(*split_keys(0, 1, 2)).pack())
    for opened in (path, tmp_path):
        with GGUF(opened) as gguf:
            assert gguf.files == [str(path)] and len(gguf.tensors) == 2


def test_names_that_are_almost_right(tmp_path) -> None:
    for bad in ("m3-0001-of-0003.gguf", "m3-00000-of-00003.gguf", "m3-00004-of-00003.gguf", "-00001-of-00003.gguf"):
        (tmp_path / bad).write_bytes(good()[0].pack())
        with pytest.raises(InputError, match=r"expected a name that ends in -00001-of-00003.gguf"):
            GGUF(tmp_path / bad)


def test_the_header_of_one_file_is_no_model() -> None:
    with pytest.raises(InputError, match="header of one of 3 files"):
        Model.from_header(good()[0].pack(), "part", device="cpu")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_nothing_stays_open(tmp_path) -> None:
    paths = write(tmp_path / "model", good())
    before = open_files()
    maps = Path("/proc/self/maps").read_text().count("-of-00003.gguf")
    for _ in range(3):
        GGUF(paths[1]).close()
    paths[2].write_bytes(b"broken")
    for _ in range(3):
        with pytest.raises(InputError):
            GGUF(paths[1])
    assert open_files() == before
    assert maps == Path("/proc/self/maps").read_text().count("-of-00003.gguf")
