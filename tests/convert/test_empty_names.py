"""Names of files that are empty, as from a variable of a script that was not set: Python takes "" for "."."""

import pytest

from convert.conftest import runner
from m3_convert import check_cli, cli, imatrix_cli
from m3_runtime import bench_cli
from m3_runtime import cli as run_cli

COMMANDS = {command.NAME: command for command in (cli, check_cli, imatrix_cli, run_cli, bench_cli)}


@pytest.mark.parametrize(
    ("command", "arguments", "name"),
    [
        ("m3-convert", ["", "out.gguf"], "SOURCE"),
        ("m3-convert", ["source", ""], "OUT.gguf"),
        ("m3-convert", ["source", "out.gguf", "--recipe="], "--recipe"),
        ("m3-convert", ["source", "out.gguf", "--imatrix", ""], "--imatrix"),
        ("m3-convert", ["source", "out.gguf", "--max-size", "1G", "--text", ""], "--text"),
        ("m3-check-selection", ["", "b"], "REFERENCE"),
        ("m3-check-selection", ["a", ""], "CANDIDATE"),
        ("m3-check-selection", ["a", "b", "--text="], "--text"),
        ("m3-check-selection", ["a", "b", "--report", ""], "--report"),
        ("m3-check-selection", ["a", "b", "--state", ""], "--state"),
        ("m3-imatrix", ["", "out", "--text", "text"], "SOURCE"),
        ("m3-imatrix", ["source", "out", "--text", ""], "--text"),
        ("m3-run", [""], "MODEL.gguf"),
        ("m3-run", ["model", "-f", ""], "-f"),
        ("m3-bench", [""], "MODEL.gguf"),
    ],
)
def test_an_empty_name_is_refused_by_name(command, arguments, name, capsys):
    run = runner(COMMANDS[command].app, command, capsys)(*arguments)
    assert (run.code, run.out) == (2, "") and len(run.err.splitlines()) == 1
    assert name in run.error and "is empty, expected the name of a file" in run.error
