"""Peak memory of m3-check-selection on the release's widths: `make scale-check`.

Makes a random checkpoint of 20.4 GB (all widths, expert and token numbers of MiniMax-M3, 2 of its 60 layers), converts
it to q4_k_m, and checks the file against the folder over 8,192 tokens, in a process that the kernel refuses more than
20 GiB of memory of its own (RLIMIT_DATA). The layers are walked one by one, so that 58 more would take longer, but no
more memory. Everything is removed afterwards.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from large_checkpoint import RELEASE, make_large_checkpoint, working_folder
from m3_convert.text_sample import load_text
from m3_runtime.quantities import format_bytes
from scale import ROOT, run

LIMIT = 20 << 30  #: bytes
SPEC = replace(RELEASE, layers=2, dense=1, shard_mb=700)
DISK = 28 * 10**9  #: bytes of all files


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="for 28 GB of files, removed afterwards")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--experts", type=int, default=SPEC.experts, help="fewer are a quick look, not the proof")
    arguments = parser.parse_args()
    spec = replace(SPEC, experts=arguments.experts)
    with working_folder(arguments.folder, DISK) as folder:
        start = time.monotonic()
        n_bytes = make_large_checkpoint(folder / "model", spec)
        run((folder / "model", folder / "q4_k_m.gguf", "--type", "q4_k_m"))
        print(f"{format_bytes(n_bytes)} written and converted in {time.monotonic() - start:.0f} s", flush=True)
        line = [sys.executable, "-m", "m3_convert.check_cli", folder / "model", folder / "q4_k_m.gguf", "--json"]
        text = folder / "text.txt"
        text.write_text(load_text(None).content * 2, encoding="utf-8")  # once it has less than 8,192 tokens
        line += ["--no-thresholds", "--text", text, "--context", arguments.context, "--state", folder / "state"]
        limited = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT}, {LIMIT}))"
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", f"{limited}; import os, sys; os.execv(sys.argv[1], sys.argv[1:])", *map(str, line)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            sys.exit(f"m3-check-selection ended with {done.returncode} under a limit of {format_bytes(LIMIT)}")
    report = json.loads(done.stdout)
    estimated, peak = (report["memory"][key] for key in ("estimated_bytes", "peak_bytes"))
    print(
        f"{report['text']['tokens']} tokens in {time.monotonic() - start:.0f} s ({os.cpu_count()} cores): "
        f"peak {peak} bytes ({format_bytes(peak)}), printed beforehand {format_bytes(estimated)}, limit {LIMIT}"
    )
    return 0 if peak <= LIMIT and peak <= estimated else 1


if __name__ == "__main__":
    sys.exit(main())
