"""m3-convert --max-size and --target-overlap on a small model, from the arguments to the files."""

import json
import re

import pytest

from m3_convert import target_cli, trial
from m3_convert.recipe import recipe_names
from m3_convert.trial_check import Checks
from m3_runtime import GGUF
from m3_runtime.errors import MachineError

CONTEXT = 160


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and 17 others do not. " * 16, encoding="utf-8")
    return path


@pytest.fixture
def search(m3_convert, tiny_checkpoint, tmp_path, text):
    """search("--max-size", N, ...) -> Outcome; the file is out.gguf, what was measured is kept."""

    def run(*options, out="out.gguf"):
        fixed = ("--text", text, "--context", CONTEXT, "--state", tmp_path / "state", "--threads", 1)
        return m3_convert(tiny_checkpoint, tmp_path / out, *fixed, *options)

    return run


@pytest.fixture
def measured(monkeypatch):
    """What is checked, in order; stop[0] = n: Ctrl-C in check n, once."""
    names, stop = [], [None]
    measure = Checks.measure

    def counted(self, path, types, restorations=(), what="check"):
        if len(names) - 1 == stop[0]:  # importance comes before
            stop[0] = None
            raise KeyboardInterrupt
        names.append(what)
        return measure(self, path, types, restorations, what)

    collect = target_cli.collect
    monkeypatch.setattr(target_cli, "collect", lambda *given: names.append("importance") or collect(*given))
    monkeypatch.setattr(Checks, "measure", counted)
    return names, stop


def size_of(m3_convert, checkpoint, folder, type_):
    path = folder / f"{type_}.gguf"
    assert m3_convert(checkpoint, path, "--type", type_).code == 0
    return path.stat().st_size


def left(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file() and path.name.startswith("out"))


# ------------------------------------------------------------------------------------------------ a size


def test_max_size(search, m3_convert, tiny_checkpoint, tmp_path, measured):
    q8 = size_of(m3_convert, tiny_checkpoint, tmp_path, "q8_0")
    q4 = size_of(m3_convert, tiny_checkpoint, tmp_path, "q4_0")
    limit = (q8 + q4) // 2
    done = search("--max-size", limit, "--type", "q8_0", "--json")
    assert done.code == 0
    report, out = done.json, tmp_path / "out.gguf"
    assert report["met"] and report["bytes"] == out.stat().st_size <= limit
    assert report["bytes"] > 0.97 * limit  # the room is used
    assert report["base"] == {"name": "q8_0", "bytes": report["base"]["bytes"], "outcome": None}
    assert report["base"]["bytes"] > limit
    assert measured[0] == ["importance", "groups of tensors", "the file that was found"]
    assert left(tmp_path) == ["out.gguf", "out.imatrix.gguf", "out.toml"]

    # The recipe and the matrix make the same file again, and say why each tensor has its type.
    recipe = ("--recipe", tmp_path / "out.toml")
    again = tmp_path / "again.gguf"
    assert m3_convert(tiny_checkpoint, again, *recipe, "--imatrix", tmp_path / "out.imatrix.gguf").code == 0
    assert again.read_bytes() == out.read_bytes()
    explained = m3_convert(tiny_checkpoint, *recipe, "--explain", "blk.1.ffn_down_exps.weight").out
    assert re.search(r"by recipe \S*out\S*, line \d+: blk\.\*\.ffn_down_exps\.weight", explained)
    with GGUF(out) as gguf:
        assert gguf.metadata["m3.recipe"] == (tmp_path / "out.toml").read_text()
        assert gguf.metadata["m3.recipe_sha256"] == report["recipe_sha256"]
        types = {t.name: int(t.type) for t in gguf.tensors}
    assert {types[name] for name in types if "indexer" in name or "ffn_gate_inp" in name} == {0}  # F32

    # Another target over the same text begins where this one ended.
    measured[0].clear()
    smaller = search("--max-size", limit - 2000, "--type", "q8_0", "--json", out="out2.gguf")
    assert smaller.code == 0 and measured[0] == ["the file that was found"]


def test_a_recipe_that_fits_is_checked_too_and_the_better_file_is_taken(search, m3_convert, tiny_checkpoint, tmp_path):
    q8 = size_of(m3_convert, tiny_checkpoint, tmp_path, "q8_0")
    report = search("--max-size", q8 + 20_000, "--type", "q8_0", "--json").json
    assert report["base"]["outcome"]["kld"] >= report["outcome"]["kld"]
    assert len(report["rounds"]) == 2


