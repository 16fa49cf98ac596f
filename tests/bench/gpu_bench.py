"""The GPU's speed beside its targets, in one run: gpu_bench.py [options], or make bench-gpu

One layer of MSA by build/gpu/msa (medians of 20, buffers that rotate past L2; dense decode is its split-KV kernel),
dense prefill by cuDNN through torch (gpu/dense.py), and whole steps of a model of the release's widths (gpu_model.py,
random Q4_K blocks). Prints a table for each target and writes all times to gpu_bench.csv, under the commit, the driver
and the GPU. Needs a GPU of compute capability 9.0 and torch.
"""

import argparse
import csv
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).parent
#: Times in us by case, context and batch (rows of a prefill).
Times = dict[tuple[str, int, int], float]
LAST_ROWS = 8192  # of a prefill of 1M tokens are measured
DENSE = (8192, 32768, 131072)


def output_of(command: list[str], **environment: str) -> str:
    print(f"$ {' '.join(command)}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


def msa_times(program: Path, parts: list[str]) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        output_of([str(program), *parts], OUT=folder)
        with Path(folder, "msa.csv").open(newline="") as f:
            rows = [(re.sub(r"[0-9. ]+$", "", r["case"]), r) for r in csv.DictReader(f)]
    return {(case, int(r["context"]), int(r["batch"])): float(r["us"]) for case, r in rows}


def dense_prefill_times() -> Times:
    printed = output_of([sys.executable, str(BENCH / "gpu/dense.py"), *map(str, DENSE)])
    times = {("cudnn", int(n), int(n)): float(us) for n, us in re.findall(r"prefill (\d+): ([\d.]+) us", printed)}
    times["cudnn", 1 << 20, 1 << 20] = 64 * times["cudnn", 131072, 131072]  # half a minute a call: by the operations
    return times


def model_times(depths: list[int], layers: int) -> dict[int, tuple[float, float, float]]:
    """After so many tokens: prefill up to there in tokens per second, us of a token, share of the byte bound."""
    command = [sys.executable, str(BENCH / "gpu_model.py"), "--layers", str(layers), "--prefill", *map(str, depths)]
    printed = output_of(command)
    print(printed)
    prefill = re.findall(r"prefill of \d+ tokens to (\d+), .* ms, (\d+) tok/s", printed)
    step = re.findall(r"token after (\d+), .*?: (\d+) us .*, (\d+)% of the bound", printed)
    return {int(n): (float(speed), float(us), float(share) / 100)
            for (n, speed), (_, us, share) in zip(prefill, step, strict=True)}  # fmt: skip


def table(name: str, rows: list[tuple[str, str, float, float]], at_most: bool = False) -> None:
    """Rows of case, what was measured, value and target."""
    print(f"\n{name}")
    for case, measured, value, target in rows:
        met = value <= target if at_most else value >= target
        sign = "<=" if at_most else ">="
        print(f"  {case:14} {measured:44} {value:8.2f}  target {sign} {target:g}  {'met' if met else 'MISSED'}")


def name_of(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"


def against_dense(t: Times, dense: dict[int, float], cases: list[str], targets: dict[int, float]) -> list[
    tuple[str, str, float, float]
]:  # fmt: skip
    rows = []
    for n, target in targets.items():
        us, case = min((t[case, n, 1], case) for case in cases)
        rows.append((name_of(n), f"{case} {us:.1f} us, dense {dense[n]:.1f} us", dense[n] / us, target))
    return rows


def print_layer(t: Times) -> None:
    dense = {n: us for (case, n, batch), us in t.items() if case == "dense (bf16)" and batch == 1}
    table("G1 decode of a sparse layer, bf16 keys: times as fast as dense",
          against_dense(t, dense, ["full (bf16)"], {32768: 3, 131072: 6, 1 << 20: 7.2}))  # fmt: skip
    table(
        "G2 the same with low-bit copies",
        against_dense(t, dense, ["8 bits (bf16)", "4 bits (bf16)"], {131072: 9, 524288: 16, 1 << 20: 18}),
    )
    rows = []
    for n, target in {8192: 1.0, 32768: 3.0, 131072: 8.0, 1 << 20: 18.0}.items():
        part = n if n < 1 << 20 else LAST_ROWS
        us = t["prefill select turning", n, part] + t["prefill turning", n, part]
        # Earlier rows see less: half of what the last ones take, for all of them.
        us *= 1 if part == n else n / part / 2
        cudnn = t["cudnn", n, n]
        rows.append((name_of(n), f"{us / 1e3:.2f} ms, cuDNN {cudnn / 1e3:.2f} ms", cudnn / us, target))
    table("G3 prefill of a sparse layer: times as fast as cuDNN's dense (1M: from the last 8192 rows; cuDNN from 128k)",
          rows)  # fmt: skip
    table("G4 scores and choice, batch 8, bf16 keys: us",
          [(name_of(n), "select", t["select", n, 8], target) for n, target in ((8192, 6.0), (16384, 10.0))],
          at_most=True)  # fmt: skip


def identity(commit: str) -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = output_of(query).splitlines()[0].split(", ")
    return [f"commit {commit}", f"driver {driver}", gpu]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--msa", type=Path, default=Path("build/gpu/msa"))
    p.add_argument("--csv", type=Path, default=BENCH / "gpu/gpu_bench.csv")
    p.add_argument("--commit", help="default: what git says")
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--depths", type=int, nargs="+", default=[8192, 131072])
    p.add_argument("--only", choices=["layer", "model"])
    a = p.parse_args()
    about = identity(a.commit or output_of(["git", "rev-parse", "--short", "HEAD"]).strip())
    print(", ".join(about))
    if importlib.util.find_spec("flashinfer") is None:
        print("flashinfer is not installed here: its MSA operators are not measured")
    rows: list[list[str | float]] = []
    if a.only != "model":
        times = msa_times(a.msa, ["time", "time-low-bit", "time-prefill"]) | dense_prefill_times()
        print_layer(times)
        rows += [[case, context, batch, us, "us"] for (case, context, batch), us in times.items()]
    if a.only != "layer":
        model = model_times(a.depths, a.layers)
        target = {8192: 0.6, 131072: 0.7}
        table(f"G5 a token of {a.layers} layers in Q4_K: share of the byte bound",
              [(name_of(n), f"{us:.0f} us, prefill {speed:.0f} tok/s", share, target.get(n, 0.6))
               for n, (speed, us, share) in model.items()])  # fmt: skip
        for n, (speed, us, share) in model.items():
            rows += [["model prefill", n, 1, speed, "tok/s"], ["model token", n, 1, us, "us"]]
            rows.append(["model token, share of the byte bound", n, 1, share, ""])
    with a.csv.open("w", newline="") as f:
        f.write(f"# {', '.join(about)}\n")
        csv.writer(f, lineterminator="\n").writerows([["case", "context", "batch", "value", "unit"], *rows])


if __name__ == "__main__":
    main()
