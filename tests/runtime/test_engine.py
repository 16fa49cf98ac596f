"""The Python face of the engine: shapes, errors, sequences, interruption. Its numbers are checked in tests/golden."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from m3_runtime import GGUF, ContextError, InputError, MachineError, Model, NotFiniteError
from m3_runtime.native import LIBRARY_FOLDER

IDS = np.random.default_rng(1).integers(0, 900, 200).astype(np.int32)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path):
    with Model(tiny_gguf) as opened:
        yield opened


def test_shapes_and_types_of_what_eval_gives(model: Model) -> None:
    with model.session(context=256, record=("blocks", "scores")) as session:
        last = session.eval(IDS[:150])
        assert last.shape == (1024,) and last.dtype == np.float32
        every = session.eval(IDS[150:], all_logits=True)
        assert every.shape == (50, 1024)
        blocks = session.selected_blocks(2)
        assert blocks.shape == (50, 2, 3) and blocks.dtype == np.int32
        assert session.block_scores(2).shape == (50, 2, 7)
        assert session.length() == 200 and session.pages()[0] == 7
        with pytest.raises(InputError, match="dense attention"):
            session.selected_blocks(0)
        with pytest.raises(InputError, match="layer 3"):
            session.selected_blocks(3)


def test_block_lists_are_ascending_padded_at_the_end_and_hold_the_own_block(model: Model) -> None:
    with model.session(context=256, record=("blocks",)) as session:
        session.eval(IDS)
        blocks = session.selected_blocks(1)
    own = np.arange(200) // 32
    assert (np.where(blocks >= 0, blocks, -1).max(axis=2) == own[:, None]).all()
    valid = blocks >= 0
    assert (valid[..., :-1] | ~valid[..., 1:]).all()
    assert ((np.diff(blocks, axis=2) > 0) | ~valid[..., 1:]).all()
    assert (valid.sum(axis=2) == np.minimum(own + 1, 3)[:, None]).all()


def test_a_session_without_record_says_so(model: Model) -> None:
    with model.session(context=64) as session:
        session.eval(IDS[:40])
        with pytest.raises(InputError, match="does not record"):
            session.selected_blocks(1)


def test_defaults_of_the_cache_are_f16_values_and_f32_index_keys(model: Model) -> None:
    memory, exact = model.memory(context=1024), model.memory(context=1024, kv_type="f32")
    assert exact.kv_bytes == 2 * memory.kv_bytes and exact.index_bytes == memory.index_bytes
    # 1024 tokens, 3 layers, K and V, 2 heads of 64 channels; index keys of 64 channels in the 2 sparse layers.
    assert memory.kv_bytes == 1024 * 3 * 2 * 2 * 64 * 2
    assert memory.index_bytes == 1024 * 2 * 64 * 4


def test_scratch_memory_does_not_grow_with_chunk_times_context(model: Model) -> None:
    short, long = model.memory(context=1 << 12), model.memory(context=1 << 20)
    assert long.scratch_bytes - short.scratch_bytes < 64 << 20
    rows = model.memory(context=1 << 20, chunk=1024).scratch_bytes - model.memory(context=1 << 20).scratch_bytes
    assert rows == model.memory(context=1 << 12, chunk=1024).scratch_bytes - short.scratch_bytes


@pytest.mark.parametrize(
    "ids", [[], [[1, 2]], [1.5], [-1], [1024], ["a"]], ids=["none", "2-D", "float", "negative", "too large", "text"]
)
def test_bad_ids_are_refused(model: Model, ids: object) -> None:
    with model.session(context=64) as session:
        with pytest.raises(InputError):
            session.eval(ids)
        assert session.length() == 0


def test_more_tokens_than_the_context_holds(model: Model) -> None:
    with model.session(context=64) as session:
        session.eval(IDS[:60])
        with pytest.raises(ContextError, match="60 of 64 tokens, 5 more"):
            session.eval(IDS[60:65])
        assert session.length() == 60
        session.eval(IDS[60:64])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context": 0}, "context"),
        ({"context": 10**20}, "range"),
        ({"context": 1 << 25}, "context"),
        ({"sequences": 5000}, "sequences"),
        ({"kv_type": "q9"}, "q9"),
        ({"kv_type": "q4_k"}, "kv_type Q4_K"),
        ({"index_type": "q4_k"}, "index_type Q4_K"),
        ({"attention": "dens"}, "dens"),
        ({"index_scan": "int8"}, "int8"),
        ({"record": ("block",)}, "block"),
        ({"threads": -1}, "threads"),
        ({"threads": 100000}, "threads"),
        ({"layers": (2, 5)}, "layer_count"),
        ({"contxt": 5}, "contxt"),
    ],
)
def test_bad_session_options_are_named(model: Model, options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        model.session(**options)


def test_a_cache_that_cannot_be_had_is_a_machine_error(model: Model) -> None:
    with pytest.raises(MachineError, match="memory"):
        model.session(context=1 << 24, sequences=4096)


def test_a_gpu_that_is_not_there_is_named(tiny_gguf: Path) -> None:
    """Whatever is missing: the build, the driver, the GPU. Without asking for one, the CPU does."""
    try:
        Model(tiny_gguf, device="cuda").close()
    except MachineError as error:
        assert re.fullmatch("device cuda: .* cpu works", str(error))
        with Model(tiny_gguf) as model:
            assert model.backend_name == "cpu"
            assert model.device_name == model.isa_name
            assert model.device_memory() is None
            model.load()  # nothing to do
    else:
        with Model(tiny_gguf) as model:
            assert model.backend_name == "cuda"


def test_bad_model_options_are_named(tiny_gguf: Path) -> None:
    with pytest.raises(InputError, match="cpu2"):
        Model(tiny_gguf, device="cpu2")
    with pytest.raises(InputError, match="sse9"):
        Model(tiny_gguf, isa="sse9")


def test_forks_share_pages_and_go_their_own_ways(model: Model) -> None:
    with model.session(context=256, sequences=2, kv_type="f32") as session:
        session.eval(IDS[:100], seq=0)
        used, _ = session.pages()
        session.fork(0, 1)
        assert session.pages()[0] == used and session.length(1) == 100
        a = session.eval_batch([(0, IDS[100:110]), (1, IDS[100:110])])
        assert (a[0] == a[1]).all()
        b = session.eval_batch([(1, IDS[120:130]), (0, IDS[110:120])])
        assert not (b[0] == b[1]).all()
        session.rewind(100, 1)
        assert (session.eval(IDS[100:110], seq=1) == a[0]).all()


def test_the_result_does_not_depend_on_where_pages_lie_or_what_was_there_before(model: Model) -> None:
    with model.session(context=256, kv_type="f32") as session:
        want = session.eval(IDS, all_logits=True)
    with model.session(context=256, sequences=3, kv_type="f32", page_seed=5, poison=True) as session:
        # Sequences grow and shrink in turn, so that the third one gets pages in no order, used before.
        for step in range(6):
            session.eval(IDS[:70], seq=step % 2)
            session.rewind(10 * (step % 3), step % 2)
        parts = [session.eval(IDS[i : i + 40], seq=2, all_logits=True) for i in range(0, 200, 40)]
    assert (np.concatenate(parts) == want).all()


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "neon"])
def test_instruction_sets_agree(tiny_gguf: Path, model: Model, isa: str) -> None:
    try:
        other = Model(tiny_gguf, isa=isa)
    except MachineError as error:
        pytest.skip(str(error))
    with other, other.session(context=256, kv_type="f32") as session, model.session(context=256, kv_type="f32") as s:
        np.testing.assert_allclose(session.eval(IDS), s.eval(IDS), atol=2e-4)


def test_dense_attention_has_no_block_lists_and_other_results(model: Model) -> None:
    with (
        model.session(context=256, attention="dense", record=("blocks",)) as dense,
        model.session(context=256) as sparse,
    ):
        a, b = dense.eval(IDS, all_logits=True), sparse.eval(IDS, all_logits=True)
        assert (a[:96] == b[:96]).all()  # three blocks of 32: all of them are read
        assert np.abs(a[97:] - b[97:]).max() > 0.01
        with pytest.raises(InputError, match="selects no blocks"):
            dense.selected_blocks(1)


def test_index_keys_keep_their_own_type(model: Model) -> None:
    lists = {}
    for kv, index in (("f32", "f32"), ("f16", "f32"), ("f32", "bf16")):
        with model.session(context=256, kv_type=kv, index_type=index, layers=(1, 1), record=("blocks",)) as session:
            hidden = np.random.default_rng(3).normal(size=(200, 128)).astype(np.float32)
            session.forward([(0, hidden)], output="hidden")
            lists[kv, index] = session.selected_blocks(1)
    # On the same hidden states the type of K and V cannot change what the first sparse layer selects.
    assert (lists["f16", "f32"] == lists["f32", "f32"]).all()
    assert (lists["f32", "bf16"] != lists["f32", "f32"]).any()


@pytest.mark.parametrize("index_type", ["f32", "f16", "bf16", "q8_0"])
def test_the_low_bit_scan_changes_nothing_but_the_work(model: Model, index_type: str) -> None:
    results = []
    for scan in ("full", "low_bit"):
        with model.session(context=256, index_type=index_type, index_scan=scan, record=("blocks",)) as session:
            session.eval(IDS[:150])
            steps = [session.eval(IDS[i : i + 1]) for i in range(150, 180)]
            lists = session.selected_blocks(2)
            results.append((np.array(steps), lists))
            bounded, rescored = session.index_scan_work()
            assert 0 < rescored <= bounded if scan == "low_bit" else bounded == 0
    assert (results[0][0] == results[1][0]).all() and (results[0][1] == results[1][1]).all()


def test_the_cpu_is_exact_with_and_without_being_asked(model: Model) -> None:
    results = []
    for exact in (False, True):
        assert model.msa(context=256, exact=exact) == ""  # there is one way only
        with model.session(context=256, exact=exact) as session:
            results.append(session.eval(IDS[:150]))
    assert (results[0] == results[1]).all()
    with pytest.raises(InputError, match="context is 0"):
        model.msa(context=0)


def test_low_bit_keys_are_kept_by_themselves_for_long_contexts_only(model: Model) -> None:
    def index_bytes(context: int, index_scan: str, index_type: str = "f32") -> int:
        return model.memory(context=context, index_scan=index_scan, index_type=index_type).index_bytes

    assert index_bytes(4096, "auto") == index_bytes(4096, "full") < index_bytes(4096, "low_bit")
    assert index_bytes(1 << 17, "auto") == index_bytes(1 << 17, "low_bit") > index_bytes(1 << 17, "full")
    assert index_bytes(1 << 17, "auto", "q8_0") == index_bytes(1 << 17, "full", "q8_0")  # as small as the copies


def test_ctrl_c_stops_an_evaluation_and_keeps_the_length(model: Model) -> None:
    with model.session(context=1 << 20) as session:
        session.eval(IDS)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            session.eval(np.tile(IDS, 4000))
        assert time.monotonic() - start < 20
        timer.join()
        assert session.length() == 200
        session.eval(IDS[:5])


INTERRUPTED_AT_ANY_MOMENT = """
import os, signal, sys, threading, time
import numpy as np
from m3_runtime import Model