def test_without_a_type_the_largest_recipe_that_fits(search, m3_convert, tiny_checkpoint, tmp_path):
    limit = size_of(m3_convert, tiny_checkpoint, tmp_path, "q8_0") - 5000
    done = search("--max-size", limit)
    assert done.code == 0
    name, *size = done.out.splitlines()[1].split()
    assert name in recipe_names() and name != "q8_0" and "too large" not in done.out and size
    # The cost that a check judges, by its name: that of the worst query head, not the mean.
    assert re.search(r"worst head +query head +KL", done.out)
    assert re.search(r"^found .* \d/\d: 0\.\d{4} +\d/\d: [\d.]+% +", done.out, re.MULTILINE)
    assert "Found by m3-convert" in (tmp_path / "out.toml").read_text()


def test_the_smallest_possible_size_is_named_and_can_be_had(search, tmp_path):
    refused = search("--max-size", 1000, "--type", "q8_0")
    assert refused.code == 2 and left(tmp_path) == []
    least = int(re.search(r"has (\d+) bytes", refused.error)[1])
    assert search("--max-size", least - 1, "--type", "q8_0").code == 2
    found = search("--max-size", least, "--type", "q8_0", "--json")
    # The text of a recipe that says more may be longer than the room that is left.
    assert found.code == 0 and found.json["bytes"] <= least


# ------------------------------------------------------------------------------------------------ an overlap


def test_target_overlap(search, m3_check_selection, tiny_checkpoint, tmp_path, text):
    done = search("--target-overlap", 0.97, "--type", "q4_0", "--json")
    assert done.code == 0
    report = done.json
    assert report["base"]["outcome"]["worst"]["overlap"] < 0.97 <= report["outcome"]["worst"]["overlap"]
    assert report["met"] and report["bytes"] > report["base"]["bytes"]
    check = (tiny_checkpoint, tmp_path / "out.gguf", "--text", text, "--context", CONTEXT, "--min-overlap", 0.97)
    checked = m3_check_selection(*check, "--no-thresholds", "--threads", 1, "--json")
    assert checked.code == 0
    worst = checked.json["overall"]["mass_lost"]["worst"]
    assert report["outcome"]["worst_mass"] == pytest.approx(worst["mean"])
    assert report["outcome"]["worst_mass_at"] == {name: worst[name] for name in ("layer", "query_head")}
    assert len(report["types"]) > 2  # not by raising everything


def test_a_recipe_that_reaches_the_target_stays_as_it_is(search):
    report = search("--target-overlap", 0.5, "--type", "q8_0", "--json").json
    assert report["met"] and report["bytes"] == report["base"]["bytes"]
    assert report["outcome"] == report["base"]["outcome"]


def test_a_target_that_rules_make_impossible(search, tmp_path):
    rules = ("--rule", "token_embd.weight=q4_0", "--rule", "blk.0.*_[dgu][opa]*.weight=q4_0")
    missed = search("--target-overlap", 1, "--type", "q4_0", *rules)
    assert missed.code == 1 and left(tmp_path) == []
    best = r"--target-overlap 1 cannot be reached: the best possible file has 0\.\d{4} in layer [12], head"
    assert re.search(best, missed.error)
    assert "--accept-best" in missed.error
    taken = search("--target-overlap", 1, "--type", "q4_0", *rules, "--accept-best", "--json")
    assert taken.code == 1 and not taken.json["met"]
    assert left(tmp_path) == ["out.gguf", "out.imatrix.gguf", "out.toml"]
    recipe = (tmp_path / "out.toml").read_text()
    assert 'why = "asked for with --rule"' in recipe
    with GGUF(tmp_path / "out.gguf") as gguf:
        assert {t.name: int(t.type) for t in gguf.tensors}["token_embd.weight"] == 2  # Q4_0


def test_a_gguf_file_as_the_source(m3_convert, tiny_q8_gguf, tmp_path, text):
    command = ("--max-size", tiny_q8_gguf.stat().st_size - 100_000, "--type", "q8_0", "--text", text, "--json")
    state = ("--context", CONTEXT, "--state", tmp_path / "state", "--threads", 1)
    report = m3_convert(tiny_q8_gguf, tmp_path / "out.gguf", *command, *state).json
    assert report["met"] and "BF16" not in report["types"] and report["types"]["Q8_0"] > 5


# ------------------------------------------------------------------------------------------------ what ends it


