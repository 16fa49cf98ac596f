"""The command line of m3-convert: help, usage errors, sources that are no checkpoint folder."""

from dataclasses import replace

import pytest

from m3_convert.recipe import recipe_names

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
        (["{folder}", "{out}", "--threads", "-1"], "--threads"),
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
        (["", "{out}"], f"{NO_SOURCE}|config.json"),
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
