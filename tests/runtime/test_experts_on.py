"""Routed experts on the CPU beside a GPU: the same model, and the plan that says so. Skipped without a GPU."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from m3_runtime import MachineError, Model, cli, command
from m3_runtime.engine import SessionOptions
from tiny_model import convert

NANO = Path(__file__).parents[2] / "models" / "m3-nano"
PROMPT = 700


@pytest.fixture(autouse=True)
def _gpu(tiny_gguf: Path) -> None:
    try:
        Model(tiny_gguf, device="cuda").close()
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def nano_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(NANO, tmp_path_factory.mktemp("nano") / "nano-q4_k_m.gguf", "--type", "q4_k_m")


def outcome(path: Path, experts_on: str, *, exact: bool) -> Iterator[np.ndarray]:
    """Logits of a prompt, the block lists of its sparse layers, and tokens that follow it."""
    options: SessionOptions = {"context": PROMPT + 40, "exact": exact, "chunk": 256}
    options["kv_type"] = "f32" if exact else "f16"
    with Model(path, device="cuda", experts_on=experts_on) as model:
        ids = np.random.default_rng(3).integers(0, model.hparams.n_vocab, PROMPT, np.int32)
        layers = range(model.hparams.n_dense_layer, model.hparams.n_layer)
        with model.session(record=("blocks",), **options) as session:
            logits = session.eval(ids, all_logits=True)
            assert {model.experts_on(layer) for layer in layers} == {experts_on}
            yield logits
            yield np.stack([session.selected_blocks(layer) for layer in layers])
        with model.session(**options) as session:
            last, tokens = session.eval(ids), []
            for _ in range(24):
                tokens.append(int(last.argmax()))
                last = session.eval(tokens[-1:])
            yield np.array(tokens)


@pytest.mark.parametrize(("name", "exact"), [("tiny", True), ("tiny", False), ("q8", True), ("nano", False)])
def test_experts_on_the_cpu_are_the_same_model(request: pytest.FixtureRequest, name: str, exact: bool):
    fixture = {"tiny": "tiny_gguf", "q8": "tiny_q8_gguf", "nano": "nano_gguf"}[name]
    path: Path = request.getfixturevalue(fixture)  # made only where there is a GPU
    logits, lists, tokens = outcome(path, "cpu", exact=exact)
    want_logits, want_lists, want_tokens = outcome(path, "gpu", exact=exact)
    worst = float(np.abs(logits - want_logits).max())
    differ = int((lists != want_lists).any(-1).sum())
    print(f"{name}, exact {exact}: logits differ by {worst:.2e} of {np.abs(want_logits).max():.1f}, {differ} lists")
    # The CPU rounds activations to 16 bits before weights in blocks, which a GPU does too unless it is exact.
    assert worst < (2e-4 if name == "tiny" and exact else 0.05)
    assert differ <= (0 if exact else lists.size // lists.shape[-1] // 500)
    assert (tokens == want_tokens).all()


def test_a_plan_of_both_devices(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]):
    with Model(tiny_gguf, device="cuda", experts_on="cpu") as model:
        plan = model.plan(context=4096)
        assert plan.cpu_expert_layers == plan.expert_layers > 0 and plan.experts_bytes == 0
        assert plan.weights_bytes + plan.cpu_experts_bytes == model.weight_bytes
        model.load()
        plan = model.plan(context=4096)
        assert plan.loaded_bytes == plan.weights_bytes
        assert plan.free_bytes is not None and plan.pinned_bytes < plan.host_bytes
    with Model(tiny_gguf, device="cuda") as model:
        model.place(context=4096)
        assert model.plan(context=4096).cpu_expert_layers == 0
    with pytest.raises(SystemExit) as left:
        command.run(cli.app, cli.NAME, [str(tiny_gguf), "--plan", "--device", "cuda", "--experts-on", "cpu"])
    out, _ = capsys.readouterr()
    assert left.value.code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["plan", "cuda", "memory", "experts"]
