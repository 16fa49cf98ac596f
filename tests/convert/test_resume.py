"""An interrupted conversion goes on where it was, to the same bytes, or says why it cannot."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tensors import Tensor
from m3_convert import journal, part_file

OPTIONS = ("--type", "q8_0", "--rule", "blk.*.ffn_down_exps.weight=q5_1")

# Converts again and again, each time in a child that dies at another one of the calls that change files, and compares
# what the next run makes of it. argv: source, folder, the mode, which calls, options. Prints one line for each.
#   kill    the call is done by half, and what was written stays
#   power   what was not flushed is lost: files fall back to their size at the last fsync, names do not
DYING = """
import os, signal, sys
from pathlib import Path
from m3_convert import cli, part_file
from m3_runtime import command

part_file.RECORD_BYTES = 20_000
source, folder, mode, step, *options = sys.argv[1:]
out = Path(folder) / "out.gguf"
real = {name: getattr(os, name) for name in ("write", "fsync", "ftruncate", "unlink", "replace")}


def run(die_at):
    count, flushed = [0], {}

    def die():
        if mode == "power":
            for path, size in flushed.items():
                if os.path.exists(path):
                    os.truncate(path, size)
        os.kill(os.getpid(), signal.SIGKILL)

    def patched(name):
        def call(*arguments, **named):
            place = os.readlink(f"/proc/self/fd/{arguments[0]}") if name != "unlink" and name != "replace" else ""
            if place and not place.startswith(folder):
                return real[name](*arguments, **named)
            count[0] += 1
            if place and place != folder:
                flushed.setdefault(place, 0)
            if count[0] == die_at:
                if name == "write":
                    real[name](arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                die()
            result = real[name](*arguments, **named)
            if name == "fsync" and place in flushed:
                flushed[place] = os.fstat(arguments[0]).st_size
            if name == "ftruncate":
                flushed[place] = min(flushed[place], arguments[1])
            return result
        return call

    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        sys.stdout = open(os.devnull, "w")
        for name in real:
            setattr(os, name, patched(name))
        status = 1
        try:
            command.run(cli.app, cli.NAME, [source, str(out), *options])
        except SystemExit as left:
            status = left.code
        finally:
            real["write"](report[1], count[0].to_bytes(4, "little"))
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


report = os.pipe()


def files():
    return sorted(path.name for path in Path(folder).iterdir())


assert run(0) == 0 and files() == ["out.gguf"]
n_calls = int.from_bytes(os.read(report[0], 4), "little")
expected = out.read_bytes()
print(n_calls, flush=True)
points = sorted({*range(1, n_calls, int(step)), *range(max(1, n_calls - 8), n_calls + 1)})
for point in points:
    out.unlink(missing_ok=True)
    died = run(point)
    left = files()
    assert "out.gguf" not in left or out.read_bytes() == expected, point
    code = run(0)
    n = int.from_bytes(os.read(report[0], 4), "little")
    same = out.exists() and out.read_bytes() == expected
    print(point, died, code, same, n, *files(), flush=True)
"""


@pytest.mark.parametrize("mode", ["kill", "power"])
def test_killed_anywhere_and_run_again(make_folder, tmp_path, mode: str) -> None:
    """The file is the same to the byte, wherever the first run died."""
    folder = tmp_path / "out"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DYING, make_folder(), folder, mode, "11", "--threads", "1", *OPTIONS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    calls = int(first)
    assert calls > 80 and len(lines) > 14
    again = []
    for line in lines:
        point, died, code, same, n, *files = line.split()
        assert (int(died), int(code), same, files) == (-signal.SIGKILL, 0, "True", ["out.gguf"]), line
        again.append((int(point), int(n)))
    # Late deaths leave little to do: the work before them is not done again.
    assert again[-1][1] < calls // 10
    middle = [n for point, n in again if calls * 0.45 < point < calls * 0.65]
    assert middle and max(middle) < calls * 0.8


# ------------------------------------------------------------------------------------------------ in this process


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_file, "RECORD_BYTES", 20_000)


@pytest.fixture
def interrupted(
    make_folder: Callable[..., Path], m3_convert: Callable[..., Any], tmp_path: Path, small_steps: None
) -> Path:
    """A folder "source" of which half is converted to out.gguf with OPTIONS."""
    folder = make_folder()
    outcome = stop_half_way(m3_convert, folder, tmp_path / "out.gguf", KeyboardInterrupt())
    assert outcome.code == 130
    return folder


def stop_half_way(m3_convert: Any, folder: Path, out: Path, error: BaseException) -> Any:
    write, count = part_file.write_all, [0]

    def fail(file: int, data: bytes | memoryview) -> None:
        count[0] += 1
        if count[0] == 60:
            raise error
        write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "write_all", fail)
        return m3_convert(folder, out, *OPTIONS)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.is_file()}


LEFT = {"out.gguf.part", "out.gguf.journal"}


def test_what_an_interrupt_leaves(interrupted, m3_convert, tmp_path, capsys) -> None:
    assert names(tmp_path) == LEFT
    outcome = m3_convert(interrupted, tmp_path / "out.gguf", "--json", *OPTIONS)
    assert outcome.code == 0 and names(tmp_path) == {"out.gguf"}
    assert 100_000 < outcome.json["resumed_bytes"] < outcome.json["bytes"]
    assert any(line.startswith("out.gguf: goes on after ") for line in outcome.err.splitlines())
    fresh = m3_convert(interrupted, tmp_path / "fresh.gguf", "--json", *OPTIONS)
    assert fresh.json["resumed_bytes"] == 0 and "goes on" not in fresh.err
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "fresh.gguf").read_bytes()


def test_an_interrupt_says_what_it_keeps(make_folder, m3_convert, tmp_path, small_steps) -> None:
    outcome = stop_half_way(m3_convert, make_folder(), tmp_path / "out.gguf", KeyboardInterrupt())
    kept, last = outcome.err.splitlines()[-2:]
    assert last == "m3-convert: interrupted"
    assert "out.gguf.part: " in kept and " are kept; the same command goes on from there, with --restart " in kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_real_signal(make_folder, m3_convert, tmp_path, number: signal.Signals) -> None:
    script = (
        "import time; from m3_convert import cli, part_file; part_file.RECORD_BYTES = 1; write = part_file.write_all\n"
        "part_file.write_all = lambda file, data: (time.sleep(0.05), write(file, data))\ncli.main()"
    )
    folder, out = make_folder(), tmp_path / "out.gguf"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, folder, out, *OPTIONS]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    part, deadline = tmp_path / "out.gguf.part", time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 150_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and names(tmp_path) == LEFT
    assert " are kept; " in err and "Traceback" not in err
    assert m3_convert(folder, out, *OPTIONS).code == 0
    assert m3_convert(folder, tmp_path / "fresh.gguf", *OPTIONS).code == 0
    assert out.read_bytes() == (tmp_path / "fresh.gguf").read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_keeps_what_is_done(make_folder, m3_convert, tmp_path, small_steps, number: int) -> None:
    folder, out = make_folder(), tmp_path / "out.gguf"
    outcome = stop_half_way(m3_convert, folder, out, OSError(number, os.strerror(number)))
    assert outcome.code == 4 and os.strerror(number) in outcome.error and "nothing was kept" not in outcome.error
    assert names(tmp_path) == LEFT and " are kept; " in outcome.err
    assert m3_convert(folder, out, *OPTIONS).code == 0 and names(tmp_path) == {"out.gguf"}


@pytest.mark.parametrize("step", [1, 1 << 40])
def test_stopped_at_the_rename(make_folder, m3_convert, tmp_path, monkeypatch, step: int) -> None:
    """Nothing is left to write; with the smallest step the last record is that of the last matrix."""
    monkeypatch.setattr(part_file, "RECORD_BYTES", step)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    folder, out = make_folder(), tmp_path / "out.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        assert m3_convert(folder, out, *OPTIONS).code == 130
    assert names(tmp_path) == LEFT
    shutil.copy(tmp_path / "out.gguf.journal", tmp_path / "journal")
    outcome = m3_convert(folder, out, "--json", *OPTIONS)
    assert outcome.json["resumed_bytes"] == outcome.json["bytes"] and names(tmp_path) == {"out.gguf", "journal"}
    # And between the rename and the removal of the journal: nothing is written, so that no room is needed.
    (tmp_path / "journal").rename(tmp_path / "out.gguf.journal")
    usage, before = shutil.disk_usage(tmp_path), out.stat()
    monkeypatch.setattr("m3_convert.execute.shutil.disk_usage", lambda _: usage._replace(free=0))
    assert m3_convert(folder, out, *OPTIONS).code == 0
    assert names(tmp_path) == {"out.gguf"} and out.stat().st_mtime_ns == before.st_mtime_ns


def test_other_threads_go_on_from_it(interrupted, m3_convert, tmp_path) -> None:
    assert m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS, "--threads", "5").code == 0
    assert m3_convert(interrupted, tmp_path / "fresh.gguf", *OPTIONS, "--threads", "1").code == 0
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "fresh.gguf").read_bytes()


def test_an_older_file_stays_until_the_new_one_is_whole(interrupted, m3_convert, tmp_path) -> None:
    (tmp_path / "out.gguf").write_bytes(b"precious")
    outcome = stop_half_way(m3_convert, interrupted, tmp_path / "out.gguf", KeyboardInterrupt())
    assert outcome.code == 130 and (tmp_path / "out.gguf").read_bytes() == b"precious"
    assert m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS).code == 0
    assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"


# ------------------------------------------------------------------------------------------------ the source


def test_a_shard_that_vanishes_on_the_way(make_folder, m3_convert, tmp_path, monkeypatch, small_steps) -> None:
    folder, out, away = make_folder(), tmp_path / "out.gguf", tmp_path / "away"
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    away.mkdir()
    write, count = part_file.write_all, [0]

    def lose(file: int, data: bytes | memoryview) -> None:
        count[0] += 1
        if count[0] == 20:
            for shard in shards:
                shard.rename(away / shard.name)
        write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "write_all", lose)
        outcome = m3_convert(folder, out, *OPTIONS)
    assert outcome.code == 2 and ".safetensors: cannot be read: No such file" in outcome.error
    assert names(tmp_path) == LEFT and " are kept; " in outcome.err
    assert m3_convert(folder, out, *OPTIONS).code == 2 and names(tmp_path) == LEFT
    for shard in shards:
        (away / shard.name).rename(shard)
    assert m3_convert(folder, out, "--json", *OPTIONS).json["resumed_bytes"] > 0
    assert m3_convert(folder, tmp_path / "fresh.gguf", *OPTIONS).code == 0
    assert out.read_bytes() == (tmp_path / "fresh.gguf").read_bytes()


def test_broken_values_of_a_shard_that_was_written_over(make_folder, m3_convert, tmp_path, small_steps) -> None:
    """Its values are NaN from then on; that it changed is what is wrong."""
    folder, out, write = make_folder(), tmp_path / "out.gguf", part_file.write_all

    def alter(file: int, data: bytes | memoryview) -> None:
        write(file, data)
        for shard in folder.glob("*.safetensors"):
            with shard.open("r+b") as opened:
                header = 8 + int.from_bytes(opened.read(8), "little")
                opened.seek(header)
                opened.write(b"\xff" * (shard.stat().st_size - header))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "write_all", alter)
        outcome = m3_convert(folder, out, *OPTIONS)
    assert outcome.code == 2 and names(tmp_path) == set()
    assert outcome.error.startswith("m3-convert: the source changed while it was read: model-00001-of-")


@pytest.mark.parametrize("change", ["content", "time", "gone"])
def test_a_shard_that_changes_while_it_is_read(make_folder, m3_convert, tmp_path, small_steps, change: str) -> None:
    """The file may hold some of both. What was read before it went is good."""
    folder, out = make_folder(), tmp_path / "out.gguf"
    shard, write, count = min(folder.glob("*.safetensors")), part_file.write_all, [0]
    size = m3_convert(folder, "--dry-run", "--json", *OPTIONS).json["file_bytes"]

    def alter(file: int, data: bytes | memoryview) -> None:
        write(file, data)
        count[0] += len(data)
        if count[0] < size or not len(data):
            return
        if change == "gone":
            shard.unlink()
        else:
            content, times = shard.read_bytes(), (shard.stat().st_atime_ns, shard.stat().st_mtime_ns + 1)
            shard.write_bytes(content[:-2] + b"\0\0" if change == "content" else content)
            os.utime(shard, ns=times)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "write_all", alter)
        outcome = m3_convert(folder, out, *OPTIONS)
    if change == "gone":
        assert outcome.code == 0 and names(tmp_path) == {"out.gguf"}
        return
    assert outcome.code == 2 and names(tmp_path) == set()
    assert outcome.error == f"m3-convert: the source changed while it was read: {shard.name}; nothing was kept"
    assert m3_convert(folder, out, *OPTIONS).code == 0


def test_broken_values_are_not_worth_keeping(make_folder, m3_convert, tmp_path, small_steps) -> None:
    def nan_at_the_end(tensors: dict[str, Tensor]) -> None:
        tensors["language_model.model.norm.weight"] = Tensor("F32", (64,), b"\xff" * 256)

    outcome = m3_convert(make_folder(tensors=nan_at_the_end), tmp_path / "out.gguf", *OPTIONS)
    assert outcome.code == 2 and "NaN" in outcome.error and " are kept" not in outcome.err
    assert names(tmp_path) == set()


# ------------------------------------------------------------------------------------------------ refusals


def newer_shard(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 1))


def other_tokenizer(folder: Path) -> None:
    path = folder / "generation_config.json"
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, "temperature": 0.123}))


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (newer_shard, OPTIONS, "the source (model-00001-of-"),
        (other_tokenizer, OPTIONS, "the metadata (config, tokenizer, chat template or model card of the source)"),
        (None, ("--type", "bf16", *OPTIONS[2:]), "the rules (--type or --recipe)"),
        (None, ("--type", "q8_0", "--rule", "blk.*.ffn_down_exps.weight=q5_0"), "the rules (--rule)"),
        (None, ("--type", "q8_0"), "the rules (--rule)"),
    ],
)
def test_what_has_changed_is_named(interrupted, m3_convert, tmp_path, change, options, says) -> None:
    if change:
        change(interrupted)
    before = {name: (tmp_path / name).read_bytes() for name in LEFT}
    outcome = m3_convert(interrupted, tmp_path / "out.gguf", *options)
    assert outcome.code == 2
    assert f"out.gguf.journal: the unfinished conversion cannot be resumed: changed since it began: {says}" in (
        outcome.error
    )
    assert outcome.error.endswith("--restart starts anew")
    assert {name: (tmp_path / name).read_bytes() for name in LEFT} == before
    assert m3_convert(interrupted, tmp_path / "fresh.gguf", *options).code == 0
    assert m3_convert(interrupted, tmp_path / "out.gguf", "--restart", "--json", *options).json["resumed_bytes"] == 0
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "fresh.gguf").read_bytes()
    assert names(tmp_path) == {"out.gguf", "fresh.gguf"}


@pytest.mark.parametrize("part", ["version", "library_hash"])
def test_another_program_does_not_go_on(interrupted, m3_convert, tmp_path, monkeypatch, part: str) -> None:
    monkeypatch.setattr(journal, part, lambda: "9.9.9")
    outcome = m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS)
    assert outcome.code == 2 and "changed since it began: the program (it was " in outcome.error
    assert "9.9.9" in outcome.error and names(tmp_path) == LEFT


def test_a_changed_recipe_is_named(make_folder, m3_convert, tmp_path, small_steps) -> None:
    recipe, folder, out = tmp_path / "mine.toml", make_folder(), tmp_path / "out.gguf"
    recipe.write_text('[default]\ntype = "q8_0"\n')
    write, count = part_file.write_all, [0]

    def fail(file: int, data: bytes | memoryview) -> None:
        count[0] += 1
        if count[0] == 60:
            raise KeyboardInterrupt
        write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "write_all", fail)
        assert m3_convert(folder, out, "--recipe", recipe).code == 130
    recipe.write_text('# the same\n[default]\ntype = "q8_0"\n')
    outcome = m3_convert(folder, out, "--recipe", recipe)
    assert outcome.code == 2 and "the rules (--type or --recipe)" in outcome.error


@pytest.mark.parametrize("damage", ["short", "missing", "header"])
def test_a_damaged_part_file(interrupted, m3_convert, tmp_path, damage: str) -> None:
    part = tmp_path / "out.gguf.part"
    if damage == "short":
        os.truncate(part, 1000)
    elif damage == "missing":
        part.unlink()
    else:
        with part.open("r+b") as file:
            file.seek(100)
            file.write(b"XX")
    says = {"short": "has 1000 bytes", "missing": "is missing", "header": "has another header"}[damage]
    for _ in range(2):
        outcome = m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS)
        assert outcome.code == 2 and f"out.gguf.part: {says}, but out.gguf.journal says that " in outcome.error
        assert "out.gguf.journal" in names(tmp_path)
    assert m3_convert(interrupted, tmp_path / "out.gguf", "--restart", *OPTIONS).code == 0
    assert names(tmp_path) == {"out.gguf"}


@pytest.mark.parametrize("size", [0, 5, 1000, 100_000])
def test_a_part_file_of_ones_own_needs_no_journal(interrupted, m3_convert, tmp_path, size: int) -> None:
    (tmp_path / "out.gguf.journal").unlink()
    os.truncate(tmp_path / "out.gguf.part", size)
    assert m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS).code == 0
    assert m3_convert(interrupted, tmp_path / "fresh.gguf", *OPTIONS).code == 0
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "fresh.gguf").read_bytes()
    assert names(tmp_path) == {"out.gguf", "fresh.gguf"}


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link"])
def test_something_else_in_place_of_the_part_file(interrupted, m3_convert, tmp_path, kind: str) -> None:
    part = tmp_path / "out.gguf.part"
    (victim := tmp_path / "victim").write_text("precious")

    def place() -> None:
        if kind == "folder":
            part.mkdir()
        else:
            part.symlink_to(victim if kind == "link" else "absent")

    part.unlink()
    place()
    for with_journal in (True, False):
        if not with_journal:
            (tmp_path / "out.gguf.journal").unlink()
        for options in ((), ("--restart",)):
            outcome = m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS, *options)
            assert outcome.code == 2 and outcome.error.endswith(
                f"{part}: expected room for the file in progress, found a {kind.split()[-1]}; remove it or rename it"
            )
        assert victim.read_text() == "precious" and not (tmp_path / "absent").exists()


@pytest.mark.parametrize("call", ["ftruncate", "unlink", "write", "fsync"])
def test_stopped_while_it_starts_anew(interrupted, m3_convert, tmp_path, call: str) -> None:
    """The part file of before is known for one's own as long as it is there."""
    options, out = ("--type", "q4_0", "--restart"), tmp_path / "out.gguf"
    before = {name: (tmp_path / name).read_bytes() for name in LEFT}
    real = getattr(os, call)
    for at in range(1, 4):
        for name, content in before.items():
            (tmp_path / name).write_bytes(content)
        count = [0]

        def stop(*arguments: Any, count: list[int] = count, at: int = at, **more: Any) -> Any:
            count[0] += 1
            if count[0] >= at:
                raise KeyboardInterrupt
            return real(*arguments, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal.os, call, stop)
            code = m3_convert(interrupted, out, *options).code
        assert code in (0, 130)
        assert m3_convert(interrupted, out, *options).code == 0 and names(tmp_path) == {"out.gguf"}
        out.unlink()


def test_a_journal_between_two_matrices_is_refused(interrupted, m3_convert, tmp_path) -> None:
    path = tmp_path / "out.gguf.journal"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, str(int(last) - 34)]) + "\n")
    outcome = m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS)
    assert outcome.code == 2 and "has no matrix of " in outcome.error and names(tmp_path) == LEFT


