"""Checkpoints on the Hub: planned from headers, downloaded shard by shard, whatever happens on the way."""

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

import hub_endpoint
from checkpoint_tensors import TEXT_PREFIX, Tensor, write_json
from hub_endpoint import HubEndpoint
from m3_convert import cli, disk_room, hub_failure, hub_shards, part_file, passing_shards
from make_checkpoint import CheckpointSpec, make_checkpoint

ID = "MiniMaxAI/MiniMax-M3"
DISCARD = "--discard-source"
OPTIONS = ("--type", "q8_0")
PIECE = 15_000  #: bytes of a request here, so that a shard takes several

# The command in a process of its own, with the small steps of these tests.
CHILD = f"""
import sys
from m3_convert import cli, hub_failure, hub_shards, part_file, passing_shards
hub_failure.PAUSES = (0.01,) * 5
hub_shards.HEADER_GUESS = 4096
part_file.RECORD_BYTES = 20_000
passing_shards.PIECE_BYTES = {PIECE}
cli.main()
"""

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_failure, "PAUSES", (0.01,) * 5)
    monkeypatch.setattr(hub_shards, "HEADER_GUESS", 4096)
    monkeypatch.setattr(part_file, "RECORD_BYTES", 20_000)
    monkeypatch.setattr(passing_shards, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(cli, "check_header", lambda *_: None)  # a third of the time, and tested elsewhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 10 shards, all text. Not to be changed."""
    place = tmp_path_factory.mktemp("hub") / "checkpoint"
    spec = CheckpointSpec(
        layers=3, dense=1, hidden=64, heads=4, kv_heads=2, head_dim=32, rotary=16, index_dim=48, experts=4, top=2,
        inter=32, shared_inter=32, dense_inter=96, vocab=512, block=16, top_k=3, local=2, shard_mb=0.05, vision=False,
    )  # fmt: skip
    make_checkpoint(place, spec)
    return place


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go, the working folder: what is left there is what a command left."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work" / "out.gguf"


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a conversion of the folder gives."""
    target = tmp_path_factory.mktemp("expected") / "out.gguf"
    # The name of the model is in the file.
    named = target.parent / ID
    shutil.copytree(folder, named)
    command = [sys.executable, "-c", "from m3_convert.cli import main; main()", named, target, *OPTIONS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return target.read_bytes()


@pytest.fixture
def repository(hub: HubEndpoint, folder: Path) -> HubEndpoint:
    """The checkpoint on the Hub."""
    hub.add(ID, folder)
    return hub


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def middle(folder: Path, name: str) -> int:
    return (folder / name).stat().st_size // 2


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def cached(hub: HubEndpoint) -> set[str]:
    return {path.name for path in hub.cache.glob("models--*/snapshots/*/*.safetensors")}


def changed(folder: Path, to: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(folder, to)
    change(to)
    return to


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
    assert [p.read_bytes() for p in written] == [p.read_bytes() for p in sorted((out.parent / "local").iterdir())]


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


# ------------------------------------------------------------------------------------------------ broken downloads


@pytest.mark.parametrize("kind", ["cut", "reset"])
def test_a_broken_connection_is_taken_up_where_it_broke(repository, folder, expected, m3_convert, out, kind) -> None:
    name = shards(folder)[1]
    at = PIECE + 9000
    repository.fail(name, kind, at=at)
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert out.read_bytes() == expected
    again = [r for r in repository.asked(name) if PIECE < r.first < 2 * PIECE and r.sent > 1000]
    assert len(again) == 1
    if kind == "cut":  # by force, what is under way is lost
        assert again[0].first == at


@pytest.mark.parametrize("kind", ["cut", "reset", "status"])
def test_a_broken_connection_into_the_cache(repository, folder, expected, m3_convert, out, kind, monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    name = shards(folder)[1]
    repository.fail(name, kind, at=middle(folder, name))
    outcome = m3_convert(ID, out, *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert out.read_bytes() == expected and outcome.err.count(f"{name}: ") == 2


@pytest.mark.parametrize(
    ("options", "kind", "fault", "message"),
    [
        ((DISCARD,), "cut", {}, "cannot be downloaded, the Hub gave: "),
        ((DISCARD,), "status", {}, "cannot be downloaded, the Hub gave: 503 Service Unavailable"),
        (
            (DISCARD,),
            "status",
            {"status": 403, "headers": {"X-Error-Message": "no more"}},
            "the Hub gave: 403 Forbidden",
        ),
        ((), "cut", {}, "cannot be downloaded, the Hub gave: "),
    ],
)
def test_broken_for_good(
    repository, folder, expected, m3_convert, out, monkeypatch, options, kind, fault, message
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    name = shards(folder)[4]
    broken = repository.fail(name, kind, at=middle(folder, name), times=10**6, **fault)
    outcome = m3_convert(ID, out, *options, *OPTIONS)
    assert outcome.code == 2
    assert f"{ID}/{name}: " in outcome.error and message in outcome.error
    left = {"out.gguf.part", "out.gguf.journal", *({"out.gguf.source"} if options else ())}
    assert names(out.parent) == left
    if options:
        assert f"{out}.source: " in outcome.err and " of the source are kept for the same command" in outcome.err
    broken.times = 0
    repository.requests.clear()
    outcome = m3_convert(ID, out, "--json", *options, *OPTIONS)
    assert outcome.code == 0, outcome.err
    assert out.read_bytes() == expected and names(out.parent) == {"out.gguf"}
    assert outcome.json["resumed_bytes"] > 0
    assert not any(r.sent > 6000 for earlier in shards(folder)[:4] for r in repository.asked(earlier))


def test_an_overloaded_hub_is_given_time(repository, folder, expected, m3_convert, out, monkeypatch) -> None:
    monkeypatch.setattr(hub_failure, "LONGEST_PAUSE", 0.3)
    slow, slower = shards(folder)[1], shards(folder)[2]
    repository.fail(slow, "status", at=PIECE, status=429, times=2, headers={"Retry-After": "77"})
    repository.fail(slower, "status", at=PIECE, status=429, headers={"RateLimit": '"resolvers";r=0;t=88'})
    start = time.monotonic()
    assert m3_convert(ID, out, DISCARD, *OPTIONS).code == 0
    assert time.monotonic() - start > 0.6
    assert out.read_bytes() == expected


@pytest.mark.parametrize("options", [(DISCARD,), ()])
def test_other_bytes(repository, folder, expected, m3_convert, out, options) -> None:
    name = shards(folder)[1]
    repository.fail(name, "flip", at=middle(folder, name))
    outcome = m3_convert(ID, out, *options, *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() == expected
    (line,) = [line for line in outcome.err.splitlines() if "once more" in line]
    assert line.startswith(f"{ID}/{name}: SHA-256 ") and " was downloaded, expected " in line
    n = len(shards(folder))
    assert [f", shard {i} of {n}" in outcome.err for i in range(1, n + 2)] == [True] * n + [False]


@pytest.mark.parametrize("options", [(DISCARD,), ()])
def test_other_bytes_again(repository, folder, expected, m3_convert, out, options) -> None:
    name = shards(folder)[1]
    broken = repository.fail(name, "flip", at=middle(folder, name), times=10**6)
    outcome = m3_convert(ID, out, *options, *OPTIONS)
    assert outcome.code == 2
    assert f"{ID}/{name}: SHA-256 " in outcome.error and outcome.error.endswith(", twice")
    assert "out.gguf.part" in names(out.parent) and name not in cached(repository)
    assert not list(out.parent.glob(f"out.gguf.source/{name}*"))
    broken.times = 0
    assert m3_convert(ID, out, *options, *OPTIONS).code == 0
    assert out.read_bytes() == expected


def test_another_size(repository, folder, m3_convert, out) -> None:
    name = shards(folder)[1]
    size = (folder / name).stat().st_size
    repository.fail(name, "size", at=middle(folder, name), times=10**6)
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 2 and f"{ID}/{name}: asked for 'bytes " in outcome.error
    assert f"/{size}', the Hub gave 206" in outcome.error and f"/{size + 1}'" in outcome.error


def test_a_failure_ahead_of_time_is_none_yet(repository, folder, expected, m3_convert, out, monkeypatch) -> None:
    """What was not to be had while the shard before was read may be when it is needed."""
    name = shards(folder)[2]
    broken = repository.fail(name, "status", at=PIECE, times=6)
    start_next = passing_shards.PassingShards._start_next

    def start_and_wait(self: passing_shards.PassingShards, shard: Path) -> None:
        start_next(self, shard)
        wait([download.result for download in self._downloads.values()])

    monkeypatch.setattr(passing_shards.PassingShards, "_start_next", start_and_wait)
    outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 0 and out.read_bytes() == expected and broken.times == 0


def test_the_hub_goes_after_the_plan(repository, expected, m3_convert, out, monkeypatch) -> None:
    convert = cli.convert

    def gone(*arguments: Any, **named: Any) -> Any:
        repository.stop()
        return convert(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "convert", gone)
        outcome = m3_convert(ID, out, DISCARD, *OPTIONS)
    assert outcome.code == 2 and "the Hub gave: ConnectError: " in outcome.error
    assert names(out.parent) <= {"out.gguf.source"}  # nothing of it was there yet
    repository.start()
    assert m3_convert(ID, out, DISCARD, *OPTIONS).code == 0
    assert out.read_bytes() == expected and names(out.parent) == {"out.gguf"}


# ------------------------------------------------------------------------------------------------ refusals


def test_no_such_repository(hub, m3_convert, out) -> None:
    outcome = m3_convert("owner/name", out)
    assert outcome.code == 2 and names(out.parent) == set()
    assert outcome.err.startswith(
        "m3-convert: owner/name: no such folder, and no such repository on the Hub; a private "
    )
    assert "`hf auth login` or a token in HF_TOKEN" in outcome.err and len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("where", "status", "headers", "message"),
    [
        ("/resolve/", 403, {"X-Error-Code": "GatedRepo"}, "access has to be asked for on its page (http://"),
        (
            "/api/",
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            "the Hub gives no access; it needs `hf",
        ),
        ("/api/", 404, {"X-Error-Code": "RepoNotFound"}, "no such folder, and no such repository on the Hub"),
        ("/api/", 418, {}, "no such folder, and the Hub gave: 418"),
        (
            "/api/",
            500,
            {},
            "no such folder, and the Hub cannot be reached: 500 Internal Server Error; the cache does not have it",
        ),
    ],
)
def test_the_hub_says_no(repository, m3_convert, out, where, status, headers, message) -> None:
    repository.refusal = (where, status, headers)
    outcome = m3_convert(ID, out, DISCARD)
    assert outcome.code == 2 and names(out.parent) == set()
    assert outcome.err.startswith(f"m3-convert: {ID}: {message}") and len(outcome.err.splitlines()) == 1


def test_what_is_no_id(m3_convert, out) -> None:
    outcome = m3_convert("owner/a--b", out)
    assert outcome.code == 2 and "owner/a--b" in outcome.error and len(outcome.err.splitlines()) == 1


def test_a_folder_that_looks_like_an_id_is_a_folder(hub, folder, m3_convert, out) -> None:
    shutil.copytree(folder, ID)
    assert m3_convert(ID, out).code == 0
    assert not hub.requests


def test_discarding_is_for_the_hub(folder, m3_convert, out) -> None:
    outcome = m3_convert(folder, out, DISCARD)
    assert outcome.code == 2 and "--discard-source is for an id on the Hub" in outcome.error
    assert names(out.parent) == set() and folder.is_dir()


def _other_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        path = place / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        write_json(path, index)

    return apply


def _cut_file(place: Path) -> None:
    path = place / shards(place)[1]
    os.truncate(path, path.stat().st_size - 100)


def _cut_header(place: Path) -> None:
    os.truncate(place / shards(place)[1], 100)


def _huge_header(place: Path) -> None:
    path = place / shards(place)[1]
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_index(lambda m: m.update({"lm_head.x": "../x.safetensors"})), "expected a file name in this folder"),
        (
            _other_index(lambda m: m.update({"lm_head.x": "x.safetensors"})),
            f"{ID}: 1 of 11 shards absent: x.safetensors",
        ),
        (_other_index(lambda m: m.popitem()), "1 tensors of the shards are not in it"),
        (_cut_file, "{shard}: shard is damaged or truncated"),
        (_cut_header, "{shard}: shard is damaged or truncated (100 bytes)"),
        (_huge_header, "{shard}: shard is damaged or truncated"),
        (
            lambda place: (place / shards(place)[1]).write_bytes(b"x"),
            "{shard}: shard is damaged or truncated (1 bytes)",
        ),
        (lambda place: (place / "config.json").unlink(), f"{ID}: expected a checkpoint, found no config.json"),
        (
            lambda place: (place / "model.safetensors.index.json").unlink(),
            f"{ID}: expected model.safetensors.index.json or",
        ),
    ],
)
def test_a_broken_repository_is_refused_before_the_download(hub, folder, m3_convert, out, change, message) -> None:
    hub.add(ID, changed(folder, out.parent.parent / "broken", change))
    outcome = m3_convert(ID, out, DISCARD)
    assert outcome.code == 2 and message.format(shard=f"{ID}/{shards(folder)[1]}") in outcome.error
    assert names(out.parent) == set() and not cached(hub) and hub.sent() < 10 * 10_000


def test_wrong_norms_are_refused_before_the_download(hub, make_folder, m3_convert, out) -> None:
    def ones(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.startswith(TEXT_PREFIX) and "norm" in name:
                tensors[name] = Tensor("F32", tensor.shape, np.ones(tensor.shape, np.float32).tobytes())

    hub.add(ID, make_folder(tensors=ones))
    outcome = m3_convert(ID, out, DISCARD)
    assert outcome.code == 2 and "already hold 1 + w" in outcome.error
    assert names(out.parent) == set() and hub.sent() < 100_000


def test_broken_values_leave_nothing(hub, make_folder, m3_convert, out) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["language_model.model.norm.weight"] = Tensor("F32", (64,), b"\xff" * 256)

    hub.add(ID, make_folder(tensors=damage))
    outcome = m3_convert(ID, out, DISCARD)
    assert outcome.code == 2 and "output_norm.weight" in outcome.error and "NaN" in outcome.error
    assert names(out.parent) == set()


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
        patch.setattr(passing_shards, "write_all", _failing(part_file.write_all, 2, full))
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
