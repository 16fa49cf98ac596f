"""The command line of m3-convert: help, usage errors, sources that are no checkpoint folder."""

import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn

import pytest

from m3_convert.check_cli import app as check_app
from m3_convert.cli import app as convert_app
from m3_convert.imatrix_cli import app as imatrix_app
from m3_convert.recipe import recipe_names
from m3_runtime import native, options
from m3_runtime.bench_cli import app as bench_app
from m3_runtime.cli import app as run_app

NO_SOURCE = "expected a checkpoint folder, a GGUF file or an id on the Hub (owner/name), found nothing"


def test_help_names_every_option(m3_convert) -> None:
    outcome = m3_convert("--help")
    assert outcome.code == 0
    for word in (
        "SOURCE",
        "OUT.gguf",
        "--type",
        "--recipe",
        "--rule",
        "--strict",
        "--allow-lossy-indexer",
        "--discard-source",
        "--dry-run",
        "--explain",
        "--threads",
        "--json",
        *recipe_names(),
        "Exit codes",
    ):
        assert word in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SOURCE'"),
        (["{folder}"], "OUT.gguf is missing"),
        (["{folder}", "{out}", "--nope"], "No such option"),
        (["{folder}", "{out}", "extra"], "unexpected extra argument"),
        (["{folder}", "{out}", "--threads", "many"], "--threads"),
        (["{folder}", "{out}", "--type", "q4"], "--type: 'q4' is not known, expected auto, a recipe (iq1_m, "),
        (["{folder}", "{out}", "--type", "q8_0", "--recipe", "x.toml"], "expected one of the two"),
        (["{folder}", "{out}", "--recipe", "absent.toml"], "absent.toml: recipe cannot be read: No such file"),
        (["{folder}", "{out}", "--rule", "x"], "--rule 'x': expected PATTERN=TYPE"),
        (["{folder}", "{out}", "--rule", "nothing=f16"], "no tensor of this model matches 'nothing'"),
        (
            ["./absent", "{out}"],
            f"./absent: {NO_SOURCE}",
        ),
        (
            ["a/b/c", "{out}"],
            f"a/b/c: {NO_SOURCE}",
        ),
        (
            ["absent", "{out}"],
            f"absent: {NO_SOURCE}",
        ),
        (["", "{out}"], "SOURCE is empty, expected the name of a file or folder or an id on the Hub"),
    ],
)
def test_usage_errors_are_one_line(make_folder, m3_convert, tmp_path, arguments: list[str], message: str) -> None:
    names = {"folder": make_folder(), "out": tmp_path / "out.gguf"}
    outcome = m3_convert(*(a.format(**names) for a in arguments))
    assert outcome.code == 2
    assert any(part in outcome.error for part in message.split("|"))
    assert len(outcome.err.splitlines()) == 1 and outcome.err.startswith("m3-convert: ")
    assert outcome.out == ""
    assert not list(tmp_path.glob("out.gguf*"))


@pytest.mark.parametrize("threads", [-1, 10**6, 10**12])
def test_every_command_takes_the_same_threads(m3_convert, m3_imatrix, m3_check_selection, threads: int) -> None:
    """Before anything is read; test_run.py says it of m3-run."""
    most = max(len(os.sched_getaffinity(0)), 32)
    for command in (m3_convert, m3_imatrix, m3_check_selection):
        text = ("--text", "absent") if command is m3_imatrix else ()
        outcome = command("absent", "absent", *text, "--threads", threads)
        assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
        assert outcome.error.endswith(f": --threads is {threads}, expected 0 (all cores) to {most}")
        assert "No such file" in (at_most := command("absent", "absent", *text, "--threads", most)).error or (
            NO_SOURCE in at_most.error
        )


COMMANDS = [
    (convert_app, "m3-convert"),
    (imatrix_app, "m3-imatrix"),
    (check_app, "m3-check-selection"),
    (run_app, "m3-run"),
    (bench_app, "m3-bench"),
]


@pytest.mark.parametrize(("app", "name"), COMMANDS, ids=[name for _, name in COMMANDS])
def test_every_command_tells_its_version(command_of, monkeypatch, app, name: str) -> None:
    command = command_of(app, name)
    engine = f"engine {native.version()}, interface {native.lib.M3_ABI_VERSION}"
    monkeypatch.setattr(options, "package_version", lambda _name: "1.2.3")
    for arguments in (("--version",), ("absent", "--version", "absent")):
        told = command(*arguments)
        assert (told.code, told.out, told.err) == (0, f"{name} 1.2.3; {engine}\n", "")

    def absent(package: str) -> NoReturn:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(options, "package_version", absent)
    assert command("--version").out == f"{name} (not installed); {engine}\n"


