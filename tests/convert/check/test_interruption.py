"""m3-check-selection after an interruption: the same command goes on and gives the same report."""

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from m3_convert import check, check_cli, report_page, walk_state
from m3_convert.walk_state import WalkState, default_folder, state_folder
from m3_convert.walker import Walker
from m3_runtime.errors import MachineError

N = 150
RUN = ("--no-thresholds", "--context", N, "--threads", 1, "--json", "--isolate", "--attribute")


@pytest.fixture
def states(tmp_path, monkeypatch):
    """The folder of states, which are saved after every layer."""
    monkeypatch.setattr(walk_state, "SAVE_SECONDS", 0.0)
    return tmp_path / "states"


def result(report):
    """Without what depends on time and machine."""
    return {name: value for name, value in report.items() if name not in ("seconds", "memory")}


def interrupted_in(monkeypatch, layer, error=KeyboardInterrupt):
    """Stops the check in a layer, when the free runs have gone through it."""
    forward = Walker.layer

    def stop(self, number, **more):
        forward(self, number, **more)
        if number == layer:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Walker, "layer", stop)
        yield


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_ctrl_c_and_again(tiny_checkpoint, tiny_q8_gguf, m3_check_selection, states, monkeypatch, layer):
    command = (tiny_checkpoint, tiny_q8_gguf, *RUN, "--state", states)
    expected = result(m3_check_selection(*command).json)
    assert list(states.glob("*")) == []  # nothing is left of a check that is done
    for _ in interrupted_in(monkeypatch, layer):
        stopped = m3_check_selection(*command)
    assert (stopped.code, stopped.out) == (130, "")
    if layer == 0:
        assert list(states.glob("*")) == [] and "goes on" not in stopped.err
        assert "nothing had been saved yet (it is once a minute): the same command starts anew" in stopped.err
        return
    (folder,) = states.glob("*")
    assert [file.name for file in folder.glob("*")] == ["state.npz"]
    assert f"the same command goes on after layer {layer} of 3; the state is in {folder}" in stopped.err
    assert stopped.err.splitlines()[-1] == "m3-check-selection: interrupted"
    done = []
    forward = Walker.through
    monkeypatch.setattr(Walker, "through", lambda self, m, n, **more: done.append(n) or forward(self, m, n, **more))
    again = m3_check_selection(*command)
    assert f"going on after layer {layer} of 3" in again.err
    assert min(done) == layer  # and none of the layers before
    assert result(again.json) == expected
    assert list(states.glob("*")) == []


KILLED = """
import os, signal, sys
from m3_convert import check_cli, walk_state
from m3_runtime import command
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
walk_state.SAVE_SECONDS = 0.0
if sys.argv.pop(1) == "saved":
    save = walk_state.WalkState.save
    walk_state.WalkState.save = lambda self, snapshot: (save(self, snapshot), snapshot.layer == 2 and die())
else:
    fsync, seen = os.fsync, []
    walk_state.os.fsync = lambda number: (fsync(number), seen.append(number), len(seen) == 2 and die())
command.run(check_cli.app, check_cli.NAME, sys.argv[1:])
"""


@pytest.mark.parametrize(("moment", "layer"), [("saved", 2), ("saving", 1)])
def test_kill_9(tiny_gguf, tiny_q8_gguf, m3_check_selection, states, moment, layer):
    """After a layer is saved, and before what was written for it has the file's name."""
    command = [str(part) for part in (tiny_gguf, tiny_q8_gguf, *RUN, "--state", states)]
    run = subprocess.run([sys.executable, "-c", KILLED, moment, *command], capture_output=True, text=True)
    assert run.returncode == -9 and run.stdout == ""
    assert len(list(states.glob("*/*.part"))) == (moment == "saving")
    again = m3_check_selection(*command)
    assert f"going on after layer {layer} of 3" in again.err
    assert result(again.json) == result(m3_check_selection(*command).json)
    assert list(states.glob("*")) == []


