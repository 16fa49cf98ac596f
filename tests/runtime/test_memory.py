"""The plan of a run against what the machine has."""

import resource
from pathlib import Path

import pytest

from m3_runtime import memory
from m3_runtime.errors import MachineError


def test_the_kernel_says_what_is_free():
    free = memory.available_memory()
    assert free is not None
    assert 1 << 20 < free < 1 << 50


def test_the_limit_on_address_space_counts(monkeypatch: pytest.MonkeyPatch):
    assert memory.address_space_left() is None or memory.address_space_left() > 0
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 50, resource.RLIM_INFINITY))
    left = memory.address_space_left()
    assert left is not None and (1 << 50) - (1 << 42) < left < 1 << 50
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, resource.RLIM_INFINITY))
    assert memory.address_space_left() == 0
    assert memory.session_room() == 0


def test_a_file_that_cannot_be_mapped_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "big.gguf"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(5 * 10**9)
    monkeypatch.setattr(memory, "address_space_left", lambda: 2 * 10**9)
    with pytest.raises(MachineError, match=r"big\.gguf: 5\.0 GB to map, the limit on address space leaves 2\.0 GB"):
        memory.check_file_maps(path)
    memory.check_file_maps(tmp_path / "absent.gguf")
    monkeypatch.setattr(memory, "address_space_left", lambda: None)
    memory.check_file_maps(path)


def test_a_session_that_does_not_fit_is_refused_with_numbers():
    with pytest.raises(MachineError, match=r"a context of 4096 tokens takes 3\.0 GB, 2\.5 GB are free"):
        memory.check_session_fits(3 * 10**9, 4096, 2_500_000_000)
    memory.check_session_fits(3 * 10**9, 4096, 3 * 10**9)
    memory.check_session_fits(3 * 10**9, 4096, None)


@pytest.mark.parametrize(
    ("trained", "needed", "room", "expected"),
    [
        (1 << 20, 0, None, 32768),
        (1 << 20, 0, 1 << 40, 32768),
        (4096, 0, None, 4096),
        (4096, 100_000, None, 4096),
        (1 << 20, 100_000, None, 100_000),
        (1 << 20, 0, 32768 * 1000, 16384),
        (1 << 20, 0, 32768 * 300, 4096),
        (1 << 20, 20_000, 32768 * 300, 20_000),
        (1 << 20, 0, 1, 512),
        (100, 0, 1, 100),
    ],
)
def test_the_default_context(trained: int, needed: int, room: int | None, expected: int):
    """A session of 1000 bytes for a token; half of the room is taken at most."""
    assert memory.default_context(trained, needed, lambda context: context * 1000, room) == expected


def test_the_peak_is_that_of_this_process():
    assert memory.peak_resident_bytes() > 10**7


def test_the_limit_of_a_container_counts(tmp_path: Path):
    assert memory._group_memory(tmp_path) is None
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 250\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._group_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._group_memory(tmp_path) == 550
