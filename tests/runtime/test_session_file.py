"""Sequences on disk: another process goes on where one stopped, and nothing that does not belong is taken."""

import hashlib
import json
import os
import resource
import stat
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3_runtime import GGUF, ContextError, InputError, MachineError, Model, Session
from m3_runtime.session_file import LARGEST_HEADER, load_session, read_header, save_session

IDS = np.random.default_rng(5).integers(0, 900, 260).astype(np.int32)
SPARSE_LAYERS = (1, 2)
DIGEST = 16

# Loads each file of a list into its own session and goes on: run in a new process.
GO_ON = """
import json, sys
import numpy as np
from m3_runtime import Model
from m3_runtime.session_file import load_session

def go_on(session, token, seq):
    tokens, blocks, logits = [], [], []
    for _ in range(6):
        row = session.eval([token], seq)
        token = int(row.argmax())
        tokens.append(token)
        logits.append(float(row[token]))
        blocks.append([session.selected_blocks(layer).tolist() for layer in (1, 2)])
    return {"tokens": tokens, "logits": logits, "blocks": blocks}

if __name__ == "__main__":
    results = []
    with Model(sys.argv[1], device="cpu") as model:
        for path, options in json.loads(sys.argv[2]):
            with model.session(record=("blocks",), poison=True, **options) as session:
                saved = load_session(path, session, 1)
                evaluated = session.progress()  # nothing yet
                result = go_on(session, 7, 1)
                result |= {"evaluated": evaluated, "ids": saved.ids.tolist(), "note": saved.note}
                results.append(result | {"shifted": session.shifted_from(1)})
    print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Iterator[Model]:
    with Model(tiny_gguf, device="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def saved(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 tokens: four pages, the last one partly filled."""
    path = tmp_path_factory.mktemp("saved") / "a.m3s"
    with model.session(context=256) as session:
        session.eval(IDS[:100])
        save_session(path, session, 0, IDS[:100], {"messages": ["hello"]})
    return path


