"""Plans: what is shown before a run, what is refused with which advice, and that nothing is loaded for it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from m3_runtime import InputError, MachineError, Model, bench_cli, cli, command, memory
from m3_runtime.engine import Session
from m3_runtime.placement import Plan

GB = 10**9
#: A model of the release's size with Q4 experts on a GPU of 80 GB: 18 of 57 layers' experts are there.
LARGE = Plan(
    device="cuda",
    device_name="NVIDIA Test",
    weights_bytes=9 * GB,
    experts_bytes=62 * GB,
    cpu_experts_bytes=150 * GB,
    loaded_bytes=0,
    kv_bytes=4 * GB,
    index_bytes=1 * GB,
    scratch_bytes=GB // 2,
    host_bytes=200_000_000,
    pinned_bytes=25_000_000,
    expert_layers=57,
    cpu_expert_layers=39,
    free_bytes=79 * GB,
    total_bytes=80 * GB,
    mapped=True,
)


def run(app: object, name: str, *arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        command.run(app, name, [str(argument) for argument in arguments])  # type: ignore[arg-type]
    assert isinstance(left.value.code, int)
    return int(left.value.code)


def refusal(plan: Plan, room: int | None = None) -> str:
    with pytest.raises(MachineError) as error:
        plan.check(32768, room)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_plan_that_fits_is_not_refused():
    LARGE.check(32768, None)
    LARGE.check(32768, LARGE.host_bytes)
    replace(LARGE, free_bytes=LARGE.needed_bytes).check(32768, None)
    loaded = replace(LARGE, loaded_bytes=71 * GB, free_bytes=6 * GB)  # what is there already is not free
    loaded.check(32768, None)


def test_a_refusal_has_the_numbers_and_what_helps():
    all_there = replace(LARGE, experts_bytes=212 * GB, cpu_experts_bytes=0, cpu_expert_layers=0)
    assert refusal(all_there) == (
        "not enough memory on NVIDIA Test: 226.5 GB are needed (weights 9.0 GB, experts 212.0 GB, K/V 4.0 GB, "
        "index keys 1.0 GB, scratch 500.0 MB), 79.0 GB of 80.0 GB are free; with --experts-on cpu 14.5 GB are needed "
        "there"
    )
    small = replace(all_there, free_bytes=12 * GB, total_bytes=12 * GB)
    assert refusal(small).endswith("12.0 GB of 12.0 GB are free; --experts-on cpu and a smaller --context would fit")
    smaller = replace(small, experts_bytes=0)
    assert refusal(smaller).endswith("are free; a smaller --context would fit")
    assert refusal(replace(smaller, free_bytes=8 * GB)).endswith("; a file of a smaller type would need less")
    partly = replace(smaller, free_bytes=8 * GB, loaded_bytes=2 * GB)
    assert "; 2.0 GB of it are there), 8.0 GB of 12.0 GB" in refusal(partly)
    assert refusal(LARGE, LARGE.host_bytes - 1) == (
        "not enough memory: work on experts on the CPU takes 200.0 MB, 200.0 MB are free"
    )


def test_the_table_has_a_row_for_each_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 256 * GB)
    lines = LARGE.table()
    assert re.split(r" {2,}", lines[0].strip()) == [
        "plan", "weights", "experts", "K/V", "index keys", "scratch", "in all", "free"
    ]  # fmt: skip
    assert re.split(r" {2,}", lines[1].strip()) == [
        "cuda", "9.0 GB", "62.0 GB", "4.0 GB", "1.0 GB", "500.0 MB", "76.5 GB", "79.0 GB"
    ]  # fmt: skip
    assert re.split(r" {2,}", lines[2].strip()) == [
        "memory",
        "-",
        "150.0 GB",
        "-",
        "-",
        "200.0 MB",
        "150.2 GB",
        "256.0 GB",
    ]
    assert lines[3].strip().startswith("experts of 39 of 57 layers on the CPU") and "25.0 MB" in lines[3]
    assert len({len(line) for line in lines[:3]}) == 1
    report = LARGE.as_json()
    assert report["cuda"]["experts_bytes"] == 62 * GB and report["cuda"]["free_bytes"] == 79 * GB
    assert report["memory"] == {
        "experts_bytes": 150 * GB, "scratch_bytes": 200_000_000, "pinned_bytes": 25_000_000, "free_bytes": 256 * GB
    }  # fmt: skip
    all_there = replace(LARGE, cpu_experts_bytes=0, cpu_expert_layers=0)
    assert [line.split()[0] for line in all_there.table()] == ["plan", "cuda"]


def test_the_plan_of_a_model_on_the_cpu(tiny_q8_gguf: Path):
    with Model(tiny_q8_gguf, device="cpu") as model:
        plan, session = model.plan(context=2048), model.memory(context=2048)
        assert plan.session_bytes == session.total
        assert plan.weights_bytes + plan.experts_bytes == model.weight_bytes
        experts = [t for t in model.gguf.tensors if "_exps" in t.name]
        assert plan.experts_bytes == sum(t.n_bytes for t in experts)
        assert (plan.cpu_experts_bytes, plan.host_bytes, plan.cpu_expert_layers) == (0, 0, 0)
        assert plan.expert_layers == 2 and plan.free_bytes is None and plan.device == "cpu"
        assert [model.experts_on(layer) for layer in range(-1, 4)] == [None, None, "cpu", "cpu", None]
        model.place(context=2048)  # nothing to decide
        window = model.plan(context=2048, layers=(1, 1))
        assert window.expert_layers == 1 and window.experts_bytes * 2 == plan.experts_bytes
    with pytest.raises(InputError, match="experts_on is gpu, but the model is on device cpu"):
        Model(tiny_q8_gguf, device="cpu", experts_on="gpu")
    with pytest.raises(InputError, match="experts_on is 'ram', expected one of auto, gpu, cpu"):
        Model(tiny_q8_gguf, experts_on="ram")


@pytest.mark.parametrize("option", ["--plan", "--dry-run"])
def test_a_plan_loads_nothing(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
):
    for owner, name in ((Model, "load"), (Model, "place"), (Session, "__init__")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("something was loaded"))
    capsys.readouterr()
    assert run(cli.app, cli.NAME, tiny_gguf, option, "--device", "cpu", "--context", 512) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["plan", "memory"]
    assert "context 512" in err and err.count("\n") == 1
    assert run(cli.app, cli.NAME, tiny_gguf, option, "--device", "cpu", "--json", "-p", "Hi") == 0
    out, _ = capsys.readouterr()
    report = json.loads(out)
    assert report["context"] == 4096 and report["plan"]["memory"]["kv_bytes"] > 0
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    assert run(cli.app, cli.NAME, tiny_gguf, option, "--device", "cpu") == 4
    out, err = capsys.readouterr()
    assert out.startswith("plan ") and re.fullmatch(r"m3-run: not enough memory: a context of .*\n", err)


def test_a_run_says_its_plan_before_it_loads(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        run(cli.app, cli.NAME, tiny_gguf, "-p", "Hi", "-n", 1, "--json", "--device", "cpu", "--experts-on", "cpu") == 0
    )
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in err.splitlines()[1:3]] == ["plan", "memory"]
    report = json.loads(out)
    assert report["plan"]["memory"]["kv_bytes"] == report["memory"]["kv_bytes"]
    assert run(cli.app, cli.NAME, tiny_gguf, "-p", "Hi", "--device", "cpu", "--experts-on", "gpu") == 2
    assert "experts_on is gpu" in capsys.readouterr().err
    small = ("--depth", 0, "-p", 8, "-n", 1, "--repeats", 1)
    assert (
        run(bench_cli.app, bench_cli.NAME, tiny_gguf, *small, "--device", "cpu", "--json", "--experts-on", "cpu") == 0
    )
    assert json.loads(capsys.readouterr().out)["plan"]["expert_layers"] == 2


def test_a_file_larger_than_the_machine_has_a_plan(tmp_path: Path):
    """The release's shape with Q4_K experts: 240 GB, of which the disk holds the header."""
    from bench.gpu_model import Shape, header, n_bytes, tensors

    shape = Shape(layers=60, dense=3, experts=128)
    path, data = tmp_path / "large.gguf", header(shape, "q4_k", 1 << 20)
    data += bytes(-len(data) % 32)
    size = len(data) + sum(-(-n_bytes(kind, ne) // 32) * 32 for _, kind, ne in tensors(shape, "q4_k"))
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size)
    with Model(path, device="cpu") as model:
        plan = model.plan(context=131072)
        assert plan.expert_layers == 57 and 230 * GB < plan.experts_bytes < 240 * GB < size
        assert plan.weights_bytes + plan.experts_bytes == model.weight_bytes
        assert plan.kv_bytes == 60 * 2 * 131072 * 4 * 128 * 2 and plan.index_bytes >= 57 * 131072 * 128 * 4
