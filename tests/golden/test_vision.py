"""The vision tower against tokens that transformers computed (`make_vision.py` says how)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden.cases import shard_hashes
from golden.vision_cases import CASES, VisionCase, pixels_of
from m3_convert import cli as convert_cli
from m3_runtime import MachineError, command
from m3_runtime.vision import VisionTower
from make_checkpoint import make_checkpoint

TOLERANCE = 1e-4  #: of a value of a token; tokens have a root mean square from 3 to 5


@dataclass(frozen=True)
class Golden:
    """A case, its stored arrays, and its checkpoint made again."""

    case: VisionCase
    stored: dict[str, np.ndarray[Any, Any]]
    checkpoint: Path

    def convert(self, type_: str) -> Path:
        """The vision file of this type."""
        out = self.checkpoint.with_name(f"{self.case.name}-{type_}.gguf")
        if not out.exists():
            arguments = [str(self.checkpoint), "--vision-only", str(out), "--vision-type", type_]
            with pytest.raises(SystemExit) as stop:
                command.run(convert_cli.app, convert_cli.NAME, arguments)
            assert stop.value.code == 0
        return out


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def golden(request, tmp_path_factory):
    case = request.param
    folder = tmp_path_factory.mktemp(case.name) / "checkpoint"
    make_checkpoint(folder, case.spec)
    with np.load(case.path) as file:
        stored = dict(file)
    if shard_hashes(folder) != stored["shards"].tolist():
        pytest.fail("make_checkpoint.py makes other weights than the golden features came from: run make_vision.py")
    return Golden(case, stored, folder)


def errors(golden, path, **options):
    """Largest |difference| of a token's value in each batch."""
    case, worst = golden.case, []
    with VisionTower(path, **options) as tower:
        for i, grids in enumerate(case.batches):
            tokens = tower.encode(pixels_of(case, i), grids)
            assert [len(part) for part in tokens] == [t * h * w // 4 for t, h, w in grids]
            worst.append(float(np.abs(np.concatenate(tokens) - golden.stored[f"tokens_{i}"]).max()))
    return worst


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "neon"])
def test_float32_equals_transformers(golden, isa):
    path = golden.convert("f32")
    try:
        VisionTower(path, isa=isa).close()
    except MachineError as error:
        pytest.skip(str(error))
    assert max(errors(golden, path, isa=isa)) < TOLERANCE


@pytest.mark.parametrize("type_", ["bf16", "f16"])
def test_weights_of_16_bits_equal_transformers(golden, type_):
    """The weights of the checkpoint are bfloat16 and far from the limits of float16: both types hold them exactly."""
    assert max(errors(golden, golden.convert(type_))) < TOLERANCE


def test_the_error_of_q8_0_is_bounded(golden):
    """One and a half times what was measured: an error, but not that of another tower."""
    worst = max(errors(golden, golden.convert("q8_0")))
    assert TOLERANCE < worst < 0.25


def test_the_images_of_a_batch_do_not_see_each_other(golden):
    """Bit for bit what each gives alone, whatever the number of threads."""
    case = golden.case
    grids = case.batches[-1]
    pixels = pixels_of(case, len(case.batches) - 1)
    ends = np.cumsum([t * h * w for t, h, w in grids])
    with VisionTower(golden.convert("f32")) as tower:
        together = tower.encode(pixels, grids, threads=2)
        for grid, part, tokens in zip(grids, np.split(pixels, ends[:-1]), together, strict=True):
            assert np.array_equal(tower.encode(part, [grid], threads=1)[0], tokens)


def test_what_the_features_depend_on(golden):
    """The stored tokens tell positions, frames and patches apart: a tower that mixes them up would be found."""
    case = golden.case
    grids, pixels = case.batches[-1], pixels_of(case, len(case.batches) - 1)
    with VisionTower(golden.convert("f32")) as tower:
        tokens = np.concatenate(tower.encode(pixels, grids))
        swapped = [(t, w, h) for t, h, w in grids]
        assert np.abs(np.concatenate(tower.encode(pixels, swapped)) - tokens).mean() > 0.01
        frames = pixels.reshape(len(pixels), 3, 2, -1)[:, :, ::-1].reshape(pixels.shape)
        assert np.abs(np.concatenate(tower.encode(frames, grids)) - tokens).mean() > 0.01
        if any(t > 1 for t, _, _ in grids):
            apart = [(1, h, w) for t, h, w in grids for _ in range(t)]
            assert np.abs(np.concatenate(tower.encode(pixels, apart)) - tokens).mean() > 0.01


def test_the_features_are_of_the_named_versions(golden):
    assert golden.stored["versions"].tolist() == ["torch 2.13.0+cpu", "transformers 5.24.0"]