def test_result_on_stdout_and_progress_on_stderr(make_folder, m3_convert, tmp_path) -> None:
    outcome = m3_convert(make_folder(), tmp_path / "out.gguf")
    (line,) = outcome.out.splitlines()
    assert line.startswith(f"{tmp_path / 'out.gguf'}: 54 tensors, ") and line.endswith("59 vision tensors left out")
    assert "to write, " in outcome.err and "out.gguf: 100% of" in outcome.err


def test_fallbacks_are_said_aloud(make_folder, m3_convert, small, tmp_path) -> None:
    folder = make_folder(replace(small, inter=40, shared_inter=40))
    outcome = m3_convert(folder, tmp_path / "out.gguf", "--type", "q8_0", "--json")
    assert outcome.code == 0
    assert "note: 4 tensors fall back, the first: blk.1.ffn_down_exps.weight: F16 instead of Q8_0" in outcome.err
    assert len(outcome.json["notes"]) == 4


# ------------------------------------------------------------------------------------------------ outputs over inputs


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (path := tmp_path / "text.txt").write_text("The code of the tower is seven. " * 40)
    return path


def test_a_source_with_the_name_of_the_part_file_is_kept(make_folder, m3_convert, tmp_path) -> None:
    assert m3_convert(make_folder(), tmp_path / "a.gguf").code == 0
    source = (tmp_path / "a.gguf").rename(tmp_path / "out.gguf.part")
    before = source.read_bytes()
    outcome = m3_convert(source, tmp_path / "out.gguf", "--type", "q8_0")
    assert outcome.code == 2 and "out.gguf.part is one of its inputs" in outcome.error
    assert source.read_bytes() == before and not (tmp_path / "out.gguf").exists()


def test_a_recipe_or_matrix_is_not_written_over(make_folder, m3_convert, m3_imatrix, text, tmp_path) -> None:
    folder = make_folder()
    assert m3_imatrix(folder, tmp_path / "i.gguf", "--text", text, "--context", 64).code == 0
    (tmp_path / "r.toml").write_text('[default]\ntype = "q4_0"\n')
    for option, name in (("--imatrix", "i.gguf"), ("--recipe", "r.toml")):
        before = (tmp_path / name).read_bytes()
        outcome = m3_convert(folder, tmp_path / name, option, tmp_path / name)
        assert outcome.code == 2 and "another input" in outcome.error
        assert (tmp_path / name).read_bytes() == before


def test_reports_and_matrices_do_not_replace_inputs(
    make_folder, m3_convert, m3_imatrix, m3_check_selection, text, tmp_path
) -> None:
    folder = make_folder()
    assert m3_convert(folder, tmp_path / "sp.gguf", "--split-max-size", "300000").code == 0
    parts = sorted(tmp_path.glob("sp-*.gguf"))
    content = {path: path.read_bytes() for path in (*parts, text)}
    for target in (parts[1], text):
        outcome = m3_check_selection(parts[0], folder, "--text", text, "--context", 128, "--report", target)
        assert outcome.code == 2 and "another input" in outcome.error
        outcome = m3_imatrix(parts[0], target, "--text", text, "--context", 64)
        assert outcome.code == 2 and "another input" in outcome.error
    assert all(path.read_bytes() == before for path, before in content.items())


def test_a_part_file_of_another_command_is_kept(make_folder, m3_imatrix, m3_check_selection, text, tmp_path) -> None:
    folder = make_folder()
    (part := tmp_path / "out.part").write_text("precious")
    outcome = m3_imatrix(folder, tmp_path / "out", "--text", text, "--context", 64)
    assert outcome.code == 2 and "out.part: is there already" in outcome.error
    outcome = m3_check_selection(folder, folder, "--text", text, "--context", 128, "--report", tmp_path / "out")
    assert outcome.code == 2 and "out.part: is there already" in outcome.error
    assert part.read_text() == "precious" and not (tmp_path / "out").exists()


def test_sources_that_are_nearly_one(m3_convert, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.gguf").touch()
    assert "found GGUF files: name one of one.gguf" in m3_convert(".", "out.gguf").error
    assert NO_SOURCE in m3_convert("folder/absent.gguf", "out.gguf").error
    assert m3_convert("", "out.gguf").code == 2


def test_a_device_is_no_text(make_folder, m3_imatrix, m3_check_selection, tmp_path) -> None:
    folder = make_folder()
    assert "found a device" in m3_imatrix(folder, tmp_path / "out", "--text", "/dev/zero").error
    assert "found a device" in m3_check_selection(folder, folder, "--text", "/dev/zero").error
