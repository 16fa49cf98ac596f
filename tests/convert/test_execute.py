"""The file appears whole or not at all; memory and disk are bounded and checked."""

import errno
import fcntl
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from checkpoint_tensors import Tensor
from m3_convert import execute, part_file
from m3_convert.config import parse_config
from m3_convert.tensor_map import tensor_specs
from make_checkpoint import make_config, make_tokenizer

NAN_NORM = "language_model.model.norm.weight"  # the last tensor of the file

# m3-convert with a pause before each write, so that a signal meets it in the middle.
SLOW = """
import sys, time
from m3_convert import cli, part_file
write = part_file.write_all
part_file.write_all = lambda file, data: (time.sleep(0.05), write(file, data))
cli.main()
"""


def start(script: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_until_half(process: "subprocess.Popen[str]", part: Path, size: int) -> None:
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > size):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def nan_at_the_end(tensors: dict[str, Tensor]) -> None:
    tensors[NAN_NORM] = Tensor("F32", (64,), b"\xff" * 256)


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.is_file()}


def test_dry_run_is_what_gets_written(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    options = ("--type", "bf16", "--rule", "blk.*.ffn_*_exps.weight=q8_0")
    plan = m3_convert(folder, "--dry-run", "--json", *options).json
    assert files(tmp_path) == set()
    outcome = m3_convert(folder, tmp_path / "out.gguf", "--json", *options)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    written = [
        (t.name, [int(n) for n in t.shape], t.tensor_type.name, int(t.n_bytes), int(t.data_offset) - reader.data_offset)
        for t in reader.tensors
    ]
    assert written == [(t["name"], t["ne"], t["type"], t["bytes"], t["offset"]) for t in plan["tensors"]]
    size = (tmp_path / "out.gguf").stat().st_size
    assert size == plan["file_bytes"] == outcome.json["bytes"]
    assert plan["bytes_by_type"] == outcome.json["bytes_by_type"]
    assert sum(plan["bytes_by_type"].values()) == sum(t["bytes"] for t in plan["tensors"])
    assert len(plan["left_out"]) == outcome.json["left_out"] == 59
    assert files(tmp_path) == {"out.gguf"}


def test_dry_run_prints_every_tensor_and_the_total(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    plan = m3_convert(folder, "--dry-run", "--json").json
    lines = m3_convert(folder, tmp_path / "out.gguf", "--dry-run").out.splitlines()
    rows = [line.split() for line in lines[1 : 1 + len(plan["tensors"])]]
    for row, tensor in zip(rows, plan["tensors"], strict=True):
        ne = "x".join(map(str, tensor["ne"]))
        expected = [
            tensor["name"],
            tensor["source"],
            ne,
            tensor["source_type"],
            "->",
            tensor["type"],
            str(tensor["bytes"]),
        ]
        assert row == expected + (["+1"] if tensor["plus_one"] else [])
    assert sum(line.startswith("left out (vision): vision_tower.") for line in lines) == 51
    assert sum(line.startswith("left out (vision): ") for line in lines) == 59
    assert any(line.startswith(f"total: 54 tensors, {plan['file_bytes']} bytes (") for line in lines)
    assert lines[-1].startswith("disk: ") and lines[-1].endswith("enough")
    assert files(tmp_path) == set()


def test_an_existing_file_is_replaced_only_by_a_whole_one(make_folder, m3_convert, tmp_path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    broken = make_folder(tensors=nan_at_the_end, name="broken")
    assert m3_convert(broken, out).code == 2
    assert out.read_bytes() == b"precious" and files(tmp_path) == {"out.gguf"}
    assert m3_convert(make_folder(), out).code == 0
    assert out.read_bytes()[:4] == b"GGUF" and files(tmp_path) == {"out.gguf"}


def test_a_link_stays_a_link(make_folder, m3_convert, tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out.gguf").symlink_to(tmp_path / "disk" / "real.gguf")
    assert m3_convert(make_folder(), tmp_path / "out.gguf").code == 0
    assert (tmp_path / "out.gguf").is_symlink() and files(tmp_path / "disk") == {"real.gguf"}


def test_the_order_of_fsync_and_rename(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    events = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(file: int) -> None:
        events.append("fsync " + Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    def record_replace(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    assert m3_convert(make_folder(), tmp_path / "out.gguf").code == 0
    assert events == [
        "fsync out.gguf.journal",
        f"fsync {tmp_path.name}",
        "fsync out.gguf.part",
        "fsync out.gguf.journal",  # says that the part is whole
        "rename out.gguf.part out.gguf",
        f"fsync {tmp_path.name}",
    ]


@pytest.mark.parametrize("name", ["missing/out.gguf", "source", "source/config.json", "shard", "pipe"])
def test_outputs_that_cannot_be(make_folder, m3_convert, tmp_path, name: str) -> None:
    folder = make_folder()
    before = {p: p.read_bytes() for p in folder.iterdir()}
    messages = {
        "missing/out.gguf": "does not exist",
        "source": "expected a file name for the GGUF, found a folder",
        "source/config.json": "is part of the source",
        "shard": "is part of the source",
        "pipe": "expected a file, found a device or pipe",
    }
    os.mkfifo(tmp_path / "pipe")
    os.link(next(folder.glob("*.safetensors")), tmp_path / "shard")
    outcome = m3_convert(folder, tmp_path / name)
    assert outcome.code == 2 and messages[name] in outcome.error
    assert {p: p.read_bytes() for p in folder.iterdir()} == before


def test_a_folder_without_permission(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    open_ = os.open

    def denied(path: object, *arguments: Any, **options: Any) -> int:
        if str(path).endswith((".part", ".journal")):  # permissions of a real folder would not stop root
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_(path, *arguments, **options)

    folder = make_folder()
    monkeypatch.setattr(os, "open", denied)
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code == 2 and "out.gguf.journal: cannot be written: Permission denied" in outcome.error


def test_two_runs_with_one_output(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    (tmp_path / "out.gguf.part").write_bytes(b"work in progress")
    with (tmp_path / "out.gguf.journal").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for restart in ([], ["--restart"]):
            outcome = m3_convert(folder, tmp_path / "out.gguf", *restart)
            assert outcome.code == 2 and "another process is writing it" in outcome.error
            assert (tmp_path / "out.gguf.part").read_bytes() == b"work in progress"


@pytest.mark.parametrize("name", ["out.gguf.part", "out.gguf.journal"])
def test_a_link_in_place_of_the_part_file(make_folder, m3_convert, tmp_path, name: str) -> None:
    (tmp_path / "victim").write_bytes(b"keep")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    assert m3_convert(make_folder(), tmp_path / "out.gguf").code == 2
    assert (tmp_path / "victim").read_bytes() == b"keep"


# ------------------------------------------------------------------------------------------------ disk


def test_disk_space_is_checked_before_the_first_byte(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    folder = make_folder()
    needed = m3_convert(folder, "--dry-run", "--json").json["file_bytes"]
    usage = execute.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    monkeypatch.setattr(part_file, "write_all", lambda *_: pytest.fail("wrote before the check"))
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code == 4
    assert f"the file needs {needed} bytes" in outcome.error and f"free are {needed - 1} " in outcome.error
    assert files(tmp_path) == set()
    assert m3_convert(folder, tmp_path / "out.gguf", "--dry-run").out.endswith("not enough\n")


def test_no_more_disk_than_the_file(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    folder = make_folder()
    needed = m3_convert(folder, "--dry-run", "--json").json["file_bytes"]
    usage = execute.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: usage._replace(free=needed))
    assert m3_convert(folder, tmp_path / "out.gguf").code == 0


def test_the_leftover_of_a_killed_run_counts_as_free(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    folder = make_folder()
    needed = m3_convert(folder, "--dry-run", "--json").json["file_bytes"]
    assert m3_convert(folder, tmp_path / "out.gguf").code == 0
    os.truncate((tmp_path / "out.gguf").rename(tmp_path / "out.gguf.part"), 100_000)
    os.sync()
    usage = execute.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(execute.shutil, "disk_usage", lambda _: usage._replace(free=needed - 90_000))
    assert m3_convert(folder, tmp_path / "out.gguf").code == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fills_up_on_the_way(make_folder, m3_convert, tmp_path, monkeypatch, number: int) -> None:
    write, count = part_file.write_all, [0]

    def fail(file: int, data: bytes | memoryview) -> None:
        count[0] += 1
        if count[0] == 20:
            raise OSError(number, os.strerror(number))
        write(file, data)

    folder = make_folder()
    monkeypatch.setattr(part_file, "write_all", fail)
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code == 4 and os.strerror(number) in outcome.error and "nothing was kept" in outcome.error
    assert files(tmp_path) == set()


def test_a_real_limit_on_the_size_of_files(make_folder, tmp_path) -> None:
    limit = 200_000
    process = start(
        "from m3_convert.cli import main; main()",
        make_folder(),
        tmp_path / "out.gguf",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "the disk is full or the file too large" in err and "Traceback" not in err
    assert files(tmp_path) == set()


# ------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_in_the_middle(make_folder, tmp_path, number: signal.Signals) -> None:
    out = tmp_path / "out.gguf"
    process = start(SLOW, make_folder(), out)
    wait_until_half(process, tmp_path / "out.gguf.part", 100_000)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "m3-convert: interrupted" and "Traceback" not in err
    assert files(tmp_path) == set()


def test_killed_at_half_and_run_again(make_folder, m3_convert, tmp_path) -> None:
    folder, out = make_folder(), tmp_path / "out.gguf"
    process = start(SLOW, folder, out)
    wait_until_half(process, tmp_path / "out.gguf.part", 200_000)
    process.kill()
    process.communicate(timeout=60)
    assert files(tmp_path) == {"out.gguf.part", "out.gguf.journal"}
    assert m3_convert(folder, out).code == 0
    assert m3_convert(folder, tmp_path / "again.gguf").code == 0
    assert out.read_bytes() == (tmp_path / "again.gguf").read_bytes()
    assert files(tmp_path) == {"out.gguf", "again.gguf"}


# ------------------------------------------------------------------------------------------------ check after writing


@pytest.mark.parametrize("change", ["shorter", "longer", "type"])
def test_the_file_is_compared_with_the_plan(make_folder, m3_convert, tmp_path, monkeypatch, change: str) -> None:
    """A file that a failing disk has changed does not get its name."""
    fsync = os.fsync

    def damage(file: int) -> None:
        if not Path(f"/proc/self/fd/{file}").readlink().name.endswith(".part"):
            fsync(file)
            return
        size = os.fstat(file).st_size
        if change == "shorter":
            os.ftruncate(file, size - 1)
        elif change == "longer":
            os.ftruncate(file, size + 32)
        else:
            content = os.pread(file, size, 0)
            at = content.index(b"output_norm.weight") + 18 + 4 + 8
            os.pwrite(file, (1).to_bytes(4, "little"), at)
        fsync(file)

    folder = make_folder()
    monkeypatch.setattr(os, "fsync", damage)
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code != 0
    assert files(tmp_path) == set()


# ------------------------------------------------------------------------------------------------ memory

MEASURE = """
import resource
from m3_convert import cli
try:
    cli.main()
finally:
    import sys
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def sparse_checkpoint(folder: Path, spec: Any) -> int:
    """A checkpoint of zeros whose shard takes no room on disk. Returns its bytes."""
    folder.mkdir()
    value = make_config(spec)
    (folder / "config.json").write_text(json.dumps(value))
    tokenizer_spec = type(spec)(vocab=512)
    make_tokenizer(tokenizer_spec).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "[e~["}')
    header, end = {}, 0
    for tensor in tensor_specs(parse_config(value, "config.json")):
        shape = tensor.shape[1:] if tensor.stacked else tensor.shape
        for name in tensor.sources:
            n = 2
            for size in shape:
                n *= size
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + n]}
            end += n
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def peak_memory(folder: Path, out: Path) -> int:
    """Bytes that a conversion takes at most."""
    process = start(MEASURE, folder, out, "--type", "q8_0")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return int(err.split()[-1]) * 1024


def test_peak_memory_does_not_grow_with_the_model(small, tmp_path) -> None:
    """Source and output are several times what the conversion may take; the embedding alone would be 128 MB."""
    little = replace(small, vision=False, prefix=False, vocab=32768)
    large = replace(little, hidden=1024, experts=8, inter=1024, shared_inter=1024, dense_inter=4096, layers=2)
    sparse_checkpoint(tmp_path / "little", little)
    n_bytes = sparse_checkpoint(tmp_path / "large", large)
    little_peak = peak_memory(tmp_path / "little", tmp_path / "little.gguf")
    growth = peak_memory(tmp_path / "large", tmp_path / "large.gguf") - little_peak
    assert n_bytes > 200e6
    assert growth < 60e6, f"{growth / 1e6:.0f} MB more for a source of {n_bytes / 1e6:.0f} MB"


# ------------------------------------------------------------------------------------------------ progress


def test_progress_lines_elsewhere_than_on_a_terminal(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    clock = [100.0]

    def tick() -> float:
        clock[0] += 0.25
        return clock[0]

    folder = make_folder()
    monkeypatch.setattr("m3_convert.progress.time.monotonic", tick)
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    lines = [line for line in outcome.err.splitlines() if line.startswith("out.gguf: ")]
    assert len(lines) > 3
    assert all("% of " in line and "B/s, " in line and line.endswith(" left") for line in lines[:-1])
    assert lines[-1].startswith("out.gguf: 100% of ") and " in " in lines[-1]


def test_a_bar_on_a_terminal(make_folder, tmp_path) -> None:
    reader, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", "from m3_convert.cli import main; main()", make_folder(), tmp_path / "out.gguf"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(reader, 65536):
            shown += chunk
    except OSError:  # the end of a terminal
        pass
    os.close(reader)
    assert process.wait() == 0
    assert "━".encode() in shown and b"/s" in shown


def test_the_broken_tensor_of_these_tests_is_the_last(make_folder, m3_convert) -> None:
    """The tests above that fail late rest on this."""
    plan = m3_convert(make_folder(), "--dry-run", "--json").json
    assert plan["tensors"][-1]["source"] == NAN_NORM


def test_files_of_a_hub_snapshot_are_part_of_the_source(make_folder, m3_convert, tmp_path) -> None:
    """The hub's cache keeps the files elsewhere and links to them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    make_folder().rename(blobs)
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    before = (blobs / "config.json").read_bytes()
    for out in (snapshot / "config.json", blobs / "config.json", blobs / "tokenizer.json"):
        outcome = m3_convert(snapshot, out)
        assert outcome.code == 2 and "part of the source" in outcome.err
    assert (blobs / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("generation_config.json", '{"top_p": 1.5}', "top_p"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_what_m3_run_would_refuse_is_not_written(make_folder, m3_convert, tmp_path, file, text, says) -> None:
    folder = make_folder()
    (folder / file).write_text(text)
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code == 2 and says in outcome.err
    assert not list(tmp_path.glob("out.gguf*"))