def test_other_checks_have_other_states(tiny_gguf, tiny_q8_gguf, tmp_path, m3_check_selection, states, monkeypatch):
    run = (*RUN, "--state", states)
    options = [
        (),
        ("--candidate-index-type", "f16"),
        ("--kv-type", "bf16"),
        ("--candidate-kv-type", "bf16"),
        ("--selection-only",),
        ("--group", "experts"),
        ("--context", N + 1),
        ("--isa", "scalar"),
    ]
    for _ in interrupted_in(monkeypatch, 1):
        for more in options:
            m3_check_selection(tiny_gguf, tiny_q8_gguf, *run, *more)
    assert len(list(states.glob("*"))) == len(options)
    # Threads and thresholds change nothing; a file of another name is another.
    for _ in interrupted_in(monkeypatch, 1):
        m3_check_selection(tiny_gguf, tiny_q8_gguf, *run, "--threads", 2, "--max-kld", 1)
        assert len(list(states.glob("*"))) == len(options)
        copy = tmp_path / tiny_q8_gguf.name
        copy.write_bytes(tiny_q8_gguf.read_bytes())
        m3_check_selection(tiny_gguf, copy, *run)
    assert len(list(states.glob("*"))) == len(options) + 1


@pytest.mark.parametrize("changed", ["candidate", "text", "program"])
def test_a_state_of_what_has_changed_is_removed(
    tiny_gguf, tiny_q8_gguf, m3_check_selection, states, monkeypatch, tmp_path, changed
):
    """Nobody would ask for it again, and it may be gigabytes."""
    candidate, text = tmp_path / "candidate.gguf", tmp_path / "text"
    candidate.write_bytes(tiny_q8_gguf.read_bytes())
    text.write_text("some words of a text\n" * 80)
    command = (tiny_gguf, candidate, *RUN, "--state", states, "--text", text)
    for _ in interrupted_in(monkeypatch, 1):
        m3_check_selection(*command)
    (folder,) = states.glob("*")
    if changed == "candidate":
        candidate.write_bytes(tiny_gguf.read_bytes())
    elif changed == "text":
        text.write_text("other words of a text\n" * 80)
    else:
        monkeypatch.setattr(check, "library_hash", lambda: "of another library")
    for _ in interrupted_in(monkeypatch, 1):
        run = m3_check_selection(*command)
    assert f"note: {folder}: removed what an earlier run had saved; models, text or program have changed" in run.err
    assert "going on" not in run.err and list(states.glob("*")) == [folder]
    again = m3_check_selection(*command)
    assert "going on after layer 1 of 3" in again.err and list(states.glob("*")) == []


def test_restart(tiny_gguf, tiny_q8_gguf, m3_check_selection, states, monkeypatch):
    command = (tiny_gguf, tiny_q8_gguf, *RUN, "--state", states)
    for _ in interrupted_in(monkeypatch, 1):
        m3_check_selection(*command)
    run = m3_check_selection(*command, "--restart")
    assert run.code == 0 and "going on" not in run.err and list(states.glob("*")) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-500], lambda data: b"", lambda data: b"\0" * len(data)])
def test_a_damaged_state_starts_anew(tiny_gguf, tiny_q8_gguf, m3_check_selection, states, monkeypatch, damage):
    command = (tiny_gguf, tiny_q8_gguf, *RUN, "--state", states)
    for _ in interrupted_in(monkeypatch, 1):
        m3_check_selection(*command)
    (path,) = states.glob("*/state.npz")
    path.write_bytes(damage(path.read_bytes()))
    run = m3_check_selection(*command)
    assert run.code == 0 and f"{path}: the saved state cannot be read, the check starts anew" in run.err
    assert "going on" not in run.err


def test_the_state_of_another_check_starts_anew(tiny_gguf, tiny_q8_gguf, m3_check_selection, states, monkeypatch):
    command, other = ((tiny_gguf, tiny_q8_gguf, *RUN, "--state", states, *more) for more in ((), ("--context", N + 1)))
    for _ in interrupted_in(monkeypatch, 1):
        m3_check_selection(*other)
        (foreign,) = states.glob("*/state.npz")
        m3_check_selection(*command)
    (path,) = set(states.glob("*/state.npz")) - {foreign}
    foreign.replace(path)
    run = m3_check_selection(*command)
    assert run.code == 0 and "going on" not in run.err
    assert f"{path}: the saved state cannot be read, the check starts anew: it is that of another check" in run.err


