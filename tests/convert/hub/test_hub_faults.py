"""What is wrong on the Hub or on the way from there, and what comes of it."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint_tensors import TEXT_PREFIX, Tensor, write_json
from convert.hub.small_hub import DISCARD, ID, OPTIONS, PIECE, cached, changed, middle, names, shards
from m3_convert import cli, hub_failure, temporary_shards

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
    start_next = temporary_shards.TemporaryShards._start_next

    def start_and_wait(self: temporary_shards.TemporaryShards, shard: Path) -> None:
        start_next(self, shard)
        wait([download.result for download in self._downloads.values()])

    monkeypatch.setattr(temporary_shards.TemporaryShards, "_start_next", start_and_wait)
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
