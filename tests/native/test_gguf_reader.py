"""The GGUF reader of the engine on good, odd and hostile files."""

import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from m3_runtime import cli, command
from m3_runtime.engine import GGUF, Model
from m3_runtime.errors import ExitCode, InputError, NotFiniteError
from native import hostile
from native.hostile import Key, file_cases, model_cases, model_file, small_file

FILE_CASES = file_cases()
MODEL_CASES = model_cases()
PATHS = [str(Path(hostile.__file__).parents[1]), *(p for p in sys.path if p.endswith(("convert", "runtime")))]


def write(folder, content):
    path = folder / "case.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.pack())
    return path


def assert_refused(error, path, expected):
    """One line that names the file and the thing."""
    message = str(error)
    assert len(message.splitlines()) == 1, message
    assert message.isprintable(), message
    assert path.name in message
    assert re.search(expected, message), f"{message!r} does not match {expected!r}"


# ---------------------------------------------------------------------------------------------- good files


def test_a_good_file_is_read(tmp_path):
    with GGUF(write(tmp_path, small_file())) as file:
        assert dict(file.metadata) == {
            "general.architecture": "minimax-m3",
            "general.alignment": 32,
            "some.numbers": [1.0, 2.0, 3.0],
            "some.words": ["one", "two"],
        }
        assert [(t.name, t.ne, t.type) for t in file.tensors] == [
            ("first.weight", (4, 2), 0),
            ("second.weight", (3,), 0),
        ]
        for tensor, written in zip(file.tensors, small_file().tensors, strict=True):
            assert bytes(file.tensor_data(tensor.name)) == written.data
            assert tensor.n_bytes == len(written.data)


def test_a_good_model_opens_and_runs(tmp_path):
    """The model whose broken copies must be refused is itself fine."""
    with Model(write(tmp_path, model_file()), device="cpu") as model, model.session(context=64) as session:
        logits = session.eval(np.arange(40, dtype=np.int32), all_logits=True)
        assert logits.shape == (40, hostile.VOCAB)
        assert np.isfinite(logits).all()


