"""Files that appear whole or not at all."""

import os

import pytest

from m3_convert.whole_file import own_part, whole_file, write_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(set(names(tmp_path))) or fsync(file))
    with whole_file(tmp_path / "a") as part:
        part.write_text("new")
    write_whole(tmp_path / "b", b"state")
    assert flushed == [{"a.part"}, {"a", own_part(tmp_path / "b").name}]
    assert (tmp_path / "a").read_text() == "new" and (tmp_path / "b").read_bytes() == b"state"
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_what_fails_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error), whole_file(path) as part:
        part.write_text("ne")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["a"]


def test_a_disk_that_cannot_be_flushed(tmp_path, monkeypatch):
    def full(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", b"state")
    assert names(tmp_path) == []