ids = np.arange(100, 160, dtype=np.int32)
hits, armed = 0, False


def interrupt_if_armed(number, frame):
    if armed:
        raise KeyboardInterrupt


signal.signal(signal.SIGINT, interrupt_if_armed)
with Model(sys.argv[1]) as model:
    with model.session(context=128) as session:
        want = session.eval(ids)
    for trial in range(80):
        pause = 0.004 * trial / 80

        def interrupt():
            time.sleep(pause)
            for _ in range(1 + trial % 3):  # one, or more in a row
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.0003)

        session = model.session(context=128)
        sender = threading.Thread(target=interrupt)
        sender.start()
        armed = True
        try:
            session.eval(ids)
        except KeyboardInterrupt:
            armed = False
            hits += 1
        armed = False
        sender.join()
        # Undone, or complete where the signal came when all was done but the return to here.
        assert session.length() in (0, 60), (trial, session.length())
        session.rewind(0)
        assert (session.eval(ids) == want).all(), trial
        session.close()
print(hits)
"""


def test_ctrl_c_at_any_moment_of_the_first_evaluation(tiny_gguf: Path) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", INTERRUPTED_AT_ANY_MOMENT, str(tiny_gguf)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 10


def test_a_session_is_not_used_from_its_own_progress(model: Model) -> None:
    with model.session(context=1 << 13, chunk=16) as session:
        with pytest.raises(InputError, match="in use"):
            session.eval(np.tile(IDS, 20), progress=lambda done, total: session.rewind(0))
        assert session.length() == 0


def test_progress_is_reported(model: Model) -> None:
    seen: list[tuple[int, int]] = []
    with model.session(context=1 << 13, chunk=64) as session:
        session.eval(np.tile(IDS, 20), progress=lambda done, total: seen.append((done, total)))
        assert session.progress() == (12000, 12000)
    assert seen and all(total == 12000 and 0 <= done <= total for done, total in seen)
    assert seen == sorted(seen)


def test_an_error_in_the_progress_callback_stops_the_evaluation(model: Model) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with model.session(context=1 << 14, chunk=16) as session:
        with pytest.raises(RuntimeError, match="enough"):
            session.eval(np.tile(IDS, 80), progress=fail)
        assert session.length() == 0


def test_closed_things_say_so(tiny_gguf: Path) -> None:
    opened = Model(tiny_gguf)
    session = opened.session(context=64)
    opened.close()
    opened.close()
    with pytest.raises(InputError, match="closed"):
        session.eval(IDS[:4])
    with pytest.raises(InputError, match="closed"):
        opened.session(context=64)


def test_nan_in_the_file_names_the_layer(tiny_gguf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "nan.gguf"
    shutil.copy(tiny_gguf, broken)
    with GGUF(broken) as gguf:
        offset = next(t.offset for t in gguf.tensors if t.name == "blk.1.attn_k.weight")
    with broken.open("r+b") as file:
        file.seek(offset)
        file.write(np.float32(np.nan).tobytes())
    with Model(broken) as opened, opened.session(context=64) as session:
        with pytest.raises(NotFiniteError, match="layer 1"):
            session.eval(IDS[:10])
        assert session.length() == 0


def test_metadata_reads_every_kind_of_value(tiny_gguf: Path) -> None:
    with GGUF(tiny_gguf) as gguf:
        metadata = gguf.metadata
        assert metadata["general.architecture"] == "minimax-m3"
        assert metadata["minimax-m3.block_count"] == 3
        assert metadata["minimax-m3.expert_weights_norm"] is True
        assert metadata["minimax-m3.rope.freq_base"] == 5e6
        tokens = metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list) and len(tokens) == 1024 and all(isinstance(t, str) for t in tokens)
        assert len(metadata) == len(list(metadata))
        with pytest.raises(KeyError):
            metadata["none"]
        assert gguf.tensor_data("output_norm.weight").nbytes == 128 * 4
        with pytest.raises(InputError, match="no data"):
            gguf.tensor_data("none")
    with pytest.raises(InputError, match="closed"):
        gguf.tensor_data("output_norm.weight")
    with pytest.raises(KeyError):
        metadata["general.name"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("missing library", "libm3.so is missing"),
        ("missing header", "m3.h is missing"),
        ("not a library", "cannot be loaded"),
        ("old library", "interface version"),
    ],
)
def test_an_engine_that_is_missing_or_broken_is_named(tmp_path: Path, damage: str, says: str) -> None:
    package = tmp_path / "m3_runtime"
    shutil.copytree(LIBRARY_FOLDER.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    library, header = package / "lib" / "libm3.so", package / "lib" / "m3.h"
    if damage == "missing library":
        library.unlink()
    elif damage == "missing header":
        header.unlink()
    elif damage == "not a library":
        library.write_bytes(b"\x7fELF nothing")
    else:
        text = header.read_text()
        assert text.count("#define M3_ABI_VERSION ") == 1
        header.write_text(text.replace("#define M3_ABI_VERSION ", "#define M3_ABI_VERSION 9"))
    code = """
import sys
from m3_runtime.errors import MachineError
try:
    import m3_runtime.native
except MachineError as error:
    sys.exit(str(error))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and says in run.stderr, run.stderr


def test_an_evaluation_that_ends_as_it_is_looked_at(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m3_runtime.engine._POLL", 0.0)
    with model.session(context=1024) as session:
        for i in range(1000):
            session.eval(IDS[i % len(IDS)][None])
        assert session.length() == 1000