def test_a_full_disk_costs_the_state_not_the_check(tiny_gguf, tiny_q8_gguf, m3_check_selection, states, monkeypatch):
    def full(*_arrays, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(walk_state.np, "savez", full)
    run = m3_check_selection(tiny_gguf, tiny_q8_gguf, *RUN, "--state", states)
    assert run.code == 0 and run.json["verdict"]["cause"] == "weights"
    assert run.err.count("cannot be saved: No space left on device") == 1
    assert list(states.glob("*")) == []


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/states"])
def test_a_state_that_cannot_be_kept_is_refused_before_the_work(
    tiny_gguf, tiny_q8_gguf, m3_check_selection, tmp_path, monkeypatch, place
):
    monkeypatch.setattr(check, "open_layered", lambda *_, **__: pytest.fail("a model was opened"))
    (tmp_path / "file").write_text("no folder")
    run = m3_check_selection(tiny_gguf, tiny_q8_gguf, *RUN, "--state", tmp_path / place)
    assert (run.code, run.out) == (2, "") and len(run.err.splitlines()) == 1
    assert f"--state {tmp_path / place}: nothing can be written there: " in run.error
    assert (tmp_path / "file").read_text() == "no folder"


def test_a_cache_that_cannot_be_written_costs_the_state(
    tiny_gguf, tiny_q8_gguf, m3_check_selection, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(walk_state, "SAVE_SECONDS", 0.0)
    run = m3_check_selection(tiny_gguf, tiny_q8_gguf, *RUN)
    assert run.code == 0 and run.err.count("nothing can be written there") == 1
    assert "so that an interrupted check starts anew; --state names another folder" in run.err


@pytest.mark.parametrize("lost", ["report_json", "write_page", "print"])
def test_the_state_stays_until_all_is_written(
    tiny_gguf, tiny_q8_gguf, m3_check_selection, states, monkeypatch, tmp_path, lost
):
    command = (tiny_gguf, tiny_q8_gguf, *RUN, "--state", states, "--report", tmp_path / "page.html")

    def fail(*_arguments, **_more):
        raise MachineError("the disk is full")

    with monkeypatch.context() as patch:
        if lost == "print":
            patch.setattr(check_cli, "print", fail, raising=False)
        else:
            patch.setattr(report_page if lost == "write_page" else check_cli, lost, fail)
        run = m3_check_selection(*command)
    assert run.code == 4 and run.error.endswith("the disk is full")
    (folder,) = states.glob("*")
    assert f"the same command goes on after layer 3 of 3; the state is in {folder}" in run.err
    again = m3_check_selection(*command)
    assert again.code == 0 and "going on after layer 3 of 3" in again.err
    assert list(states.glob("*")) == [] and (tmp_path / "page.html").exists()
    assert result(again.json) == result(m3_check_selection(*command).json)


def test_a_short_check_saves_nothing(tiny_gguf, tiny_q8_gguf, m3_check_selection, monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(WalkState, "save", lambda self, snapshot: saved.append(snapshot))
    assert m3_check_selection(tiny_gguf, tiny_q8_gguf, *RUN, "--state", tmp_path).code == 0
    assert saved == []


def test_where_states_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "m3-gguf" / "check"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "m3-gguf" / "check"
    folder = state_folder(Path("parent"), {"a": 1, "b": [2]})
    assert (
        folder == state_folder(Path("parent"), {"b": [2], "a": 1}) != state_folder(Path("parent"), {"a": 1, "b": [3]})
    )
    assert folder.parent == Path("parent") and len(folder.name) == 64


def test_due(monkeypatch, tmp_path):
    clock = [100.0]
    monkeypatch.setattr(walk_state.time, "monotonic", lambda: clock[0])
    state = WalkState(tmp_path)
    clock[0] += 59
    assert not state.due()
    clock[0] += 1
    assert state.due() and not WalkState(None).due()
    state.save(walk_state.Snapshot(3, {"x": np.arange(4)}, {}))
    assert not state.due()
    again = WalkState(tmp_path)
    again.load()
    assert again.layer == 3 and again.snapshot is not None
    assert again.snapshot.arrays["x"].tolist() == [0, 1, 2, 3]
