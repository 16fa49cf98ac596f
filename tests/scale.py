"""Peak memory of m3-convert on the release's widths and on all of its tensors: `make scale`.

Makes a random checkpoint of 20.4 GB (all widths, expert and token numbers of MiniMax-M3, 2 of its 60 layers) and
converts it, each time in a process that the kernel refuses more than 4 GiB of memory of its own (RLIMIT_DATA: heap,
stacks and every other private writable mapping, touched or not). The page cache is not counted by that limit; to have
it counted too, run this in a container or under `systemd-run --scope -p MemoryMax=4G`.

What grows with the number of tensors is planned at full size: all 428 billion weights as shards without content, with
an importance matrix for every column of every expert. Everything is removed afterwards.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from large_checkpoint import RELEASE, make_large_checkpoint, working_folder
from m3_convert.config import parse_config
from m3_convert.imatrix import Entry, ImportanceMatrix
from m3_convert.tensor_map import tensor_specs
from m3_runtime.quantities import format_bytes
from make_checkpoint import CheckpointSpec, make_config

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 4 << 30  #: bytes
SPEC = replace(RELEASE, layers=2, dense=1, shard_mb=700)
SOURCE_BYTES = 20 * 10**9  #: at least
SAMPLE_SECONDS = 0.1
DISK = 43 * 10**9  #: bytes of all files that exist together

# Runs a command under the limit, once it is sure that the limit is one. The last line is the peak in kB.
LIMITED = """
import resource, sys
command, limit = sys.argv.pop(1), int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    bytearray(limit)
except MemoryError:
    pass
else:
    sys.exit("the limit of memory is not enforced here")
from m3_convert import start
try:
    getattr(start, command)()
finally:
    status = open("/proc/self/status").read()
    print(status.partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""


@dataclass(frozen=True)
class Peak:
    """What a run took. resident: bytes, pages of files that it mapped included; own: without them, as sampled."""

    resident: int
    own: int
    threads: int
    seconds: float


def run(arguments: Sequence[object], limit: int = LIMIT, command: str = "m3_convert") -> Peak:
    """A command (a name of m3_convert.start) under the limit. Exits with its message if it fails."""
    start = time.monotonic()
    line = [sys.executable, "-c", LIMITED, command, str(limit), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    own = threads = 0
    with subprocess.Popen(
        line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while process.poll() is None:
                status = _status(process.pid)
                own = max(own, status.get("RssAnon", 0) * 1024)
                threads = max(threads, status.get("Threads", 0))
                time.sleep(SAMPLE_SECONDS)
        except BaseException:
            process.kill()
            raise
        assert process.stderr
        text = process.stderr.read()
    if process.returncode:
        shown = f"{command.replace('_', '-')} {' '.join(map(str, arguments))}"
        sys.exit(f"{text}{shown} failed under a limit of {format_bytes(limit)}")
    return Peak(int(text.split()[-1]) * 1024, own, threads, time.monotonic() - start)


def _status(pid: int) -> dict[str, int]:
    """The numbers of /proc/PID/status; none if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.replace(":", "").split()[:2] for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def importance(spec: CheckpointSpec) -> ImportanceMatrix:
    """A matrix for every weight that is multiplied, every expert reached."""
    entries = {}
    columns = np.random.default_rng(6).exponential(size=spec.hidden * 4).astype(np.float32)
    for tensor in tensor_specs(parse_config(make_config(spec), "config.json")):
        if len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name or tensor.name == "token_embd.weight":
            continue
        n_matrix, n_in = tensor.shape[0] if tensor.stacked else 1, tensor.shape[-1]
        sums = np.broadcast_to(columns[:n_in], (n_matrix, n_in))
        entries[tensor.name] = Entry(sums, np.ones(n_matrix, np.float32))
    return ImportanceMatrix("made up", entries, ("text",), 1, 512)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="for 43 GB of files, removed afterwards")
    arguments = parser.parse_args()
    peaks = []

    def report(what: str, *command: object) -> None:
        peak = run(command)
        peaks.append(peak)
        print(
            f"{what}: peak {format_bytes(peak.resident)} (own {format_bytes(peak.own)}), {peak.threads} threads, "
            f"{peak.seconds:.0f} s",
            flush=True,
        )

    with working_folder(arguments.folder, DISK) as folder:
        whole, large, matrix, out = (folder / name for name in ("whole", "large", "whole.imatrix.gguf", "out.gguf"))
        n_bytes = make_large_checkpoint(whole, RELEASE, holes=True)
        importance(RELEASE).save(matrix)
        size = f"plan of {format_bytes(n_bytes)}"
        report(f"{size} to q4_k_m", whole, "--dry-run", "--type", "q4_k_m")
        report(
            f"{size} to iq2_xxs with {format_bytes(matrix.stat().st_size)} of importance",
            *(whole, "--dry-run", "--type", "iq2_xxs", "--imatrix", matrix),
        )
        # Of 60 layers, of which the checkpoint has 2: all of them are read.
        importance(replace(RELEASE, dense=SPEC.dense)).save(matrix)
        start = time.monotonic()
        n_bytes = make_large_checkpoint(large, SPEC)
        assert n_bytes >= SOURCE_BYTES
        print(f"{format_bytes(n_bytes)} of shards written in {time.monotonic() - start:.0f} s", flush=True)
        for options in (
            ("--type", "q4_k_m"),
            ("--type", "bf16"),
            ("--type", "q4_k_m", "--threads", 32, "--rule", "blk.*.attn_q.weight=iq2_xxs", "--imatrix", matrix),
        ):
            shown = " ".join(Path(str(o)).name for o in options)
            report(f"{format_bytes(n_bytes)}, {shown}", large, out, *options)
            out.unlink()
    peak = max(p.resident for p in peaks)
    verdict = "within" if peak <= LIMIT else "ABOVE"
    print(f"peak memory {peak} bytes ({format_bytes(peak)}), {verdict} the limit of {LIMIT} ({os.cpu_count()} cores)")
    return 0 if peak <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
