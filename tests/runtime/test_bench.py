"""The command m3-bench on real files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3_runtime import Model, command
from m3_runtime.bench import Bench, BenchOptions, Measurement
from m3_runtime.bench_cli import NAME, app

Runner = Callable[..., tuple[int, str, str]]


@pytest.fixture
def m3_bench(capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs m3-bench in this process: exit code, stdout, stderr."""

    def runner(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            command.run(app, NAME, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, out, err

    return runner


def test_json_has_every_test_at_every_depth(m3_bench: Runner, tiny_gguf: Path) -> None:
    code, out, _ = m3_bench(
        tiny_gguf, "--depth", "40,0,40", "-p", 24, "-n", 3, "--repeats", 2, "--threads", 1, "--json"
    )
    assert code == 0
    report: dict[str, Any] = json.loads(out)
    kinds = [(m["test"], m["depth"], m["tokens"], len(m["seconds"])) for m in report["measurements"]]
    assert kinds == [
        ("prefill", 0, 24, 2),
        ("decode", 0, 3, 2),
        ("fill", 0, 40, 1),
        ("prefill", 40, 24, 2),
        ("decode", 40, 3, 2),
    ]
    for m in report["measurements"]:
        assert 0 < m["slowest"] <= m["tokens_per_s"] <= m["fastest"]
    assert (report["context"], report["threads"], report["device"]) == (64, 1, "cpu")
    assert sum(report["weight_types"].values()) == pytest.approx(report["memory"]["weights_bytes"], rel=0.01)
    assert report["memory"]["peak_rss_bytes"] > 0


def test_cache_types_and_slow_types(m3_bench: Runner, tiny_q8_gguf: Path) -> None:
    options = (tiny_q8_gguf, "--depth", "0", "-p", 8, "-n", 0, "--repeats", 1, "--device", "cpu", "--json")
    sizes = []
    for kv_type in ("f16", "q8_0", "q4_0"):
        code, out, _ = m3_bench(*options, "--kv-type", kv_type)
        report = json.loads(out)
        assert (code, report["kv_type"], report["slow"]) == (0, kv_type, [])
        sizes.append(report["memory"]["kv_bytes"])
    assert [size / sizes[0] for size in sizes] == [1, 34 / 64, 18 / 64]
    code, out, _ = m3_bench(*options, "--isa", "scalar")
    assert json.loads(out)["slow"] == list(json.loads(out)["weight_types"]) != []


@pytest.mark.parametrize("scan", ["full", "low_bit"])
def test_index_scan(m3_bench: Runner, tiny_gguf: Path, scan: str) -> None:
    options = ("--depth", "200", "-p", 8, "-n", 2, "--repeats", 1, "--device", "cpu")
    code, out, _ = m3_bench(tiny_gguf, *options, "--index-scan", scan, "--json")
    report = json.loads(out)
    assert (code, report["index_scan"]) == (0, scan)
    code, out, _ = m3_bench(tiny_gguf, *options, "--json")
    assert (report["memory"]["index_bytes"] > json.loads(out)["memory"]["index_bytes"]) is (scan == "low_bit")


def test_table(m3_bench: Runner, tiny_gguf: Path) -> None:
    code, out, err = m3_bench(tiny_gguf, "--depth", "0,16", "-p", 8, "-n", 0, "--repeats", 1)
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["test", "depth", "tokens"],
        ["prefill", "0", "8"],
        ["fill", "0", "16"],
        ["prefill", "16", "8"],
    ]


def test_the_median_run_counts() -> None:
    measurement = Measurement("decode", 0, 10, [1.0, 2.0, 100.0])
    assert measurement.rate == 5
    assert measurement.spread == pytest.approx(99 / 2 / 2)
    assert Measurement("fill", 0, 10, [1.0]).spread is None


def test_the_cache_has_the_depth_when_a_run_begins(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from m3_runtime.engine import Session

    evaluated: list[tuple[int, int]] = []
    real = Session.eval

    def eval_(self: Session, ids: Any, **options: Any) -> Any:
        evaluated.append((self.length(), len(ids)))
        return real(self, ids, **options)

    monkeypatch.setattr(Session, "eval", eval_)
    options = BenchOptions(
        model=tiny_gguf,
        depths=[0, 20],
        prefill=10,
        decode=2,
        repeats=2,
        device="cpu",
        isa="auto",
        threads=1,
        attention="sparse",
        kv_type="f16",
        index_type="f32",
        index_scan="auto",
        exact=False,
        chunk=0,
        seed=1,
        mmap=True,
        experts_on="auto",
    )
    with Model(tiny_gguf) as model:
        Bench(options, model).run(lambda _: None, lambda *_: None)
    at_depth = [(0, 10)] * 3 + [(0, 1)] + [(0, 1), (1, 1)] * 2
    assert evaluated == [*at_depth, (0, 20), *((20 + length, n) for length, n in at_depth)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--depth", "x"), "--depth x: expected whole numbers separated by commas, such as 0,2048"),
        (("--depth", "0,-5"), "--depth 0,-5: expected"),
        (("--depth", ""), "--depth : expected"),
        (("--depth", "1048576"), "--depth 1048576: with the measured tokens that is 1049088, the context of"),
        (("-p", "0", "-n", "0"), "--prefill and --decode are both 0: nothing to measure"),
        (("--repeats", "0"), "--repeats"),
        (("--kv-type", "q5_1"), "--kv-type is 'q5_1', expected one of f32, f16, bf16, q8_0, q4_0"),
    ],
)
def test_bad_arguments(m3_bench: Runner, tiny_gguf: Path, options: tuple[str, ...], message: str) -> None:
    code, out, err = m3_bench(tiny_gguf, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_usual_depths_are_those_that_fit(m3_bench: Runner, tiny_gguf: Path) -> None:
    code, out, err = m3_bench(tiny_gguf, "-p", 8, "-n", 0, "--repeats", 1, "--device", "cpu")
    assert (code, err) == (0, "")  # the context is 4096
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["prefill", "0"], ["fill", "0"], ["prefill", "2048"]]


def test_no_file(m3_bench: Runner, tmp_path: Path) -> None:
    code, out, err = m3_bench(tmp_path / "no.gguf")
    assert (code, out) == (2, "") and err.startswith("m3-bench: ") and "no.gguf" in err
