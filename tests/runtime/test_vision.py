"""The Python face of the vision tower: what it is given and what it refuses. Its numbers are tested in tests/golden."""

import threading
import time

import numpy as np
import pytest

from m3_runtime import CancelledError, InputError, MachineError, Model
from m3_runtime.vision import VisionTower
from tiny_model import TINY


@pytest.fixture(scope="module")
def tower(tiny_mmproj):
    with VisionTower(tiny_mmproj) as opened:
        yield opened


def pixels(*grids):
    n = sum(t * h * w for t, h, w in grids)
    return np.random.default_rng(1).standard_normal((n, 1176), np.float32)


def test_dimensions(tower) -> None:
    h = tower.hparams
    assert (h.n_layer, h.n_embd, h.n_head, h.head_dim, h.n_rot) == (TINY.vit_layers, 80, 1, 80, 78)
    assert (h.n_out, h.patch_size, h.merge, h.frames, h.patch_values) == (TINY.hidden, 14, 2, 2, 1176)
    assert h.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073)) and h.rope_theta == 10000
    assert h.std == pytest.approx((0.26862954, 0.26130258, 0.27577711))


def test_tokens_of_each_image(tower) -> None:
    grids = [(1, 2, 4), (1, 4, 4), (2, 2, 2)]
    tokens = tower.encode(pixels(*grids), grids)
    assert [part.shape for part in tokens] == [(2, TINY.hidden), (4, TINY.hidden), (2, TINY.hidden)]
    assert all(part.dtype == np.float32 and np.isfinite(part).all() for part in tokens)
    assert np.array_equal(tower.encode(pixels(*grids).astype(np.float64), np.array(grids))[1], tokens[1])


@pytest.mark.parametrize(
    ("values", "grids", "message"),
    [
        (np.zeros((4, 1175)), [(1, 2, 2)], r"pixels of shape \(4, 1175\), expected \[patches, 1176\]"),
        (np.zeros(1176), [(1, 1, 1)], r"pixels of shape \(1176,\)"),
        (np.zeros((4, 1176)), [(1, 2)], r"grids: expected \(t, h, w\) of each image"),
        (np.zeros((4, 1176)), [(1, 2, 2**40)], r"grids: expected \(t, h, w\) of each image"),
        (np.zeros((4, 1176)), [], "a batch of 0 images"),
        (np.zeros((6, 1176)), [(1, 3, 2)], "a grid of 1 x 3 x 2 patches, expected even height and width"),
        (np.zeros((4, 1176)), [(1, 2**15, 2**15)], "expected even height and width and at most 65536 in all"),
        (np.zeros((4, 1176)), [(1, 2, 4)], "pixels: 4704 values, expected 9408 in 8 patches"),
        (np.zeros((4, 1176)), [(-1, 2, -2)], "a grid of -1 x 2 x -2 patches"),
        (np.full((4, 1176), np.inf), [(1, 2, 2)], "pixels: value 0 is NaN or infinite"),
    ],
)
def test_refused_batches(tower, values, grids, message) -> None:
    with pytest.raises(InputError, match=message):
        tower.encode(values, grids)


def test_refused_files(tiny_gguf, tiny_mmproj, tmp_path) -> None:
    with pytest.raises(InputError, match=r"general\.architecture is 'minimax-m3', expected 'clip', a vision file"):
        VisionTower(tiny_gguf)
    with pytest.raises(InputError, match="architecture 'clip', expected 'minimax-m3'"):
        Model(tiny_mmproj)
    with pytest.raises(InputError, match=r"absent\.gguf"):
        VisionTower(tmp_path / "absent.gguf")
    with pytest.raises(MachineError, match="device cuda has no operations of the vision tower; cpu has"):
        VisionTower(tiny_mmproj, device="cuda")
    with pytest.raises(InputError, match="isa"):
        VisionTower(tiny_mmproj, isa="mmx")


def test_closed(tiny_mmproj) -> None:
    tower = VisionTower(tiny_mmproj)
    tower.close()
    tower.close()
    with pytest.raises(InputError, match="the vision tower is closed"):
        tower.encode(pixels((1, 2, 2)), [(1, 2, 2)])


def test_one_caller_at_a_time_and_cancel(tiny_mmproj) -> None:
    """A clip that takes long, ended from another thread; the tower works afterwards."""
    found: list[BaseException] = []
    grids = [(1, 64, 64)] * 40

    def encode() -> None:
        try:
            tower.encode(values, grids, threads=1)
        except CancelledError as error:
            found.append(error)

    values = np.zeros((40 * 64 * 64, 1176), np.float32)
    with VisionTower(tiny_mmproj) as tower:
        worker = threading.Thread(target=encode)
        worker.start()
        while worker.is_alive() and not tower._caller.locked():
            time.sleep(0.001)
        with pytest.raises(InputError, match="in use on another thread"):
            tower.encode(pixels((1, 2, 2)), [(1, 2, 2)])
        while worker.is_alive():
            tower.cancel()
            time.sleep(0.01)
        worker.join()
        assert [str(error) for error in found] == ["the encoding of images was cancelled"]
        assert len(tower.encode(pixels((1, 2, 2)), [(1, 2, 2)])) == 1
