"""What `make scale` proves on 20 GB, small enough for every run: its checkpoints, its limit, memory of many threads."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from large_checkpoint import RELEASE, make_large_checkpoint, working_folder
from m3_convert.checkpoint import load_checkpoint
from m3_convert.encode import SLAB_ELEMENTS, Encoder
from m3_convert.plan import plan_conversion
from m3_convert.precision import TypeChoice
from m3_runtime.quantize import TensorType
from make_checkpoint import CheckpointSpec
from scale import importance, run

#: The embedding alone is 67 MB in BF16.
WIDE = replace(RELEASE, layers=2, dense=1, hidden=1024, heads=8, experts=4, inter=512, shared_inter=512, vocab=32768)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    n_bytes = make_large_checkpoint(folder, replace(WIDE, dense_inter=1024), holes=True)
    assert n_bytes > 134e6 and sum(p.stat().st_blocks * 512 for p in folder.iterdir()) < 20e6
    return folder


def test_threads_bound_memory_as_tensors_do_not(wide, tmp_path) -> None:
    one = run((wide, tmp_path / "one.gguf", "--type", "q8_0", "--threads", 1))
    many = run((wide, tmp_path / "many.gguf", "--type", "q8_0", "--threads", 32))
    assert many.threads > one.threads + 8
    # Source, float32, temporaries and result of a slab, one slab more than there are threads, and their stacks.
    assert many.resident - one.resident < 33 * SLAB_ELEMENTS * 16
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "many.gguf").read_bytes()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_slabs_are_shared_evenly(wide, threads: int) -> None:
    plan = plan_conversion(load_checkpoint(wide), TypeChoice(TensorType.BF16))
    with Encoder(threads) as encoder:
        for name, n_rounds in (("token_embd.weight", -(-32 // threads)), ("output_norm.weight", None)):
            rows = [len(slab) for slab in encoder.slabs(plan.tensor(name), 0)]
            assert max(rows) * WIDE.hidden <= SLAB_ELEMENTS
            if n_rounds:
                assert len(rows) == n_rounds * threads and max(rows) - min(rows) < len(rows)
            else:
                assert rows == [1]


def test_the_limit_is_one(wide, tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"failed under a limit of 62\.9 MB"):
        run((wide, tmp_path / "out.gguf"), limit=60 << 20)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mxfp8", [False, True])
def test_large_checkpoints_convert(tmp_path, m3_convert, mxfp8: bool) -> None:
    """Every value is finite and of a plausible magnitude: m3-convert checks that."""
    spec = CheckpointSpec(layers=2, dense=1, vocab=2048, vision=False, mxfp8=mxfp8, shard_mb=1)
    n_bytes = make_large_checkpoint(tmp_path / "source", spec)
    shards = list((tmp_path / "source").glob("*.safetensors"))
    assert len(shards) > 3 and 0 < sum(p.stat().st_size for p in shards) - n_bytes < 1e5
    matrix = tmp_path / "imatrix.gguf"
    importance(spec).save(matrix)
    outcome = m3_convert(tmp_path / "source", tmp_path / "out.gguf", "--type", "iq2_xxs", "--imatrix", matrix)
    assert outcome.code == 0, outcome.err
    assert "no importance" not in outcome.err and "never reached" not in outcome.err


# ------------------------------------------------------------------------------------------------ working folder


def test_a_working_folder_goes_away(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), working_folder(tmp_path / "new", 1000) as folder:
        (folder / "large").write_bytes(b"x")
        raise KeyboardInterrupt
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(SystemExit, match="GB are needed"), working_folder(tmp_path, 1 << 62):
        pass


def test_a_working_folder_goes_away_when_terminated(tmp_path) -> None:
    script = (
        "import pathlib, sys, time, large_checkpoint\n"
        "with large_checkpoint.working_folder(pathlib.Path(sys.argv[1]), 1):\n"
        "    time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
