"""Files of others that have the names of the part file and the journal: they are kept."""

import shutil
from pathlib import Path

import pytest

OPTIONS = ("--type", "q8_0", "--rule", "blk.*.ffn_down_exps.weight=q5_1")
LEFT = {"out.gguf.part", "out.gguf.journal"}


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize(
    "content",
    [
        b'{"program": 1}\n',
        b'{"program": 1, "source": {}, "rules": {}, "files": {}, "contents": ""}\n5\n',
        b'{"program": "", "source": {}, "rules": {}, "files": {"../victim": 1}, "contents": ""}\n5\n',
        b'{"program": "", "source": {}, "rules": {}, "files": {}, "contents": ""}\n7\n5\n',
    ],
)
def test_something_else_in_place_of_the_journal(make_folder, m3_convert, tmp_path, content: bytes) -> None:
    folder = make_folder()
    (tmp_path / "victim.part").write_bytes(b"keep")
    (tmp_path / "out.gguf.journal").write_bytes(content)
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code == 2 and "out.gguf.journal: is not the journal of a conversion" in outcome.error
    assert (tmp_path / "out.gguf.journal").read_bytes() == content
    (tmp_path / "sub").mkdir()
    shutil.move(tmp_path / "out.gguf.journal", tmp_path / "sub")
    assert m3_convert(folder, tmp_path / "sub" / "out.gguf", "--restart").code == 0
    assert names(tmp_path / "sub") == {"out.gguf"} and names(tmp_path) == {"victim.part"}


def test_a_foreign_journal_is_kept_with_restart(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    for content in (b"not a journal\n", b"no line end", b"{}\n", bytes(100)):
        (tmp_path / "out.gguf.journal").write_bytes(content)
        for options in ((), ("--restart",)):
            outcome = m3_convert(folder, tmp_path / "out.gguf", *options)
            assert outcome.code == 2 and outcome.error.endswith(
                "out.gguf.journal: is there already and no journal of m3-convert; remove it or rename it"
            )
        assert (tmp_path / "out.gguf.journal").read_bytes() == content and names(tmp_path) == {"out.gguf.journal"}


@pytest.mark.parametrize("journal", [None, b"", b'{"prog', b'{"program": 1}\n'])
def test_a_foreign_part_file_is_kept(make_folder, m3_convert, tmp_path, journal: bytes | None) -> None:
    folder, part = make_folder(), tmp_path / "out.gguf.part"
    for content in (b"precious", b"GGUF\3\0\0\0 of another program"):
        for options in ((), ("--restart",)):
            part.write_bytes(content)
            if journal is not None:
                (tmp_path / "out.gguf.journal").write_bytes(journal)
            outcome = m3_convert(folder, tmp_path / "out.gguf", *options)
            assert outcome.code == 2
            if journal != b'{"program": 1}\n' or options:
                assert outcome.error.endswith(
                    f"{part}: is there already and not of this conversion; remove it if no other command is writing it"
                )
            assert part.read_bytes() == content and names(tmp_path) <= LEFT


def test_a_foreign_part_file_of_a_split_model(make_folder, m3_convert, tmp_path) -> None:
    folder, part = make_folder(), tmp_path / "out-00002-of-00003.gguf.part"
    part.write_text("precious")
    outcome = m3_convert(folder, tmp_path / "out.gguf", "--split-max-size", "130000", *OPTIONS)
    assert outcome.code == 2 and f"{part}: is there already and not of this conversion" in outcome.error
    assert names(tmp_path) == {part.name} and part.read_text() == "precious"