@pytest.mark.parametrize("stop", [0, 1])
def test_ctrl_c_and_again(search, tmp_path, measured, stop, m3_convert, tiny_checkpoint):
    limit = size_of(m3_convert, tiny_checkpoint, tmp_path, "q8_0") - 10_000
    command = ("--max-size", limit, "--type", "q8_0")
    measured[1][0] = stop
    stopped = search(*command)
    assert stopped.code == 130 and "the same command goes on" in stopped.err
    assert f", the file to be checked in {tmp_path / 'out.gguf.trial'}\n" in stopped.err
    assert left(tmp_path) == ["out.gguf.trial"]
    again = search(*command)
    assert again.code == 0
    assert measured[0] == ["importance", "groups of tensors", "the file that was found"]  # none of them twice
    assert left(tmp_path) == ["out.gguf", "out.imatrix.gguf", "out.toml"]
    first = (tmp_path / "out.gguf").read_bytes()
    assert search(*command, "--restart").code == 0
    assert len(measured[0]) == 6 and (tmp_path / "out.gguf").read_bytes() == first


def test_a_full_disk(search, tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise MachineError(f"{tmp_path}: the file needs 2 bytes, free are 1")

    with monkeypatch.context() as patch:
        patch.setattr(trial, "convert", full)
        stopped = search("--target-overlap", 0.5, "--type", "q8_0")
    assert stopped.code == 4 and stopped.error.endswith("free are 1") and left(tmp_path) == []
    assert search("--target-overlap", 0.5, "--type", "q8_0").code == 0


REFUSED = [
    (("--target-overlap", 0.9), "--target-overlap raises precision above that of a recipe"),
    (("--target-overlap", 0.9, "--max-size", "1G", "--type", "q8_0"), "expected one of the two"),
    (("--target-overlap", 1.5, "--type", "q8_0"), "--target-overlap is 1.5, expected 0 to 1"),
    (("--target-overlap", "nan", "--type", "q8_0"), "--target-overlap is nan, expected 0 to 1"),
    (("--max-size", "1T"), "--max-size 1T: expected a number of bytes"),
    (("--max-size", "1G", "--dry-run"), "--dry-run does not go with"),
    (("--max-size", "1G", "--split-max-size", "1G"), "divide the file afterwards"),
    (("--max-size", "1G", "--explain", "output.weight"), "with the recipe that was written"),
    (("--max-size", "1G", "--context", 5000), "--context is 5000, the model was trained for 4096 tokens"),
    (("--max-size", "1G", "--rule", "*=q8_0"), "always F32"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(search, tmp_path, options, message):
    refused = search(*options)
    assert refused.code == 2 and message in refused.error and left(tmp_path) == []


def test_options_that_need_each_other(m3_convert, tiny_checkpoint, tmp_path, text):
    out = tmp_path / "out.gguf"
    missing = m3_convert(tiny_checkpoint, out, "--max-size", "1G")
    assert missing.code == 2 and missing.error.endswith(
        "--max-size needs --text FILE, a text that the model is measured with"
    )
    alone = m3_convert(tiny_checkpoint, out, "--text", text)
    assert alone.code == 2 and "--text is for --target-overlap and --max-size" in alone.error


def test_a_text_that_is_too_short_tests_nothing(m3_convert, tiny_checkpoint, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Too short.", encoding="utf-8")
    command = ("--max-size", "1G", "--text", text, "--state", tmp_path / "state")
    assert m3_convert(tiny_checkpoint, tmp_path / "out.gguf", *command).code == 3


def test_a_state_that_is_no_folder_is_named(m3_convert, tiny_checkpoint, tmp_path, text):
    (state := tmp_path / "state").write_text("mine", encoding="utf-8")
    command = ("--max-size", "1G", "--text", text, "--context", CONTEXT, "--state", state)
    refused = m3_convert(tiny_checkpoint, tmp_path / "out.gguf", *command)
    assert refused.code == 2 and f"{state}: File exists; --state names one" in refused.error


def test_no_output_replaces_an_input(search, m3_convert, tiny_checkpoint, tmp_path):
    recipe = tmp_path / "out.toml"
    recipe.write_text('[default]\ntype = "q8_0"\n', encoding="utf-8")
    refused = search("--target-overlap", 0.5, "--recipe", recipe)
    assert refused.code == 2 and "is part of the source or another input" in refused.error
    assert recipe.read_text(encoding="utf-8") == '[default]\ntype = "q8_0"\n'


def test_a_file_in_the_place_of_the_trial_is_not_touched(search, tmp_path):
    trial_file = tmp_path / "out.gguf.trial"
    trial_file.write_text("mine", encoding="utf-8")
    for options in ((), ("--restart",)):
        refused = search("--target-overlap", 0.5, "--type", "q8_0", *options)
        assert refused.code == 2 and "is there already" in refused.error and trial_file.read_text() == "mine"


def test_a_trial_that_was_being_written(search, tmp_path, monkeypatch):
    """Another target gives it up, whether it needs a trial of its own or not."""

    def stopped(plan, files, out, *_arguments, **_options):
        for suffix in (".part", ".journal"):
            out.with_name(out.name + suffix).write_bytes(b"")
        raise KeyboardInterrupt

    command = ("--target-overlap", 0.5, "--type")
    assert search(*command, "q8_0").code == 0  # its measurement stays
    with monkeypatch.context() as patch:
        patch.setattr(trial, "convert", stopped)
        interrupted = search(*command, "q4_0")
    parts = [tmp_path / f"out.gguf.trial{suffix}" for suffix in (".part", ".journal")]
    assert interrupted.code == 130 and f"the file to be checked in {parts[0]} and {parts[1]}\n" in interrupted.err
    assert search("--target-overlap", 1, "--type", "q8_0", "--rule", "*_exps.weight=q8_0").code == 1
    assert left(tmp_path) == ["out.gguf", "out.imatrix.gguf", "out.toml"]


def test_one_search_at_a_time(search, m3_convert, tiny_checkpoint, tmp_path, monkeypatch):
    """The second one, or a conversion, is refused before it does any work."""
    others = []
    command = ("--target-overlap", 0.5, "--type", "q8_0")
    collect = target_cli.collect

    def meanwhile(*given):
        if not others:
            others.append(None)
            others[:] = [search(*command), m3_convert(tiny_checkpoint, tmp_path / "out.gguf")]
        return collect(*given)

    monkeypatch.setattr(target_cli, "collect", meanwhile)
    assert search(*command).code == 0
    assert len(others) == 2
    for other in others:
        assert other.code == 2
        assert other.error == f"m3-convert: {tmp_path / 'out.gguf.journal'}: another process is writing it"
    assert left(tmp_path) == ["out.gguf", "out.imatrix.gguf", "out.toml"]


def test_what_a_conversion_left_is_not_touched(search, tmp_path):
    journal = tmp_path / "out.gguf.journal"
    journal.write_text("mine")
    refused = search("--target-overlap", 0.5, "--type", "q8_0")
    assert refused.code == 2 and f"{journal}: is there already and no journal of m3-convert" in refused.error
    assert journal.read_text() == "mine" and left(tmp_path) == [journal.name]
    journal.write_text('{"program": ')  # the beginning of one
    assert search("--target-overlap", 0.5, "--type", "q8_0").code == 0
    assert journal.read_text() == '{"program": '


def test_files_of_earlier_conversions(search, m3_convert, tiny_checkpoint, tmp_path):
    command = ("--target-overlap", 0.5, "--type", "q8_0")
    for name in ("out-00002-of-00003.gguf", "out-00001-of-00003.gguf"):
        (tmp_path / name).write_text("old")
    refused = search(*command)
    assert refused.code == 2 and refused.error == (
        f"m3-convert: {tmp_path / 'out-00001-of-00003.gguf'} and 1 more: of an earlier conversion with this name, to "
        "another number of files; remove them or take another name"
    )
    for name in ("out-00002-of-00003.gguf", "out-00001-of-00003.gguf"):
        (tmp_path / name).unlink()
    assert search(*command).code == 0
    recipe, matrix = tmp_path / "out.toml", tmp_path / "out.imatrix.gguf"

    # A conversion with that recipe says nothing of it; one with another does. A search replaces it.
    note = f"note: {recipe} is there already; it is not the recipe of this file"
    again = m3_convert(tiny_checkpoint, tmp_path / "out.gguf", "--recipe", recipe, "--imatrix", matrix)
    assert again.code == 0 and "note" not in again.err
    copy = tmp_path / "copy.toml"
    copy.write_bytes(recipe.read_bytes())
    assert "note" not in m3_convert(tiny_checkpoint, tmp_path / "out.gguf", "--recipe", copy, "--imatrix", matrix).err
    assert note in m3_convert(tiny_checkpoint, tmp_path / "out.gguf", "--type", "q8_0").err
    found = recipe.read_text()
    moved = matrix.rename(tmp_path / "moved.imatrix.gguf")
    matrix.write_bytes(b"of another text")
    given = search(*command, "--imatrix", moved)
    assert given.code == 0 and recipe.read_text() == found
    assert f"note: {matrix} is there already; it is not the importance matrix of this file" in given.err


def test_a_measurement_that_cannot_be_read_is_made_again(search, tmp_path, measured):
    command = ("--target-overlap", 0.5, "--type", "q8_0")
    assert search(*command).code == 0
    for path in (tmp_path / "state").rglob("*.json"):
        path.write_text(json.dumps({"outcome": {}})[:-1], encoding="utf-8")
    assert search(*command).code == 0 and measured[0] == ["importance", *["the recipe itself"] * 2]


def test_importance_reads_a_part_of_a_long_text(search, monkeypatch):
    monkeypatch.setattr(target_cli, "IMATRIX_TOKENS", 64)
    assert search("--target-overlap", 0.5, "--type", "q8_0").code == 0