def test_a_journal_that_says_more_than_the_file_has(interrupted, m3_convert, tmp_path) -> None:
    with (tmp_path / "out.gguf.journal").open("a", encoding="utf-8") as file:
        file.write("99999999999\n")
    outcome = m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS)
    assert outcome.code == 2 and "says that 99999999999 bytes are written, expected at most " in outcome.error
    assert names(tmp_path) == LEFT
    assert m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS, "--restart").code == 0


@pytest.mark.parametrize("older", [False, True])
def test_a_whole_part_file_that_was_removed(interrupted, m3_convert, tmp_path, older: bool) -> None:
    """An older file of the name is not taken for it."""
    out = tmp_path / "out.gguf"
    with (tmp_path / "out.gguf.journal").open("a", encoding="utf-8") as file:
        file.write(f"{m3_convert(interrupted, '--dry-run', '--json', *OPTIONS).json['file_bytes']}\n")
    (tmp_path / "out.gguf.part").unlink()
    if older:
        out.write_text("precious", encoding="utf-8")
    for _ in range(2):
        outcome = m3_convert(interrupted, out, *OPTIONS)
        assert outcome.code == 2 and f"{out}.part: is missing, but the journal says that it is whole." in outcome.error
        assert not older or out.read_text(encoding="utf-8") == "precious"
    assert m3_convert(interrupted, out, *OPTIONS, "--restart").code == 0 and names(tmp_path) == {"out.gguf"}


def test_what_is_not_as_it_was_written(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    """By the disk's fault, or another program's."""
    part = tmp_path / "out.gguf.part"
    monkeypatch.setattr(os, "fsync", lambda _: os.truncate(part, 100) if part.exists() else None)
    outcome = m3_convert(make_folder(), tmp_path / "out.gguf", *OPTIONS)
    assert outcome.code == 4 and "bytes were written, found 100 bytes; nothing was kept" in outcome.error
    assert names(tmp_path) == set()


def test_the_room_of_the_part_file_counts(interrupted, m3_convert, tmp_path, monkeypatch) -> None:
    from m3_convert import execute

    needed = m3_convert(interrupted, "--dry-run", "--json", *OPTIONS).json["file_bytes"]
    os.sync()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: usage._replace(free=needed - 100_000))
    assert m3_convert(interrupted, tmp_path / "out.gguf", *OPTIONS).code == 0
