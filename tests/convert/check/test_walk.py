"""The walk through the layers: equal to the whole model, in bounded memory, whatever threads, chunks and caches."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert.check.small_check import EXAMPLE, FIRST, LISTS, N, assert_exactly_equal
from m3_convert import check, check_runs, check_walk, walker
from m3_convert.check_runs import CheckRuns
from m3_convert.comparison import LayerComparison
from m3_convert.layered_model import open_layered
from m3_convert.mixed_model import MixedModel
from m3_runtime import InputError, Model, Session
from make_checkpoint import CheckpointSpec, make_checkpoint


@pytest.mark.parametrize("fixture", ["tiny_gguf", "tiny_checkpoint"])
def test_layer_by_layer_equals_the_whole_model(request, m3_convert, monkeypatch, tmp_path, fixture):
    """Block lists, and with them all that led to them, are those of one evaluation of the whole model."""
    path = request.getfixturevalue(fixture)
    file = path
    if path.is_dir():
        file = tmp_path / "auto.gguf"
        m3_convert(path, file)
    seen = []
    add = LayerComparison.add

    def record(self, rows, lists):
        seen.append((rows, lists))
        return add(self, rows, lists)

    monkeypatch.setattr(LayerComparison, "add", record)
    n = walker.CHUNK + 130  # not a whole number of chunks, nor of blocks
    ids = np.random.default_rng(1).integers(0, 900, n).astype(np.int32)
    options = walker.WalkOptions(threads=1)
    with open_layered(path) as reference, open_layered(path) as candidate:
        check_walk.walk(CheckRuns(reference, candidate, options, options, logits=False), ids)
    with (
        Model(file) as model,
        model.session(context=n, record=("blocks", "scores", "mass"), threads=1) as session,
    ):
        session.forward([(0, ids)], output="hidden")
        for i, layer in enumerate((1, 2)):
            chunks = seen[2 * i : 2 * i + 2]
            whole = session.selected_blocks(layer)[FIRST:]
            np.testing.assert_array_equal(np.concatenate([rows.lists for rows, _ in chunks]), whole)
            np.testing.assert_array_equal(np.concatenate([lists for _, lists in chunks]), whole)
            for name, found in (("scores", session.block_scores(layer)), ("mass", session.attention_mass(layer))):
                parts = np.concatenate([getattr(rows, name) for rows, _ in chunks])
                np.testing.assert_array_equal(parts, found[FIRST:], err_msg=name)


def test_all_memory_of_a_layer_is_let_go(tiny_gguf, tiny_checkpoint):
    for path in (tiny_gguf, tiny_checkpoint):
        with open_layered(path) as model:
            sizes = []
            with model.bound(0, sizes.append), model.model.session(layers=(0, 1)) as session:
                session.forward([(0, [1, 2, 3])], output="hidden")
            assert sum(sizes) == model.layer_bytes(0)
            with (
                model.model.session(layers=(0, 1)) as session,
                pytest.raises(InputError, match=r"token_embd"),
            ):
                session.forward([(0, [1, 2, 3])], output="hidden")


PEAK = """
import sys
from pathlib import Path
from m3_runtime import command
from m3_convert.check_cli import NAME, app
try:
    command.run(app, NAME, sys.argv[1:])
except SystemExit as exit_:
    assert exit_.code == 0, exit_.code
