"""Small checkpoints with one thing changed, and m3-convert run in this process."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import checkpoint_tensors
from checkpoint_tensors import Tensor, make_tensors, write_json, write_shards
from m3_convert.check_cli import NAME as CHECK
from m3_convert.check_cli import app as check_app
from m3_convert.cli import NAME as CONVERT
from m3_convert.cli import app as convert_app
from m3_convert.imatrix_cli import NAME as IMATRIX
from m3_convert.imatrix_cli import app as imatrix_app
from m3_runtime.command import run
from make_checkpoint import CheckpointSpec, make_checkpoint

Tensors = dict[str, Tensor]

# One dense and two sparse layers; 32 divides every row; nothing has the size that it has in the release.
SMALL = CheckpointSpec(
    layers=3,
    dense=1,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    rotary=16,
    index_dim=48,
    experts=4,
    top=2,
    inter=32,
    shared_inter=32,
    dense_inter=96,
    vocab=512,
    block=16,
    top_k=3,
    local=2,
    shard_mb=0.2,
)


@dataclass(frozen=True)
class Outcome:
    """What a run of the command gave."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The last line of stderr, where a failed command says why."""
        return self.err.strip().splitlines()[-1]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def small() -> CheckpointSpec:
    return SMALL


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of SMALL. Not to be changed."""
    folder = tmp_path_factory.mktemp("pristine")
    make_checkpoint(folder, SMALL)
    return folder


@pytest.fixture
def make_folder(tmp_path: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """make_folder(spec, tensors=change, config=change, name=...) -> a checkpoint folder; both changes work in place."""
    for dtype, size in (("F16", 2), ("F8_E8M0", 1), ("F8_E5M2", 1), ("I64", 8)):
        monkeypatch.setitem(checkpoint_tensors.DTYPE_BYTES, dtype, size)

    def make(
        spec: CheckpointSpec = SMALL,
        tensors: Callable[[Tensors], None] | None = None,
        config: Callable[[dict[str, Any]], None] | None = None,
        name: str = "source",
    ) -> Path:
        folder = tmp_path / name
        if spec == SMALL:
            shutil.copytree(pristine, folder)
        else:
            make_checkpoint(folder, spec)
        if config is not None:
            value = json.loads((folder / "config.json").read_text())
            config(value)
            write_json(folder / "config.json", value)
        if tensors is not None:
            content = make_tensors(spec)
            tensors(content)
            for shard in folder.glob("*.safetensors"):
                shard.unlink()
            write_shards(folder, content, spec.shard_mb, spec.order)
        return folder

    return make


def runner(app: typer.Typer, name: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command with arguments of any type. No traceback may reach stderr."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run(app, name, [str(a) for a in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert isinstance(exit_.value.code, int)
        return Outcome(exit_.value.code, captured.out, captured.err)

    return call


@pytest.fixture
def command_of(capsys: pytest.CaptureFixture[str]) -> Callable[[typer.Typer, str], Callable[..., Outcome]]:
    """command_of(app, "m3-run") -> a function of arguments, as those below."""
    return lambda app, name: runner(app, name, capsys)


@pytest.fixture
def m3_convert(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """m3_convert(source, out, "--type", "f32") -> Outcome."""
    return runner(convert_app, CONVERT, capsys)


@pytest.fixture
def m3_check_selection(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Outcome]:
    """m3_check_selection(reference, candidate, "--json") -> Outcome. Its states go to a folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    return runner(check_app, CHECK, capsys)


@pytest.fixture
def m3_imatrix(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """m3_imatrix(source, out, "--text", text) -> Outcome."""
    return runner(imatrix_app, IMATRIX, capsys)
