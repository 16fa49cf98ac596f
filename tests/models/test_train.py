"""The training of m3-nano on a CPU, with a model made for tests: it learns, stops, goes on, exports, is evaluated."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from checkpoint import export, load_index_projections, load_master, load_release  # noqa: E402
from evaluate import score_answers  # noqa: E402
from make_checkpoint import TEXT  # noqa: E402
from model import SMALL, Model, Pass, Stage  # noqa: E402
from train import LOG_STEPS, Options, Trainer  # noqa: E402
from vocabulary import encode_documents, train_tokenizer, write_ids  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder made of the text that m3-check-selection brings along."""
    folder = tmp_path_factory.mktemp("data")
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = train_tokenizer([text], 1024)
    tokenizer.save(str(folder / "tokenizer.json"))
    middle = len(text) // 2
    ids = np.concatenate(list(encode_documents(tokenizer, [text[:middle], text[middle:]], 2)))
    write_ids(folder / "train.xz", ids)
    np.save(folder / "heldout.npy", ids)
    definitions = [["apple", "fruit with red skin"], ["stone", "a lump of mineral"], ["king", "a male sovereign"]]
    (folder / "definitions.json").write_text(json.dumps(definitions), encoding="utf-8")
    return folder


def options(data: Path, out: Path, **changes) -> Options:
    plain = {"batch": 2, "index_rows": 32, "workers": 0, "device": "cpu", "compile": False, "check": False}
    return Options(data, out, **(plain | changes))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in stage 1 and went on to the end."""
    out = tmp_path_factory.mktemp("run")
    first = Trainer(options(data, out, steps=LOG_STEPS, seconds=1e9), SMALL)
    assert not first.train()
    first.save()
    assert first.stage is Stage.FULL
    second = Trainer(options(data, out, steps=2 * LOG_STEPS, seconds=first.state.seconds * 20, stage1=0.01), SMALL)
    assert second.state.step == LOG_STEPS
    moments = [state["exp_avg"].abs().sum().item() for state in second.optimizer.state.values()]
    assert len(moments) > 20
    assert max(moments) > 0
    second.train()
    second.evaluate()
    second.save()
    return out


def test_both_stages_learn(trained: Path):
    _, meta = load_master(trained, "cpu")
    history = meta["state"]["history"]
    assert [entry[3] for entry in history[:2]] == [Stage.FULL.value, Stage.SPARSE.value]
    entropies = [entry[4] for entry in history]
    assert entropies[0] < np.log(SMALL.vocab)
    assert entropies[1] < entropies[0] - 0.3
    assert np.isfinite(history).all()
    evaluation = meta["state"]["evaluations"][-1]
    assert {"full entropy", "sparse entropy", "full recall", "sparse recall", "full hard", "sparse hard"} < set(
        evaluation
    )


def test_the_index_branch_learns_the_main_branch():
    """The divergence goes down when nothing but the index projections may move."""
    torch.manual_seed(3)
    model = Model(SMALL)
    index = [p for n, p in model.named_parameters() if "index" in n]
    optimizer = torch.optim.Adam(index, 1e-2)
    ids = torch.randint(SMALL.vocab, (1, SMALL.context))
    run = Pass(Stage.FULL, torch.float32, rows=torch.arange(8, SMALL.context, 16))
    losses = []
    for _ in range(12):
        loss = torch.stack(model.body(ids, run).losses).sum()
        loss.backward()
        assert all(p.grad is None for n, p in model.named_parameters() if "index" not in n)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_an_exported_model_is_the_trained_one_in_bf16(trained: Path, data: Path, tmp_path: Path, monkeypatch):
    model, _ = load_master(trained, "cpu")
    monkeypatch.setattr("checkpoint.check_tokenizer", lambda folder, config: None)  # here one of 1,024 tokens
    export(model, data, tmp_path)
    released = load_release(tmp_path, "cpu")
    master = load_index_projections(tmp_path)
    for name, value in model.state_dict().items():
        exact = name.endswith((".router", ".bias"))
        expected = value if exact else value.bfloat16().float()
        assert torch.equal(released.state_dict()[name], expected), name
        if "index" in name and "proj" in name:
            assert torch.equal(master[name], value), name


def test_loads_are_balanced(data: Path, tmp_path: Path):
    """The bias of an expert that many tokens take goes down."""
    trainer = Trainer(options(data, tmp_path), SMALL)
    loads = torch.tensor([0.7, 0.6, 0.4, 0.3])
    trainer.balance([loads, loads])
    for layer in trainer.model.sparse_layers():
        assert layer.bias[0] == layer.bias[1] < 0 < layer.bias[2] == layer.bias[3]


def test_a_folder_with_weights_alone_goes_on_from_them(trained: Path, data: Path, tmp_path: Path):
    for path in (trained / "master.json", *trained.glob("weights*")):
        shutil.copy(path, tmp_path)
    weights, meta = load_master(tmp_path, "cpu")
    trainer = Trainer(options(data, tmp_path), SMALL)
    assert trainer.state.step == meta["state"]["step"] > 0
    assert all(torch.equal(v, trainer.model.state_dict()[k]) for k, v in weights.state_dict().items())


def test_what_does_not_belong_together_is_refused(trained: Path, data: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="holds a training already"):
        Trainer(options(data, trained, init=trained), SMALL)
    other = tmp_path / "data"
    shutil.copytree(data, other)
    (other / "tokenizer.json").write_text((data / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ValueError, match="another tokenizer"):
        Trainer(options(other, trained), SMALL)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Trainer(options(tmp_path, trained), SMALL)
    for wrong in ({"seconds": 0}, {"batch": 0}, {"index_rows": 1000}):
        with pytest.raises(ValueError, match="expected"):
            Trainer(options(data, tmp_path / "run", **wrong), SMALL)
    assert not (tmp_path / "run").exists()


def test_an_answer_counts_if_all_its_tokens_are_right():
    ids = np.array([5, 6, 7, 8, 9, 10])
    answer = np.array([0, 0, 1, 1, 0, 2])
    assert score_answers(ids[1:], ids, answer).tolist() == [True, True]
    wrong = ids[1:].copy()
    wrong[2] = 0
    assert score_answers(wrong, ids, answer).tolist() == [False, True]
    wrong = ids[1:].copy()
    wrong[0] = 0  # not part of an answer
    assert score_answers(wrong, ids, answer).tolist() == [True, True]