def test_a_new_process_goes_on_with_the_same_tokens_and_blocks(model: Model, tiny_gguf: Path, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "here"}
    exec(GO_ON, namespace)
    cases = [
        ("f32", "f32", 200, None),
        ("f16", "f32", 192, None),  # ends with a block
        ("f16", "f32", 200, (1, 2)),
        ("bf16", "bf16", 200, None),
        ("q8_0", "q8_0", 201, (0, 3)),
        ("q4_0", "f16", 129, None),
    ]
    jobs, expected = [], []
    for kv_type, index_type, length, drop in cases:
        options = {"context": 512, "sequences": 2, "kv_type": kv_type, "index_type": index_type}
        path = tmp_path / f"{kv_type}-{length}-{drop}.m3s"
        ids = IDS[:length]
        with model.session(record=("blocks",), page_seed=9, **options) as session:  # type: ignore[arg-type]
            session.eval(ids)
            if drop:
                session.drop(*drop)
                ids = np.concatenate([ids[: drop[0] * 32], ids[(drop[0] + drop[1]) * 32 :]])
            save_session(path, session, 0, ids, {"case": kv_type})
            first = None if drop is None else drop[0] * 32
            result = namespace["go_on"](session, 7, 0)
            result |= {"evaluated": [0, 0], "ids": ids.tolist(), "note": {"case": kv_type}, "shifted": first}
        jobs.append((str(path), options))
        expected.append(result)
    run = subprocess.run(
        [sys.executable, "-c", GO_ON, str(tiny_gguf), json.dumps(jobs)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for case, got, want in zip(cases, json.loads(run.stdout), expected, strict=True):
        assert got == want, case
    chosen = {tuple(head) for step in expected[0]["blocks"] for layer in step for head in layer[0]}
    assert len(chosen) > 1 and {len(blocks) for blocks in chosen} == {3}  # of the seven that each step sees


def test_a_loaded_sequence_is_appended_to_and_saved_again(model: Model, saved: Path, tmp_path: Path) -> None:
    with model.session(context=256, sequences=2) as session:
        session.eval(IDS[:100])
        load_session(saved, session, 1)
        assert (session.eval(IDS[100:140], 0) == session.eval(IDS[100:140], 1)).all()
        save_session(tmp_path / "b.m3s", session, 1, IDS[:140])
        session.rewind(0, 0)
        load_session(tmp_path / "b.m3s", session, 0)
        assert (session.eval([3], 0) == session.eval([3], 1)).all()


def test_an_empty_sequence(model: Model, tmp_path: Path) -> None:
    with model.session(context=256) as session:
        save_session(tmp_path / "empty.m3s", session, 0, [])
        session.eval(IDS[:5])
        assert load_session(tmp_path / "empty.m3s", session).ids.size == 0
        assert session.length() == 0 and session.pages()[0] == 0


def test_the_header_can_be_read_without_a_session(saved: Path, tiny_gguf: Path) -> None:
    header = read_header(saved)
    assert (header.length, header.block_size, header.kv_type, header.index_type) == (100, 32, "F16", "F32")
    assert header.model_name == tiny_gguf.name and header.note == {"messages": ["hello"]} and header.layers == [0, 3]
    assert header.shifted_from is None and header.n_pages == 4
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


# ---------------------------------------------------------------------------------------------------- refused


@contextmanager
def refuses(session: Session, kind: type[Exception], words: str, *, keeps: bool) -> Iterator[None]:
    """One line that says `words`; the sequence is as it was, or empty."""
    before = session.length()
    with pytest.raises(kind, match=words) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert session.length() == (before if keeps else 0)
    assert session.pages()[0] == -(-session.length() // 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_type": "f32"}, "its keys and values are F16, this session has F32"),
        ({"index_type": "f16"}, "its index keys are F32, this session has F16"),
        ({"attention": "dense"}, "its attention is sparse, this session has dense"),
        ({"layers": (0, 2)}, r"its layers \(first, number\) are \[0, 3\]"),
    ],
    ids=["K and V", "index keys", "attention", "layers"],
)
def test_a_file_of_another_kind_of_session(model: Model, saved: Path, options: Any, words: str) -> None:
    with model.session(context=256, **options) as session:
        if "layers" not in options:
            session.eval(IDS[:40])
        with refuses(session, InputError, words, keeps=True):
            load_session(saved, session)


def test_a_file_that_does_not_fit(model: Model, saved: Path) -> None:
    with model.session(context=99) as session, refuses(session, ContextError, "100 tokens, the context 99", keeps=True):
        load_session(saved, session)
    with model.session(context=256, pages=3) as session:
        session.eval(IDS[:40])
        with refuses(session, ContextError, "1 pages are needed, 0 of 3 are free", keeps=False):
            load_session(saved, session)


def test_a_file_of_another_model(saved: Path, tiny_gguf: Path, tiny_q8_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "same-header.gguf"
    data = bytearray(tiny_gguf.read_bytes())
    with GGUF(tiny_gguf) as gguf:
        tensor = next(t for t in gguf.tensors if t.name == "blk.2.attn_v.weight")
    for i in range(tensor.offset, tensor.offset + tensor.n_bytes, 4):
        data[i] ^= 1
    other.write_bytes(data)
    for path in (other, tiny_q8_gguf):
        with Model(path, device="cpu") as model, model.session(context=256) as session:
            session.eval(IDS[:40])
            with refuses(session, InputError, f"it is of the model '{tiny_gguf.name}'", keeps=True):
                load_session(saved, session)


def test_every_damage_is_found(model: Model, saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    path = tmp_path / "damaged.m3s"
    rng = np.random.default_rng(3)
    header_end = 12 + struct.unpack_from("<I", data, 8)[0] + DIGEST
    places = [*range(12), *range(12, header_end, 37), header_end - 1, header_end, header_end + 399, len(data) - 1]
    places += rng.integers(header_end, len(data), 60).tolist()
    with model.session(context=256) as session:
        for at in places:
            changed = bytearray(data)
            changed[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(changed)
            session.rewind(0)
            with refuses(session, InputError, "damaged.m3s: ", keeps=False):
                load_session(path, session)
        for cut in [0, 1, 7, 8, 11, 12, 13, header_end - 1, header_end, header_end + 1, len(data) // 2, len(data) - 1]:
            path.write_bytes(data[:cut])
            with refuses(session, InputError, "cut off|not a saved session", keeps=False):
                load_session(path, session)
        path.write_bytes(data + b"\0")
        with refuses(session, InputError, "has bytes behind its end", keeps=False):
            load_session(path, session)
        load_session(saved, session)
        assert session.length() == 100


def test_pages_in_another_order_are_damage(model: Model, saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    step = read_header(saved).page_bytes + DIGEST
    first = len(data) - 4 * step
    pages = [data[first + i * step : first + (i + 1) * step] for i in range(4)]
    path = tmp_path / "swapped.m3s"
    path.write_bytes(data[:first] + pages[1] + pages[0] + pages[2] + pages[3])
    with model.session(context=256) as session, refuses(session, InputError, "page 0 is damaged", keeps=True):
        load_session(path, session)


def with_header(data: bytes, text: bytes) -> bytes:
    """The file with another header and digests that are right up to the ids."""
    size = struct.unpack_from("<I", data, 8)[0]
    start = data[:8] + struct.pack("<I", len(text)) + text
    rest = data[12 + size + DIGEST :]
    return start + hashlib.blake2b(start, digest_size=DIGEST).digest() + rest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "a session of format 2, written by version"),
        ({"format": True}, "names no format"),
        ({"length": 2**63}, "'length' of the header is out of range"),
        ({"length": -1}, "'length' of the header"),
        ({"length": 100.0}, "'length' of the header"),
        ({"length": 1 << 24}, "is cut off"),
        ({"length": 99}, "has bytes behind its end"),
        ({"block_size": 0}, "'block_size' of the header"),
        ({"block_size": "32"}, "'block_size' of the header"),
        ({"block_size": 64}, "has bytes behind its end"),
        ({"page_bytes": 2**62}, "'page_bytes' of the header"),
        ({"page_bytes": 1 << 47}, "is cut off"),
        ({"page_bytes": -1}, "'page_bytes' of the header"),
        ({"layers": [0]}, "'layers' of the header"),
        ({"layers": {"0": 3}}, "'layers' of the header"),
        ({"kv_type": None}, "'kv_type' of the header"),
        ({"shifted_from": 100}, "'shifted_from' of the header"),
        ({"shifted_from": "0"}, "'shifted_from' of the header"),
        ({"extra": 1}, "other fields"),
        ({"note": ...}, "other fields"),
    ],
    ids=str,
)
def test_a_header_that_lies(model: Model, saved: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    data = saved.read_bytes()
    fields = json.loads(data[12 : 12 + struct.unpack_from("<I", data, 8)[0]])
    fields = {name: value for name, value in {**fields, **change}.items() if value is not ...}
    path = tmp_path / "liar.m3s"
    path.write_bytes(with_header(data, json.dumps(fields).encode()))
    with model.session(context=256) as session:
        session.eval(IDS[:40])
        with refuses(session, InputError, words, keeps=True):
            load_session(path, session)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff", b"[" * 200000, b"9" * 5000, b'{"format": NaN}'], ids=lambda text: str(text[:8])
)
def test_a_header_that_is_none(model: Model, saved: Path, tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "no.m3s"
    path.write_bytes(with_header(saved.read_bytes(), text))
    with model.session(context=256) as session, refuses(session, InputError, "no.m3s: the header", keeps=True):
        load_session(path, session)


def test_a_header_of_gigabytes_is_not_read(model: Model, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.m3s"
    with path.open("wb") as file:
        file.write(b"m3sess\r\n" + struct.pack("<I", LARGEST_HEADER + 1))
        file.truncate(1 << 40)
    with model.session(context=256) as session, refuses(session, InputError, "at most 16777216 are", keeps=True):
        load_session(path, session)


def test_ids_outside_of_the_vocabulary(model: Model, saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    path = tmp_path / "ids.m3s"
    end = 12 + struct.unpack_from("<I", data, 8)[0]
    for bad in (-1, 1024):
        ids = IDS[:100].copy()
        ids[50] = bad
        digest = hashlib.blake2b(data[:end] + ids.tobytes(), digest_size=DIGEST).digest()
        path.write_bytes(data[: end + DIGEST] + ids.tobytes() + digest + data[end + DIGEST + 400 + DIGEST :])
        with model.session(context=256) as session:
            session.eval(IDS[:40])
            with refuses(session, InputError, "a token id is not one of the model's 1024", keeps=True):
                load_session(path, session)


def test_what_is_no_file(model: Model, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with model.session(context=256) as session:
        for name, words in [
            ("none", "none: cannot be read: No such file"),
            (".", "found no regular file"),
            ("pipe", "found no regular file"),
            ("/dev/zero", "found no regular file"),
        ]:
            with refuses(session, InputError, words, keeps=True):
                load_session(tmp_path / name, session)


# ---------------------------------------------------------------------------------------------------- writing


@contextmanager
def leaves_the_old_one(path: Path) -> Iterator[None]:
    before = path.read_bytes()
    yield
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_full_disk_leaves_the_old_file(model: Model, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.m3s"
    path.write_bytes(saved.read_bytes())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with model.session(context=256) as session, leaves_the_old_one(path):
        session.eval(IDS[:100])
        for room in (0, 1000, saved.stat().st_size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            try:
                with pytest.raises(MachineError, match=r"a\.m3s: cannot be written: File too large"):
                    save_session(path, session, 0, IDS[:100], {"messages": ["hello"]})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class StoppedError(Exception):
    pass


def stop(done: int, total: int) -> None:
    if done == 2:
        raise StoppedError


def test_an_interruption_leaves_the_old_file_or_an_empty_sequence(model: Model, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.m3s"
    path.write_bytes(saved.read_bytes())
    with model.session(context=256) as session:
        session.eval(IDS[:100])
        with leaves_the_old_one(path), pytest.raises(StoppedError):
            save_session(path, session, 0, IDS[:100], progress=stop)
        with pytest.raises(StoppedError):
            load_session(path, session, progress=stop)
        assert session.length() == 0 and session.pages()[0] == 0


def test_a_killed_process_leaves_the_old_file(tiny_gguf: Path, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.m3s"
    path.write_bytes(saved.read_bytes())
    code = f"""
import os, signal
from m3_runtime import Model
from m3_runtime.session_file import save_session
with Model({str(tiny_gguf)!r}, device="cpu") as model, model.session(context=256) as session:
    session.eval([1] * 100)
    kill = lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done == 3 else None
    save_session({str(path)!r}, session, 0, [1] * 100, progress=kill)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False)
    assert run.returncode == -9
    assert path.read_bytes() == saved.read_bytes()


def test_what_cannot_be_saved(model: Model, tmp_path: Path) -> None:
    with model.session(context=256) as session:
        session.eval(IDS[:40])
        ids = IDS[:40]
        for target, given, note, words in [
            ("a.m3s", IDS[:39], None, r"int32 ids of shape \(39,\) for a sequence of 40 tokens"),
            ("a.m3s", ids / 2, None, "float64 ids of shape"),
            ("a.m3s", ids.astype(np.int64) + (1 << 32), None, "not one of the model's 1024"),
            ("a.m3s", ids, float("nan"), "the note is no JSON"),
            ("a.m3s", ids, {1, 2}, "the note is no JSON"),
            ("a.m3s", ids, "x" * LARGEST_HEADER, "at most 16777216 are allowed"),
            ("none/a.m3s", ids, None, "cannot be written: No such file or directory"),
            ("folder", ids, None, "cannot be written: Is a directory"),
        ]:
            (tmp_path / "folder").mkdir(exist_ok=True)
            with pytest.raises(InputError, match=words) as caught:
                save_session(tmp_path / target, session, 0, given, note)
            assert "\n" not in str(caught.value)
        assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_closed_session(tiny_gguf: Path, saved: Path, tmp_path: Path) -> None:
    with Model(tiny_gguf, device="cpu") as model:
        session = model.session(context=256)
    for use in (lambda: save_session(tmp_path / "a.m3s", session, 0, []), lambda: load_session(saved, session)):
        with pytest.raises(InputError, match="is closed"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_one_page(model: Model, tmp_path: Path) -> None:
    """8,192 tokens in 256 pages of 64 KiB: neither way holds them beside the cache."""
    path = tmp_path / "long.m3s"
    with model.session(context=1 << 13, sequences=2) as session:
        page = np.zeros(session.page_bytes, np.uint8)
        for _ in range(256):
            session.import_page(page, 32)
        ids = np.zeros(1 << 13, np.int32)
        tracemalloc.start()
        save_session(path, session, 0, ids)
        load_session(path, session, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert session.length(1) == 1 << 13
    assert path.stat().st_size > 16 << 20 and peak < 1 << 20
