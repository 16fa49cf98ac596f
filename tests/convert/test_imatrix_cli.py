"""m3-imatrix on small models: what is summed, and the command from its arguments to its report."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from m3_convert import imatrix_cli, imatrix_collect, walk_progress
from m3_convert.imatrix import ImportanceMatrix
from m3_convert.imatrix_collect import collect, expert_reach, weight_shapes
from m3_convert.layered_model import open_layered
from m3_convert.walker import WalkOptions
from m3_runtime import GGUF, Model
from tiny_model import convert

NANO = Path(__file__).parents[2] / "models" / "m3-nano"
ONE = WalkOptions(threads=1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "fox.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and 17 others do not. " * 12, encoding="utf-8")
    return path


def random_ids(n, vocab=900):
    return np.random.default_rng(2).integers(0, vocab, n).astype(np.int32)


def patched(source, target, change):
    """A copy of an F32 GGUF file; change(name, values) alters float32 values in place."""
    shutil.copy(source, target)
    with GGUF(source) as gguf:
        tensors = gguf.tensors
    content = np.memmap(target, np.uint8, "r+")
    for tensor in tensors:
        change(tensor.name, content[tensor.offset : tensor.offset + tensor.n_bytes].view(np.float32))
    content.flush()
    return target


# ------------------------------------------------------------------------------------------------ the numbers


class Weights:
    """Matrices of one layer of an F32 file, and what the model computes with them, in double precision."""

    def __init__(self, path, layer):
        with GGUF(path) as gguf:
            self.of = {
                t.name: np.frombuffer(gguf.tensor_data(t.name), "<f4").reshape(t.ne[::-1]).astype(np.float64)
                for t in gguf.tensors
                if t.name.startswith(f"blk.{layer}.") or t.name.startswith("output")
            }
        self.layer = layer

    def __getitem__(self, name):
        return self.of[f"blk.{self.layer}.{name}"]

    def norm(self, x, weight):
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * weight

    def gated(self, x, gate, up):
        g, u = np.minimum(x @ gate.T, 7), np.clip(x @ up.T, -7, 7)
        return g / (1 + np.exp(-1.702 * g)) * (u + 1)

    def chosen(self, x, used):
        probability = 1 / (1 + np.exp(-(x @ self["ffn_gate_inp.weight"].T)))
        return np.argsort(-(probability + self["exp_probs_b.bias"]), axis=1)[:, :used]


def hidden_after(path, layers, rows):
    """Hidden states after a window of layers, (first, count)."""
    with Model(path) as model, model.session(context=len(rows), layers=layers, threads=1) as session:
        return session.forward([(0, rows)], output="hidden")


def square_sums(x):
    return (x**2).sum(axis=0)


def check_layer(path, layer, ids, found, tmp_path):
    """The sums of one layer of experts, from hidden states that the engine gives out.

    A copy of the model whose experts give nothing leaves the states in the middle of the layer as its output; one whose
    attn_output is a piece of the identity too leaves some of the channels that attn_output gets.
    """
    w = Weights(path, layer)
    at = f"blk.{layer}."
    before = hidden_after(path, (0, layer), ids)
    x = w.norm(before.astype(np.float64), w["attn_norm.weight"])
    for name in ("attn_q", "attn_k", "attn_v", "indexer.q_proj", "indexer.k_proj"):
        entry = found[f"{at}{name}.weight"]
        np.testing.assert_allclose(entry.sums[0], square_sums(x), rtol=2e-5, err_msg=name)
        assert entry.counts.tolist() == [len(ids)]

    def silent(name, values, piece=None):
        if name in (f"{at}ffn_down_exps.weight", f"{at}ffn_down_shexp.weight"):
            values[:] = 0
        if name == f"{at}attn_output.weight" and piece is not None:
            n = before.shape[1]
            matrix = values.reshape(n, -1)
            matrix[:] = 0
            matrix[:, piece * n : (piece + 1) * n] = np.eye(n)

    target = tmp_path / "silent.gguf"
    middle = hidden_after(patched(path, target, silent), (layer, 1), before)
    x = w.norm(middle.astype(np.float64), w["ffn_norm.weight"])
    for name in ("ffn_gate_shexp", "ffn_up_shexp", "ffn_gate_inp"):
        np.testing.assert_allclose(found[f"{at}{name}.weight"].sums[0], square_sums(x), rtol=2e-5, err_msg=name)
    down = w.gated(x, w["ffn_gate_shexp.weight"], w["ffn_up_shexp.weight"])
    np.testing.assert_allclose(found[f"{at}ffn_down_shexp.weight"].sums[0], square_sums(down), rtol=1e-4)
    with Model(path) as model:
        chosen = w.chosen(x, model.hparams.n_expert_used)
    for expert in range(len(w["exp_probs_b.bias"])):
        rows = x[(chosen == expert).any(axis=1)]
        down = w.gated(rows, w["ffn_gate_exps.weight"][expert], w["ffn_up_exps.weight"][expert])
        for name, values in (("ffn_gate_exps", rows), ("ffn_up_exps", rows), ("ffn_down_exps", down)):
            entry = found[f"{at}{name}.weight"]
            assert entry.counts[expert] == len(rows), (name, expert)
            np.testing.assert_allclose(entry.sums[expert], square_sums(values), rtol=1e-4, atol=1e-5, err_msg=name)
    width = found[f"{at}attn_output.weight"].sums.shape[1]
    n = before.shape[1]
    for piece in range(width // n):
        patched(path, target, lambda name, values, piece=piece: silent(name, values, piece))
        attended = hidden_after(target, (layer, 1), before).astype(np.float64) - before
        sums = found[f"{at}attn_output.weight"].sums[0, piece * n : (piece + 1) * n]
        np.testing.assert_allclose(sums, square_sums(attended), rtol=1e-3, atol=1e-6 * len(ids))


def check_head(path, layers, ids, found):
    w = Weights(path, 0)
    x = w.norm(hidden_after(path, (0, layers), ids).astype(np.float64), w.of["output_norm.weight"])
    np.testing.assert_allclose(found["output.weight"].sums[0], square_sums(x), rtol=2e-5)


def test_sums_are_those_of_the_inputs(tiny_gguf, tmp_path):
    ids = random_ids(150)  # 96 tokens are read in full
    with open_layered(tiny_gguf) as model:
        found = collect(model, ids, len(ids), ONE)
    for layer in (1, 2):
        check_layer(tiny_gguf, layer, ids, found, tmp_path)
    check_head(tiny_gguf, 3, ids, found)
    w = Weights(tiny_gguf, 0)
    np.testing.assert_allclose(
        found["blk.0.attn_v.weight"].sums[0],
        square_sums(w.norm(embedded(tiny_gguf, ids), w["attn_norm.weight"])),
        rtol=2e-5,
    )


def embedded(path, ids):
    with GGUF(path) as gguf:
        n_embd = gguf.metadata["minimax-m3.embedding_length"]
        return np.frombuffer(gguf.tensor_data("token_embd.weight"), "<f4").reshape(-1, n_embd)[ids].astype(np.float64)


def test_sums_of_m3_nano(tmp_path):
    """The trained model, over a text in which the blocks that are read matter."""
    file = convert(NANO, tmp_path / "nano-f32.gguf", "--type", "f32")
    ids = random_ids(700, 4096)  # 512 tokens are read in full
    with open_layered(file) as model:
        found = collect(model, ids, len(ids), ONE)
    check_layer(file, 3, ids, found, tmp_path)
    check_head(file, 5, ids, found)


def test_layer_by_layer_equals_the_whole_model(tiny_gguf):
    ids = random_ids(180)
    with open_layered(tiny_gguf) as model:
        found = collect(model, ids, 100, ONE)
        shapes = weight_shapes(model)
    with Model(tiny_gguf) as model, model.session(context=100, sequences=2, record=("importance",)) as session:
        session.eval_batch([(0, ids[:100]), (1, ids[100:])])
        for name, shape in shapes.items():
            sums, counts = session.importance(name)
            assert sums.shape == shape and sums.dtype == np.float64
            np.testing.assert_array_equal(sums.astype(np.float32), found[name].sums)
            np.testing.assert_array_equal(counts, found[name].counts)


def test_chunks_are_read_on_their_own(tiny_gguf):
    ids = random_ids(200)
    with open_layered(tiny_gguf) as model:
        found = collect(model, ids, 80, ONE)
        parts = [collect(model, ids[start : start + 80], 80, ONE) for start in range(0, 200, 80)]
        whole = collect(model, ids, 1000, ONE)
    for name, entry in found.items():
        np.testing.assert_allclose(entry.sums, sum(part[name].sums for part in parts), rtol=1e-6)
        np.testing.assert_array_equal(entry.counts, sum(part[name].counts for part in parts))
    first = "blk.0.attn_q.weight"
    np.testing.assert_array_equal(found[first].sums, whole[first].sums)  # the embeddings know nothing of chunks
    assert not np.array_equal(found["blk.1.attn_q.weight"].sums, whole["blk.1.attn_q.weight"].sums)


def test_every_matrix_that_is_multiplied_is_there(tiny_gguf):
    with open_layered(tiny_gguf) as model:
        found = collect(model, random_ids(20), 20, ONE)
        names = {t.name: t.ne for t in model.model.gguf.tensors}
    matrices = {name for name, ne in names.items() if len(ne) > 1}
    assert found.keys() == matrices - {"token_embd.weight"}
    for name, entry in found.items():
        assert entry.sums.shape == (names[name][2] if len(names[name]) > 2 else 1, names[name][0])
        assert entry.counts.sum() == (40 if "_exps" in name else 20)


def test_an_expert_that_the_text_never_reaches(tiny_gguf, m3_imatrix, text, tmp_path):
    def avoid(name, values):
        if name == "blk.2.exp_probs_b.bias":
            values[3] = -100

    model = patched(tiny_gguf, tmp_path / "avoid.gguf", avoid)
    out = tmp_path / "x.imatrix.gguf"
    run = m3_imatrix(model, out, "--text", text, "--threads", 1)
    assert run.code == 0
    assert "experts: 1 of 8 were never reached (layer/expert 2/3)" in run.out
    found = ImportanceMatrix.load(out)
    for name in ("gate", "up", "down"):
        weights = [found.for_matrix(f"blk.2.ffn_{name}_exps.weight", expert) for expert in range(4)]
        assert weights[3] is None and all(w is not None and (w >= 0).all() and w.any() for w in weights[:3])
    with open_layered(model) as side:
        _, coverage = found.fitted(weight_shapes(side))
    assert coverage.unreached == {f"blk.2.ffn_{name}_exps.weight": (3,) for name in ("gate", "up", "down")}
    assert coverage.without == () == coverage.unused
    report = m3_imatrix(model, out, "--text", text, "--threads", 1, "--json").json
    assert report["experts"]["unreached"] == [{"layer": 2, "expert": 3}] and report["experts"]["total"] == 8


def test_reach_of_experts():
    counts = {"blk.3.ffn_down_exps.weight": [7, 0, 2], "blk.10.ffn_down_exps.weight": [0, 9, 9]}
    entries = {
        name: imatrix_collect.Entry(np.zeros((3, 1), np.float32), np.array(c, np.float32)) for name, c in counts.items()
    }
    assert expert_reach(entries) == imatrix_collect.ExpertReach(6, ((3, 1), (10, 0)), (3, 2), 2)
    assert expert_reach({}) == imatrix_collect.ExpertReach(0, (), None, 0)


# ------------------------------------------------------------------------------------------------ the command


def test_folder_and_file_give_the_same_bytes(tiny_checkpoint, tiny_q8_gguf, m3_imatrix, text, tmp_path):
    auto = convert(tiny_checkpoint, tmp_path / "auto.gguf")
    outs = []
    for i, (source, threads) in enumerate([(tiny_checkpoint, 1), (auto, 1), (auto, 2), (tiny_q8_gguf, 1)]):
        outs.append(tmp_path / f"{i}.imatrix.gguf")
        run = m3_imatrix(source, outs[-1], "--text", text, "--threads", threads)
        assert run.code == 0, run.err
    contents = [out.read_bytes() for out in outs]
    assert contents[0] == contents[1] == contents[2] != contents[3]
    exact, rounded = (ImportanceMatrix.load(out).entries for out in (outs[0], outs[3]))
    for name, entry in exact.items():
        if "_exps" not in name:
            np.testing.assert_allclose(rounded[name].sums, entry.sums, rtol=0.3)
    assert {p.name for p in tmp_path.iterdir()} == {*(out.name for out in outs), "auto.gguf", text.name}


def test_the_report(tiny_gguf, m3_imatrix, text, tmp_path):
    out = tmp_path / "x.imatrix.gguf"
    run = m3_imatrix(tiny_gguf, out, "--text", text, "--context", 100, "--chunks", 2, "--threads", 1, "--json")
    report = run.json
    assert " ".join(report) == "schema program source out text settings experts memory seconds"
    assert report["out"] == {"path": str(out), "bytes": out.stat().st_size, "tensors": 34}
    assert report["text"]["tokens"] == 200 and report["text"]["whole"] is False and report["text"]["name"] == str(text)
    assert report["settings"] == {
        "attention": "sparse",
        "context": 100,
        "chunks": 2,
        "kv_type": "f16",
        "index_type": "f32",
        "isa": report["settings"]["isa"],
        "threads": 1,
    }
    found = ImportanceMatrix.load(out)
    assert (found.datasets, found.chunk_count, found.chunk_size) == (("fox.txt",), 2, 100)
    assert found.entries["output.weight"].counts.tolist() == [200]
    plain = m3_imatrix(tiny_gguf, out, "--text", text, "--context", 100, "--chunks", 1, "--threads", 1)
    assert "importance of 34 tensors" in plain.out and "from 100 tokens of " in plain.out
    assert "in 1 chunk of 100" in plain.out and "fewest rows of an expert" in plain.out
    assert "100 tokens in 1 chunk take about" in plain.err.splitlines()[0]
    assert "note: in chunks" not in plain.err  # 97 tokens give a choice


def test_the_context(tiny_gguf, m3_imatrix, text, tmp_path):
    out = tmp_path / "x.imatrix.gguf"
    run = m3_imatrix(tiny_gguf, out, "--text", text, "--context", 96, "--chunks", 1, "--threads", 1)
    assert run.code == 0 and "they choose from 97 tokens on" in run.err
    run = m3_imatrix(tiny_gguf, out, "--text", text, "--context", 4097)
    assert run.code == 2 and "--context is 4097, the model was trained for 4096 tokens" in run.error
    with Model(tiny_gguf) as model:
        h = model.hparams
    assert imatrix_collect.default_context(h) == 512
    wide = {"top_k": 16, "block_size": 128}
    assert imatrix_collect.default_context(type(h)(**{**vars(h), **wide, "context_train": 1 << 20})) == 4096
    assert imatrix_collect.default_context(type(h)(**{**vars(h), **wide, "context_train": 3000})) == 3000


def test_a_short_text_is_one_chunk(tiny_gguf, m3_imatrix, text, tmp_path):
    out = tmp_path / "x.imatrix.gguf"
    text.write_text("few words")
    report = m3_imatrix(tiny_gguf, out, "--text", text, "--json", "--threads", 1).json
    assert report["settings"]["chunks"] == 1 and report["text"]["whole"] is True
    assert ImportanceMatrix.load(out).entries["output.weight"].counts.tolist() == [report["text"]["tokens"]]


def test_few_tokens_are_noted(tiny_gguf, m3_imatrix, text, tmp_path, monkeypatch):
    with Model(tiny_gguf) as model:
        h = model.hparams
    m3 = type(h)(**{**vars(h), "n_expert": 128, "n_expert_used": 4})
    assert imatrix_collect.useful_tokens(m3) == 6400
    experts = (h.n_layer - h.n_dense_layer) * h.n_expert
    for content, n in (("a", 1), ("few words", None)):
        text.write_text(content)
        run = m3_imatrix(tiny_gguf, tmp_path / "x.gguf", "--text", text, "--json")
        n = n or run.json["text"]["tokens"]
        unreached = len(run.json["experts"]["unreached"])
        assert run.code == 0 and (unreached == experts - 2 * h.n_expert_used or n > 1)
        tokens = "1 token is" if n == 1 else f"{n} tokens are"
        useful = imatrix_collect.useful_tokens(h)
        (note,) = [line for line in run.err.splitlines() if "too few" in line]
        assert note == (
            f"m3-imatrix: note: {tokens} too few to tell columns apart, {useful} or more would do; {unreached} of "
            f"{experts} experts were never reached"
        )
    monkeypatch.setattr(imatrix_collect, "_USEFUL_ROWS", 1)
    text.write_text("The quick brown fox jumps over the lazy dog.")
    assert "too few" not in m3_imatrix(tiny_gguf, tmp_path / "x.gguf", "--text", text).err


def test_texts_that_cannot_be_read(tiny_gguf, m3_imatrix, tmp_path):
    out = tmp_path / "x.imatrix.gguf"
    for content, message in ((b"", "the text is empty"), (b"abc\xe9 x", "expected UTF-8, found byte 0xe9 at offset 3")):
        (tmp_path / "text").write_bytes(content)
        run = m3_imatrix(tiny_gguf, out, "--text", tmp_path / "text")
        assert (run.code, run.out) == (2, "") and message in run.error
    run = m3_imatrix(tiny_gguf, out, "--text", tmp_path / "absent")
    assert run.code == 2 and "absent: the text cannot be read" in run.error
    run = m3_imatrix(tiny_gguf, out)
    assert run.code == 2 and "--text" in run.error
    assert not out.exists()


def test_outputs_that_cannot_be_written(tiny_gguf, tiny_checkpoint, m3_imatrix, text, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_gguf)
    config = tiny_checkpoint / "config.json"
    before = tiny_gguf.read_bytes(), config.read_bytes()
    for source, out, message in (
        (tiny_gguf, tmp_path, "expected a file name for the importance matrix, found a folder"),
        (tiny_gguf, tmp_path / "no" / "x.gguf", "no does not exist"),
        (tiny_gguf, tiny_gguf, "is part of the source"),
        (tiny_gguf, link, "is part of the source"),
        (tiny_checkpoint, config, "is part of the source"),
        (tiny_gguf, "/dev/null", "found a device or pipe"),
        (tiny_gguf, tmp_path / ("x" * 300), "File name too long"),
    ):
        run = m3_imatrix(source, out, "--text", text)
        assert (run.code, run.out) == (2, ""), out
        assert message in run.error and str(out) in run.error
    assert before == (tiny_gguf.read_bytes(), config.read_bytes())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "--context"),
        (["--chunks", "0"], "--chunks"),
        (["--threads", "-1"], "--threads"),
        (["--kv-type", "q5_1"], "--kv-type is 'q5_1', expected one of f32, f16, bf16, q8_0, q4_0"),
        (["--index-type", "int8"], "--index-type is 'int8', expected one of f32, f16, bf16"),
        (["--isa", "mmx"], "isa is 'mmx'"),
        (["a third argument"], "a third argument"),
    ],
)
def test_wrong_arguments(tiny_gguf, m3_imatrix, text, tmp_path, arguments, message):
    run = m3_imatrix(tiny_gguf, tmp_path / "x.gguf", "--text", text, *arguments)
    assert (run.code, run.out) == (2, "")
    assert len(run.err.splitlines()) == 1 and message in run.err


def test_a_source_that_is_no_model(m3_imatrix, text, tmp_path):
    for name in ("absent", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        run = m3_imatrix(tmp_path / name, tmp_path / "x.gguf", "--text", text)
        assert (run.code, run.out) == (2, "") and str(tmp_path / name) in run.error


@pytest.mark.parametrize("broken", ["blk.1.attn_q.weight", "blk.2.ffn_down_exps.weight", "output_norm.weight"])
def test_nan_is_an_error_and_leaves_no_file(tiny_gguf, m3_imatrix, text, tmp_path, broken):
    def spoil(name, values):
        if name == broken:
            values[:] = np.nan

    model = patched(tiny_gguf, tmp_path / "nan.gguf", spoil)
    out = tmp_path / "x.imatrix.gguf"
    out.write_bytes(b"as it was")
    run = m3_imatrix(model, out, "--text", text, "--threads", 1)
    assert (run.code, run.out) == (2, "")
    where = f"layer {broken[4]}: " if broken.startswith("blk.") else "the input of the output head is NaN"
    assert run.error.startswith(f"m3-imatrix: {model}: {where}")
    assert out.read_bytes() == b"as it was"
    assert {p.name for p in tmp_path.iterdir()} == {"nan.gguf", out.name, text.name}


def test_memory_is_checked_before_the_start(tiny_gguf, m3_imatrix, text, tmp_path, monkeypatch):
    monkeypatch.setattr(imatrix_cli.memory, "session_room", lambda: 10**6)
    run = m3_imatrix(tiny_gguf, tmp_path / "x.gguf", "--text", text)
    assert (run.code, run.out) == (4, "")
    assert "not enough memory: collecting takes" in run.error and "1.0 MB are free" in run.error


def test_a_full_disk(tiny_gguf, m3_imatrix, text, tmp_path, monkeypatch):
    def fail(_self, _path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ImportanceMatrix, "_write", fail)
    run = m3_imatrix(tiny_gguf, tmp_path / "x.gguf", "--text", text, "--chunks", 1, "--threads", 1)
    assert run.code == 4
    assert run.error.endswith("x.gguf.part: cannot be written: No space left on device; nothing was kept")
    assert {p.name for p in tmp_path.iterdir()} == {text.name}


def test_the_estimate_grows_with_what_is_kept(tiny_gguf, tiny_checkpoint):
    with open_layered(tiny_gguf) as file, open_layered(tiny_checkpoint) as folder:
        estimate = imatrix_collect.estimate_memory(file, 4000, 1000, ONE)
        more = imatrix_collect.estimate_memory(file, 8000, 1000, ONE)
        assert more.own - estimate.own == 4000 * (file.hparams.n_embd + 1) * 4 and more.mapped == estimate.mapped
        longer = imatrix_collect.estimate_memory(file, 4000, 2000, ONE)
        assert longer.own > estimate.own
        owned = imatrix_collect.estimate_memory(folder, 4000, 1000, ONE)
        assert owned.mapped == 0
        assert estimate.own < owned.own <= estimate.own + max(folder.layer_bytes(layer) for layer in range(3))


def test_progress_lines(tiny_checkpoint, m3_imatrix, text, tmp_path, monkeypatch):
    monkeypatch.setattr(walk_progress, "LINE_SECONDS", 0.0)
    run = m3_imatrix(tiny_checkpoint, tmp_path / "x.gguf", "--text", text, "--context", 100, "--threads", 1)
    lines = [line for line in run.err.splitlines() if line.endswith(" left")]
    assert lines[0].startswith("m3-imatrix: layer 1 of 3, ")
    assert lines[-1].startswith("m3-imatrix: layer 3 of 3, 99%, 0.0 s left")


def test_ctrl_c(tiny_checkpoint, text, tmp_path):
    text.write_text("one more word and " * 20000)
    out = tmp_path / "x.imatrix.gguf"
    command = [sys.executable, "-m", "m3_convert.imatrix_cli", str(tiny_checkpoint), str(out), "--text", str(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        assert "of memory at the peak" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.stdout.read() == ""
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "m3-imatrix: interrupted" and "Traceback" not in rest
    assert {p.name for p in tmp_path.iterdir()} == {text.name}


def test_help(m3_imatrix):
    run = m3_imatrix("--help")
    assert run.code == 0
    for part in ("SOURCE", "OUT.imatrix.gguf", "--text", "--context", "--chunks", "--json", "Exit codes"):
        assert part in " ".join(run.out.split())