def test_what_the_gguf_package_writes_is_read_back(tmp_path):
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "minimax-m3")
    scalars = {
        "u8": (writer.add_uint8, 255),
        "i8": (writer.add_int8, -128),
        "u16": (writer.add_uint16, 65535),
        "i16": (writer.add_int16, -32768),
        "u32": (writer.add_uint32, 2**32 - 1),
        "i32": (writer.add_int32, -(2**31)),
        "u64": (writer.add_uint64, 2**64 - 1),
        "i64": (writer.add_int64, -(2**63)),
        "f32": (writer.add_float32, 0.5),
        "f64": (writer.add_float64, 0.1),
        "yes": (writer.add_bool, True),
        "no": (writer.add_bool, False),
        "text": (writer.add_string, "Grüße 你好 🙂\n\x00."),
    }
    for name, (add, value) in scalars.items():
        add(name, value)
    arrays = {"ints": [1, -2, 3], "reals": [0.5, -0.25], "flags": [True, False], "words": ["a", "", "ü"]}
    for name, values in arrays.items():
        writer.add_array(name, values)
    random = np.random.default_rng(1)
    tensors = {
        "one": random.standard_normal(5, dtype=np.float32),
        "two": random.standard_normal((3, 32), dtype=np.float32).astype(np.float16),
        "three": random.standard_normal((2, 3, 64), dtype=np.float32),
    }
    writer.add_tensor("one", tensors["one"])
    writer.add_tensor("two", tensors["two"])
    quantized = gguf.quants.quantize(tensors["three"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("three", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUF(path) as file:
        for name, (_, value) in scalars.items():
            assert file.metadata[name] == value, name
            assert type(file.metadata[name]) is type(value), name
        for name, values in arrays.items():
            assert file.metadata[name] == values
        read = {tensor.name: tensor for tensor in file.tensors}
        assert {name: (t.ne, t.type) for name, t in read.items()} == {
            "one": ((5,), 0),
            "two": ((32, 3), 1),
            "three": ((64, 3, 2), 8),
        }
        assert bytes(file.tensor_data("one")) == tensors["one"].tobytes()
        assert bytes(file.tensor_data("two")) == tensors["two"].tobytes()
        assert bytes(file.tensor_data("three")) == quantized.tobytes()


def odd_but_good():
    small = small_file()
    first, second = small.tensors
    backwards = (replace(first, offset=32, data=second.data), replace(second, offset=0, data=first.data))
    far = (first, replace(second, offset=128, data=bytes(96) + second.data))
    empty = (Key("a", hostile.STRING, []), Key("b", hostile.F64, []), Key("c", hostile.STRING, ""))
    wide = replace(small, alignment=256)
    return {
        "no tensors": replace(small, tensors=()),
        "no keys and no tensors": replace(small, keys=(), tensors=()),
        "tensors listed against their order in the file": replace(
            small, tensors=(replace(backwards[0], ne=(3,)), replace(backwards[1], ne=(4, 2)))
        ),
        "a gap between tensors": replace(small, tensors=far),
        "bytes after the last tensor": small.pack() + bytes(100),
        "alignment 256": wide.with_keys(Key("general.alignment", hostile.U32, 256)),
        "one part of one": small.with_keys(Key("split.count", hostile.U16, 1)),
        "empty values": small.with_keys(*empty),
        "a key of 65535 bytes": small.with_keys(Key("k" * 65535)),
        "a name of 64 bytes": small.with_tensor("second.weight", name="n" * 64),
        "four dimensions": small.with_tensor("first.weight", ne=(2, 2, 1, 2)),
    }


@pytest.mark.parametrize("name", odd_but_good())
def test_odd_files_are_read(tmp_path, name):
    content = odd_but_good()[name]
    with GGUF(write(tmp_path, content)) as file:
        assert all(len(bytes(file.tensor_data(tensor.name))) == tensor.n_bytes for tensor in file.tensors)


# ---------------------------------------------------------------------------------------------- broken files


@pytest.mark.parametrize("case", FILE_CASES, ids=lambda case: case.name)
def test_a_broken_file_is_refused(tmp_path, case):
    path = write(tmp_path, case.pack())
    for opener in (GGUF, Model):
        with pytest.raises(InputError) as error:
            opener(path)
        assert_refused(error.value, path, case.expected)


@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.name)
def test_a_file_without_a_model_that_runs_is_refused(tmp_path, case):
    path = write(tmp_path, case.pack())
    GGUF(path).close()
    with pytest.raises(InputError) as error:
        Model(path)
    assert_refused(error.value, path, case.expected)


@pytest.mark.parametrize("content", [small_file().pack(), model_file().pack()[:4096]], ids=["small", "model"])
def test_no_beginning_of_a_file_is_accepted(tmp_path, content):
    """Cut behind every single byte, so at every border of the structure too."""
    path = tmp_path / "case.gguf"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(InputError) as error:
            GGUF(path)
        assert_refused(error.value, path, "truncated|broken")


def test_no_single_wrong_byte_of_the_header_crashes(tmp_path):
    """Each byte replaced by five values: refused in one line, or read (not every byte can be checked)."""
    content = small_file().pack()
    path = tmp_path / "case.gguf"
    refused = 0
    for at in range(len(content) - len(small_file().tensors[1].data)):
        for value in (0x00, 0x01, 0x7F, 0x80, 0xFF):
            path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
            try:
                with GGUF(path) as file:
                    for tensor in file.tensors:
                        assert len(bytes(file.tensor_data(tensor.name))) == tensor.n_bytes
                    assert len(list(file.metadata.items())) == len(file.metadata)
            except InputError as error:
                assert_refused(error, path, "")
                refused += 1
    assert refused > 500


def test_keys_and_names_that_are_not_utf8_are_refused_by_place(tmp_path):
    path = write(tmp_path, small_file().with_keys(Key(b"broken\xff")))
    with pytest.raises(InputError) as error:
        GGUF(path)
    assert_refused(error.value, path, "UTF-8")
    path = write(tmp_path, small_file().with_tensor("first.weight", name=b"broken\xff"))
    with pytest.raises(InputError) as error:
        GGUF(path)
    assert_refused(error.value, path, "UTF-8")


def test_a_value_that_is_not_utf8_is_refused_when_it_is_asked_for(tmp_path):
    path = write(tmp_path, small_file().with_keys(Key("some.words", hostile.STRING, [b"\xc3\x28"])))
    with GGUF(path) as file, pytest.raises(InputError) as error:
        file.metadata["some.words"]
    assert_refused(error.value, path, "'some.words'.*UTF-8")


def test_a_folder_a_missing_file_and_a_device(tmp_path):
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    for path, expected in (
        (folder, "folder"),
        (tmp_path / "absent.gguf", "No such file"),
        (Path("/dev/null"), "not a reg"),
    ):
        for opener in (GGUF, Model):
            with pytest.raises(InputError) as error:
                opener(path)
            assert_refused(error.value, path, expected)


def test_a_file_that_may_not_be_read(tmp_path):
    path = write(tmp_path, small_file())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(InputError) as error:
        GGUF(path)
    assert_refused(error.value, path, "denied")


def test_a_pipe_does_not_hang(tmp_path):
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    seen = []

    def attempt():
        try:
            GGUF(path)
        except InputError as error:
            seen.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(2)
    hangs = thread.is_alive()
    if hangs:  # a writer releases the open
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        thread.join()
    assert not hangs
    assert_refused(seen[0], path, "not a regular file")


@pytest.mark.parametrize("name", [str(tensor.name) for tensor in model_file().tensors])
def test_a_nan_in_any_tensor_stops_the_evaluation(tmp_path, name):
    """Not a broken header, but broken all the same: never an answer computed from it."""
    tensor = next(t for t in model_file().tensors if t.name == name)
    data = tensor.data[:4] + struct.pack("<f", float("nan")) + tensor.data[8:]
    path = write(tmp_path, model_file().with_tensor(name, data=data))
    place = f"layer {name.split('.')[1]}" if name.startswith("blk.") else "output" if "output" in name else "layer 0"
    with Model(path, device="cpu") as model, model.session(context=128) as session:
        with pytest.raises(NotFiniteError, match=place):
            session.eval(np.arange(100, dtype=np.int32))
        assert session.length() == 0


# ---------------------------------------------------------------------------------------------- cost


LIMITED = """
import json, resource, sys, time
from pathlib import Path
from m3_runtime.engine import GGUF, Model
from m3_runtime.errors import InputError
from native.hostile import file_cases, model_cases

def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def attempt(name, path, opener, allowance):
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    start = time.perf_counter()
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + allowance, hard))
    try:
        opener(path)
        result = "accepted"
    except InputError:
        result = "refused"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print(json.dumps([name, opener.__name__, result, time.perf_counter() - start]), flush=True)

MB = 1 << 20
path = Path(sys.argv[1])
for case in [*file_cases(), *model_cases()]:
    path.write_bytes(case.pack())
    openers = (GGUF, Model) if case in file_cases() else (Model,)
    for opener in openers:
        attempt(case.name, path, opener, 50 * MB)
for sparse in sys.argv[2:]:
    for opener in (GGUF, Model):
        attempt(sparse, Path(sparse), opener, Path(sparse).stat().st_size + 50 * MB)
"""


def sparse_files(folder):
    """Files of 1 GiB (holes, so they take no disk) in which large counts have room."""
    small = small_file()
    many_strings = Key("strings", raw=hostile.array(hostile.STRING, ["x"], 2**26)[:-9] + struct.pack("<Q", 2**62))
    contents = {
        "keys.gguf": replace(small, n_keys=2**26),
        "tensors.gguf": replace(small, n_tensors=2**24),
        "strings.gguf": replace(small, keys=(many_strings,)),
    }
    for name, content in contents.items():
        path = folder / name
        path.write_bytes(content.pack())
        os.truncate(path, 2**30)
        yield path


def test_refusals_take_less_than_a_second_and_50_mb(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "case.gguf", *sparse_files(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) == 2 * len(FILE_CASES) + len(MODEL_CASES) + 6
    assert [r for r in results if r[2] != "refused"] == []
    assert [r for r in results if r[3] >= 1] == []


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("case", [*FILE_CASES, *MODEL_CASES], ids=lambda case: case.name)
def test_m3_run_prints_one_line_and_exits_with_2(tmp_path, capfd, case):
    path = write(tmp_path, case.pack())
    with pytest.raises(SystemExit) as stop:
        command.run(cli.app, cli.NAME, [str(path), "-p", "x"])
    out, err = capfd.readouterr()
    assert stop.value.code == ExitCode.BAD_INPUT
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("m3-run: ")
    assert path.name in err
    assert re.search(case.expected, err), err


@pytest.mark.parametrize(("kind", "expected"), [("folder", "folder"), ("absent", "No such file")])
def test_m3_run_with_a_path_that_is_no_file(tmp_path, capfd, kind, expected):
    path = tmp_path / "case.gguf"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(SystemExit) as stop:
        command.run(cli.app, cli.NAME, [str(path), "-p", "x"])
    out, err = capfd.readouterr()
    assert (stop.value.code, out, len(err.splitlines())) == (ExitCode.BAD_INPUT, "", 1)
    assert path.name in err and expected in err


@pytest.mark.parametrize("name", ["cut in half", "offset near 2^64", "first generation: no indexer"])
def test_the_installed_command_does_the_same(tmp_path, name):
    case = next(case for case in [*FILE_CASES, *MODEL_CASES] if case.name == name)
    path = write(tmp_path, case.pack())
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", "from m3_runtime.cli import main; main()", path, "-p", "x"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == ExitCode.BAD_INPUT
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert re.search(case.expected, run.stderr)
    assert time.perf_counter() - start < 30