status = Path("/proc/self/status").read_text()
print([line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")][0], file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_peak_memory_does_not_grow_with_the_layers(m3_convert, tmp_path):
    """Layers of 6 MB on both sides: one of them in memory at a time, whether they are read or mapped."""
    peaks = []
    for layers in (2, 6):
        folder, file = tmp_path / f"{layers}", tmp_path / f"{layers}.gguf"
        spec = CheckpointSpec(
            layers=layers, dense=1, hidden=256, heads=2, kv_heads=1, head_dim=32, rotary=16, index_dim=32, experts=16,
            top=2, inter=256, shared_inter=256, dense_inter=64, vocab=512, block=16, top_k=2, vision=False,
        )  # fmt: skip
        make_checkpoint(folder, spec)
        assert m3_convert(folder, file).code == 0
        command = [sys.executable, "-c", PEAK, str(folder), str(file), "--context", "40", "--threads", "1"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(run.stderr.splitlines()[-1]) * 1024)
    assert peaks[1] - peaks[0] < 10e6  # four layers more are 25 MB on each side


def test_the_estimate_names_what_is_needed(tiny_gguf, tiny_checkpoint, monkeypatch):
    options, n = walker.WalkOptions(), 4096

    def estimate(reference, candidate, **more):
        return CheckRuns(reference, candidate, options, options, **more).memory(n)

    with open_layered(tiny_gguf) as file, open_layered(tiny_checkpoint) as folder:
        h = file.hparams
        state = n * h.n_embd * 4
        session = file.model.memory(context=n, layers=(1, 1), chunk=512, record=("scores", "mass")).total
        mapped = estimate(file, file, logits=False)
        assert mapped.mapped == max(file.layer_bytes(layer) for layer in range(3))
        assert 2 * state + session < mapped.own < 3 * (state + session)
        owned = estimate(folder, folder, logits=False)
        assert owned.mapped == 0
        weights = max(folder.layer_bytes(layer) for layer in range(3))
        assert mapped.own < owned.own <= mapped.own + weights
        mixed = estimate(file, folder, logits=False)
        # The most that one phase takes: here the layer of the file, whose weights are F32.
        assert mapped.own < mixed.own <= owned.own and mixed.total == mapped.total
        # The forced run has a state; the head of both sides is bound at once.
        forced = estimate(file, file)
        assert forced.mapped >= 2 * file.layer_bytes(3)
        with monkeypatch.context() as patch:
            patch.setattr(CheckRuns, "forced", property(lambda _: False))
            lists = n * h.n_index_head * h.top_k * 4
            assert forced.own - estimate(file, file).own == state + lists
        with MixedModel(file, folder, "index") as restored:
            assert estimate(file, file, groups=[restored]).own >= forced.own + state


def test_memory_is_checked_before_the_start(tiny_gguf, m3_check_selection, monkeypatch):
    monkeypatch.setattr(check.memory, "session_room", lambda: 10**6)
    run = m3_check_selection(tiny_gguf, tiny_gguf, *EXAMPLE)
    assert (run.code, run.out) == (4, "")
    assert "not enough memory: the check takes" in run.error and "1.0 MB are free" in run.error


def test_threads_and_instruction_sets_do_not_matter(tiny_gguf, tiny_q8_gguf, m3_check_selection):
    runs = [m3_check_selection(tiny_gguf, tiny_q8_gguf, "--context", N, "--json", "--threads", t) for t in (1, 2)]
    for part in ("overall", "layers", "logits", "worst"):
        assert runs[0].json[part] == runs[1].json[part], part
    assert [run.json["settings"]["threads"] for run in runs] == [1, 2]
    scalar = m3_check_selection(tiny_gguf, tiny_gguf, *EXAMPLE, "--json", "--isa", "scalar").json
    assert scalar["settings"]["isa"] == "scalar"
    assert_exactly_equal(scalar, 2, 2, N - FIRST)


def test_chunks_do_not_matter(tiny_gguf, tiny_q8_gguf, m3_check_selection, monkeypatch):
    command = (tiny_gguf, tiny_q8_gguf, *EXAMPLE, "--json", "--isolate", "--attribute", "--group", "experts")
    whole = m3_check_selection(*command).json
    monkeypatch.setattr(walker, "CHUNK", 37)
    monkeypatch.setattr(check_runs, "HEAD_LOGITS", 5 * 1024)
    parts = m3_check_selection(*command).json
    for part in ("overall", "layers", "logits", "isolated", "attribution", "worst"):
        assert parts[part] == whole[part], part


def test_cache_types_reach_both_models(tiny_gguf, m3_check_selection, monkeypatch):
    seen = []
    forward = Session.forward

    def spy(self, *arguments, **options):
        seen.append(self)
        return forward(self, *arguments, **options)

    opened = []
    session = Model.session
    monkeypatch.setattr(Session, "forward", spy)
    monkeypatch.setattr(Model, "session", lambda self, **options: opened.append(options) or session(self, **options))
    types = ("--kv-type", "BF16", "--index-type", "f16", "--candidate-kv-type", "q8_0")
    run = m3_check_selection(tiny_gguf, tiny_gguf, *LISTS, "--json", *types)
    settings = run.json["settings"]
    assert settings["reference"] == {"attention": "sparse", "kv_type": "bf16", "index_type": "f16"}
    assert settings["candidate"] == {"attention": "sparse", "kv_type": "q8_0", "index_type": "f16"}
    assert len(opened) == 2 * 3 == len(seen)
    assert {o["index_type"] for o in opened} == {"f16"}
    assert [(o["layers"], o["kv_type"]) for o in opened] == [
        ((layer, 1), type_) for layer in range(3) for type_ in ("q8_0", "bf16")
    ]
