"""Checkpoints on the Hub: planned from headers, downloaded shard by shard, stopped and gone on with."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import hub_endpoint
from convert.hub.small_hub import DISCARD, ID, OPTIONS, PIECE, cached, changed, middle, names, shards
from hub_endpoint import HubEndpoint
from m3_convert import disk_room, part_file, temporary_shards

# The command in a process of its own, with the small steps of these tests.
CHILD = f"""
import sys
from m3_convert import cli, hub_failure, hub_shards, part_file, temporary_shards
hub_failure.PAUSES = (0.01,) * 5
hub_shards.HEADER_GUESS = 4096
part_file.RECORD_BYTES = 20_000
temporary_shards.PIECE_BYTES = {PIECE}
cli.main()
"""

Command = Callable[..., Any]


# ------------------------------------------------------------------------------------------------ the whole


def test_into_the_cache(repository, folder, expected, m3_convert, out) -> None:
    outcome = m3_convert(ID, out, *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert out.read_bytes() == expected and names(out.parent) == {"out.gguf"}
    assert cached(repository) == set(shards(folder))
    n = len(shards(folder))
    assert f"out.gguf: {n} of {n} shards to download, " in outcome.err
    assert f"{shards(folder)[1]}: " in outcome.err and f" from the Hub, shard {n} of {n}" in outcome.err
    assert f"{shards(folder)[1]}: 100% of " in outcome.err
    repository.requests.clear()
    outcome = m3_convert(ID, "again.gguf", *OPTIONS)
    assert outcome.code == 0 and Path("again.gguf").read_bytes() == expected
    assert repository.sent() == 0 and "from the Hub" not in outcome.err and "to download" not in outcome.err


def test_discarded_as_it_goes(repository, folder, expected, m3_convert, out) -> None:
    plan = m3_convert(ID, "--dry-run", "--json", *OPTIONS).json["download"]
    sizes = [(folder / name).stat().st_size for name in shards(folder)]
    assert plan["shards"] == plan["of"] == len(sizes) and plan["bytes"] == sum(sizes)
    assert max(sizes) < plan["peak_bytes"] < sum(sizes) / 2
    seen = []

    def look(*_: object) -> None:
        place = out.parent / "out.gguf.source"
        seen.append(sum(p.stat().st_size for p in place.iterdir()) if place.is_dir() else 0)

    repository.on_request = look
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert out.read_bytes() == expected and names(out.parent) == {"out.gguf"} and not cached(repository)
    assert max(sizes) < max(seen) <= plan["peak_bytes"]
    assert " of them on the disk at a time" in outcome.err
    for name in shards(folder):  # in pieces, each once
        size = (folder / name).stat().st_size
        pieces = [r.first for r in repository.asked(name) if r.last == min(r.first // PIECE * PIECE + PIECE, size) - 1]
        assert sorted(first for first in pieces if first % PIECE == 0) == list(range(0, size, PIECE))


def test_the_next_shard_comes_while_one_is_read(repository, folder, expected, m3_convert, out, monkeypatch) -> None:
    second, arrived = shards(folder)[1], threading.Event()
    write = part_file.write_all
    planned = []

    def look(method: str, path: str, first: int) -> None:
        if planned and path.endswith(second):
            arrived.set()

    def waiting(file: int, data: bytes | memoryview) -> None:
        planned.append(True)
        if len(planned) > 1:  # the header is written before the first shard is there
            assert arrived.wait(10), "nothing was downloaded ahead"
        write(file, data)

    repository.on_request = look
    monkeypatch.setattr(part_file, "write_all", waiting)
    assert m3_convert(ID, out, DISCARD, *OPTIONS).code == 0
    assert out.read_bytes() == expected


def test_what_the_cache_has_stays_there(repository, folder, expected, m3_convert, out) -> None:
    have = shards(folder)[2]
    huggingface_hub.hf_hub_download(ID, have)
    repository.requests.clear()
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert out.read_bytes() == expected
    assert cached(repository) == {have} and not repository.asked(have)
    n = len(shards(folder))
    assert f"out.gguf: {n - 1} of {n} shards to download" in outcome.err


def test_split_files(repository, folder, m3_convert, out) -> None:
    (out.parent / "local").mkdir()
    split = ("--split-max-size", "300000", *OPTIONS)
    shutil.copytree(folder, out.parent / "x" / ID)
    assert m3_convert(out.parent / "x" / ID, out.parent / "local" / "out.gguf", *split).code == 0
    assert m3_convert(ID, out, DISCARD, *split).code == 0
    written = sorted(out.parent.glob("*.gguf"))
    assert len(written) > 1 and not (out.parent / "out.gguf.source").exists()
    local = sorted((out.parent / "local").iterdir())
    assert [without_split_id(p) for p in written] == [without_split_id(p) for p in local]


def without_split_id(path: Path) -> bytes:
    """It tells a shard on the Hub by its digest, a local one by size and time."""
    content, key = path.read_bytes(), b"m3.split.id"
    at = content.index(key) + len(key) + 4 + 8
    return content[:at] + content[at + 64 :]


def test_a_dry_run_downloads_no_weights(hub, pristine, m3_convert, out) -> None:
    hub.add(ID, pristine)
    outcome = m3_convert(ID, out, "--dry-run")
    assert outcome.code == 0 and names(out.parent) == set() and not cached(hub)
    n, total = len(shards(pristine)), sum((pristine / name).stat().st_size for name in shards(pristine))
    assert hub.sent() < min(total / 10, n * 10_000)
    assert "source: 3 of 3 shards to download, " in outcome.out  # the others hold nothing but vision tensors
    assert "enough" in outcome.out.splitlines()[-1]
    assert m3_convert(ID, out).code == 0
    assert cached(hub) == set(shards(pristine)[:3])


def test_other_commands_take_an_id(repository, folder, m3_imatrix, m3_check_selection, m3_convert, out) -> None:
    text = out.parent / "text.txt"
    text.write_text("The code of the tower is seven. " * 40)
    for source, target in ((ID, "hub.gguf"), (folder, "local.gguf")):
        outcome = m3_imatrix(source, target, "--text", text, "--context", "64")
        assert outcome.code == 0, outcome.err
    assert Path("hub.gguf").read_bytes() == Path("local.gguf").read_bytes()
    assert cached(repository) == set(shards(folder))
    assert m3_convert(folder, out, *OPTIONS).code == 0
    repository.reset()
    repository.add(ID, folder)
    outcome = m3_check_selection(ID, out, "--text", text, "--context", "128", "--json")
    assert outcome.code == 0 and outcome.json["reference"]["path"] == ID
    assert outcome.json["reference"]["bytes"] == sum((folder / name).stat().st_size for name in shards(folder))
    assert f"shard 1 of {len(shards(folder))}" in outcome.err


def test_a_check_of_an_id_with_one_shard(hub, make_folder, small, m3_convert, m3_check_selection, out) -> None:
    folder = make_folder(replace(small, shard_mb=100))
    (folder / "model.safetensors.index.json").unlink()
    next(folder.glob("*.safetensors")).rename(folder / "model.safetensors")
    hub.add(ID, folder)
    assert m3_convert(folder, out).code == 0
    (text := out.parent / "text.txt").write_text("The code of the tower is seven. " * 40)
    outcome = m3_check_selection(ID, out, "--text", text, "--context", "128", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["reference"]["hash_of"] == "config.json" and outcome.json["overall"]["overlap_mean"] == 1


# ------------------------------------------------------------------------------------------------ without a network


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("way", ["offline", "unreachable"])
def test_what_is_in_the_cache_needs_no_network(repository, folder, expected, m3_convert, out, offline, way) -> None:
    assert m3_convert(ID, "first.gguf", *OPTIONS).code == 0
    repository.stop()
    if way == "offline":
        offline()
    outcome = m3_convert(ID, out, *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() == expected
    why = "HF_HUB_OFFLINE is set" if way == "offline" else "the Hub cannot be reached: ConnectError: "
    assert f"m3-convert: note: {ID}: {why}" in outcome.err and "; this is commit " in outcome.err


def test_begun_with_a_network_and_finished_without(repository, folder, expected, m3_convert, out, offline) -> None:
    name = shards(folder)[4]
    for shard in shards(folder):
        huggingface_hub.hf_hub_download(ID, shard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_file, "write_all", _failing(part_file.write_all, 40, KeyboardInterrupt()))
        assert m3_convert(ID, out, *OPTIONS).code == 130
    offline()
    outcome = m3_convert(ID, out, "--json", *OPTIONS)
    assert outcome.code == 0 and outcome.json["resumed_bytes"] > 0 and name in cached(repository)
    assert out.read_bytes() == expected


def test_what_is_not_in_the_cache_needs_one(repository, m3_convert, out, offline) -> None:
    assert m3_convert(ID, "--dry-run").code == 0
    offline()
    outcome = m3_convert(ID, out)
    assert outcome.code == 2 and f"{ID}: 10 of 10 shards absent (HF_HUB_OFFLINE is set): model-00001" in outcome.error
    outcome = m3_convert("owner/other", out)
    assert outcome.error == (
        "m3-convert: owner/other: no such folder, and HF_HUB_OFFLINE is set; the cache does not have it"
    )
    assert names(out.parent) == set()


# ------------------------------------------------------------------------------------------------ the disk


def _failing(function: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    count = [0]

    def call(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            raise error
        return function(*arguments)

    return call


def test_a_disk_that_gets_full_during_a_download(repository, folder, expected, m3_convert, out) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(temporary_shards, "write_all", _failing(part_file.write_all, 2, full))
        outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 4 and "out.gguf.source/model-00001" in outcome.error
    assert ".part: the disk is full: No space left on device" in outcome.error
    assert names(out.parent) == {"out.gguf.source"}
    assert m3_convert(ID, out, DISCARD, *OPTIONS).code == 0
    assert out.read_bytes() == expected


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """free(n): so many bytes are free on every disk."""

    def set_free(n: int) -> None:
        usage = shutil._ntuple_diskusage(10**12, 10**12 - n, n)  # type: ignore[attr-defined]
        monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda _: usage)

    return set_free


def test_room_for_a_shard_ahead(repository, folder, expected, m3_convert, out, free) -> None:
    plan = m3_convert(ID, "--dry-run", "--json", *OPTIONS).json
    size, peak = plan["file_bytes"], plan["download"]["peak_bytes"]
    free(size + peak)
    assert m3_convert(ID, out, "--dry-run", DISCARD, *OPTIONS).out.endswith("enough\n")
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0 and "no room to download one ahead" not in outcome.err
    out.unlink()
    free(size + peak - 1)
    repository.requests.clear()
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0 and "there is no room to download one ahead" in outcome.err
    assert out.read_bytes() == expected


@pytest.mark.parametrize("options", [(DISCARD,), ()])
def test_no_room(repository, folder, m3_convert, out, free, options) -> None:
    plan = m3_convert(ID, "--dry-run", "--json", *OPTIONS).json
    total = sum((folder / name).stat().st_size for name in shards(folder))
    room = plan["file_bytes"] + (90_000 if options else total - 1)
    free(room)
    assert m3_convert(ID, out, "--dry-run", *options, *OPTIONS).out.endswith("not enough\n")
    before = repository.sent()
    outcome = m3_convert(ID, out, *options, *OPTIONS)
    assert outcome.code == 4 and " need " in outcome.error and f"free are {room} " in outcome.error
    assert names(out.parent) == set() and not cached(repository) and repository.sent() - before < 100_000


def test_no_room_in_the_cache(repository, m3_imatrix, out, free) -> None:
    Path("text.txt").write_text("a text")
    free(1000)
    outcome = m3_imatrix(ID, "out.imatrix.gguf", "--text", "text.txt")
    assert outcome.code == 4 and "10 shards in the Hub's cache needs " in outcome.error and not cached(repository)


# ------------------------------------------------------------------------------------------------ interruptions


def child(*arguments: object) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_and_run_again(repository, folder, expected, m3_convert, out) -> None:
    """Before the fifth shard is whole, and again in the last one. What is done is not downloaded again."""
    for name, at in ((shards(folder)[4], 2 * PIECE), (shards(folder)[9], PIECE)):
        stalled = repository.fail(name, "stall", at=at, times=10**6)
        process = child(ID, out, DISCARD, *OPTIONS)
        try:
            wait_for(lambda stalled=stalled, name=name, at=at: stalled.times < 10**6 and _arrived(out, name) >= at)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        stalled.times = 0
        assert "out.gguf.part" in names(out.parent)
        kept = _arrived(out, name)
        assert 0 < kept <= at
        repository.requests.clear()
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() == expected and names(out.parent) == {"out.gguf"}
    assert "out.gguf: 1 of " in outcome.err and " of it left, shard 1 of 1" in outcome.err
    asked = {r.name for r in repository.requests if r.sent > 6000 and r.path.startswith("/cdn/")}
    assert asked == {shards(folder)[9]}
    assert min(r.first for r in repository.asked(shards(folder)[9]) if r.sent > 6000) == kept


def _arrived(out: Path, name: str) -> int:
    return sum(path.stat().st_size for path in out.parent.glob(f"out.gguf.source/{name}.*.part"))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


@pytest.mark.parametrize("options", [(DISCARD,), ()])
def test_an_interrupt_during_a_download(repository, folder, expected, m3_convert, out, options) -> None:
    name = shards(folder)[3]
    stalled = repository.fail(name, "stall", at=middle(folder, name), times=10**6)
    process = child(ID, out, *options, *OPTIONS)
    try:
        wait_for(lambda: stalled.times < 10**6 and (out.parent / "out.gguf.part").exists())
        time.sleep(0.1)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130 and time.monotonic() - start < 5
    assert err.splitlines()[-1] == "m3-convert: interrupted" and "Traceback" not in err
    stalled.times = 0
    assert m3_convert(ID, out, *options, *OPTIONS).code == 0
    assert out.read_bytes() == expected and names(out.parent) == {"out.gguf"}


def stop_at(hub: HubEndpoint, m3_convert: Command, out: Path, name: str, *options: str) -> None:
    broken = hub.fail(name, "status", at=PIECE, times=10**6, status=404)
    assert m3_convert(ID, out, *options, *OPTIONS).code == 2
    assert "out.gguf.part" in names(out.parent)
    broken.times = 0


def test_another_commit(repository, folder, expected, m3_convert, out) -> None:
    """Of the same shards it does not matter; with another one the work cannot be gone on with."""
    stop_at(repository, m3_convert, out, shards(folder)[4], DISCARD)
    repository.add(ID, changed(folder, out.parent.parent / "noted", lambda p: (p / "notes.txt").write_text("new")))
    outcome = m3_convert(ID, out, DISCARD, "--json", *OPTIONS)
    assert outcome.code == 0 and outcome.json["resumed_bytes"] > 0 and out.read_bytes() == expected
    out.unlink()

    stop_at(repository, m3_convert, out, shards(folder)[4], DISCARD)

    def flip(place: Path) -> None:
        path = place / shards(place)[1]
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)

    repository.add(ID, changed(folder, out.parent.parent / "flipped", flip))
    before = {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 2 and "cannot be resumed" in outcome.error
    assert f"changed since it began: the source ({shards(folder)[1]})" in outcome.error
    assert before == {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}
    outcome = m3_convert(ID, out, DISCARD, "--restart", *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() != expected and names(out.parent) == {"out.gguf"}


def test_the_way_may_change_in_between(repository, folder, expected, m3_convert, out) -> None:
    stop_at(repository, m3_convert, out, shards(folder)[4], DISCARD)
    outcome = m3_convert(ID, out, *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() == expected
    assert f"{out}.source: is left of a run with --discard-source, and not used" in outcome.err
    assert names(out.parent) == {"out.gguf", "out.gguf.source"}


def test_other_files_in_the_folder_of_shards_stay(repository, folder, expected, m3_convert, out) -> None:
    place = out.parent / "out.gguf.source"
    place.mkdir()
    (place / "mine").write_text("keep")
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() == expected
    assert f"{place}: not removed: Directory not empty: mine" in outcome.err and names(place) == {"mine"}


def test_a_damaged_beginning_is_noticed(repository, folder, expected, m3_convert, out) -> None:
    """As a power failure may leave it."""
    name = shards(folder)[4]
    broken = repository.fail(name, "cut", at=3 * PIECE, times=10**6)
    assert m3_convert(ID, out, DISCARD, *OPTIONS).code == 2
    (part,) = (out.parent / "out.gguf.source").glob("*.part")
    part.write_bytes(bytes(part.stat().st_size))
    broken.times = 0
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() == expected and "it is downloaded once more" in outcome.err


def test_digests_that_are_none(repository, folder, m3_convert, out, monkeypatch) -> None:
    """They become part of file names beside the output."""
    sibling = hub_endpoint._sibling

    def hostile(file: Any) -> dict[str, Any]:
        entry = sibling(file)
        if "lfs" in entry:
            entry["lfs"]["sha256"] = "../../../../victim"
        return entry

    monkeypatch.setattr(hub_endpoint, "_sibling", hostile)
    outcome = m3_convert(ID, out, DISCARD)
    assert outcome.code == 2 and "expected size and digest from the Hub, found " in outcome.error
    assert names(out.parent) == set()
