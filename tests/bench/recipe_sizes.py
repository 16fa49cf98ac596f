"""What every recipe makes of the 428B release: `python tests/bench/recipe_sizes.py [OUT.csv]`.

Plans the file from the shape of MiniMaxAI/MiniMax-M3, without its data, and counts the bytes of the tensors (header and
tokenizer, about 10 MB, apart). Writes recipe_sizes.csv and prints the table of the README.
"""

import csv
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path

from m3_convert.checkpoint import Checkpoint, SourceTensor
from m3_convert.config import ModelConfig
from m3_convert.plan import PlannedTensor, plan_tensors
from m3_convert.precision import always_f32, choose, is_index_projection
from m3_convert.recipe import recipe_names
from m3_convert.tensor_map import MappedTensor, map_tensors, tensor_specs

CSV = Path(__file__).with_suffix(".csv")

RELEASE = ModelConfig(
    n_layer=60,
    n_dense=3,
    hidden=6144,
    heads=64,
    kv_heads=4,
    head_dim=128,
    rotary_dim=64,
    rope_theta=5e6,
    rms_eps=1e-6,
    vocab=200064,
    context=1048576,
    dense_ff=12288,
    expert_ff=3072,
    n_shared=1,
    n_expert=128,
    n_expert_used=4,
    expert_scale=2.0,
    index_dim=128,
    top_k=16,
    block_size=128,
    local_blocks=1,
)


@dataclass(frozen=True)
class Size:
    """One line of the table."""

    type: str  #: for --type
    gate_up_experts: str
    down_experts: str
    rest: str  #: what most of the other weights get
    bytes: int
    gb: float  #: 10^9 bytes
    gib: float  #: 2^30 bytes
    bits_per_weight: float


def tensors_without_data(config: ModelConfig) -> list[MappedTensor]:
    """The tensors of a BF16 checkpoint of this shape."""
    sources = {
        name: SourceTensor(name, "BF16", shape, Path("absent"), 0, 2 * prod(shape))
        for spec in tensor_specs(config)
        for name, shape in ((n, spec.shape[1:] if spec.stacked else spec.shape) for n in spec.sources)
    }
    return map_tensors(Checkpoint(Path("absent"), "MiniMax-M3", config, sources, ""))[0]


def sizes() -> list[Size]:
    """One for BF16 and one for each recipe, largest first."""
    mapped = tensors_without_data(RELEASE)
    found = [_size(name, plan_tensors(mapped, choose(name))[0]) for name in ("bf16", *recipe_names())]
    return sorted(found, key=lambda size: -size.bytes)


def _size(name: str, tensors: Sequence[PlannedTensor]) -> Size:
    n_bytes = sum(t.n_bytes for t in tensors)
    weights = sum(prod(t.shape) for t in tensors)

    def types(chosen: Callable[[PlannedTensor], bool]) -> list[tuple[str, int]]:
        counts: Counter[str] = Counter()
        for t in tensors:
            if chosen(t):
                counts[t.type.name] += prod(t.shape)
        return [(kind, n) for kind, n in counts.most_common()]

    def experts(*kinds: str) -> str:
        names = [f".ffn_{kind}_exps." for kind in kinds]
        found = types(lambda t: any(n in t.name for n in names))
        total = sum(n for _, n in found)
        layers = RELEASE.n_layer - RELEASE.n_dense
        return ", ".join([found[0][0]] + [f"{kind} in {n * layers // total} layers" for kind, n in found[1:]])

    rest = types(lambda t: not (t.stacked or always_f32(t.name) or is_index_projection(t.name)))
    return Size(
        type=name,
        gate_up_experts=experts("gate", "up"),
        down_experts=experts("down"),
        rest=" and ".join(kind for kind, _ in rest),
        bytes=n_bytes,
        gb=round(n_bytes / 1e9, 1),
        gib=round(n_bytes / 2**30, 1),
        bits_per_weight=round(8 * n_bytes / weights, 2),
    )


def markdown(rows: Sequence[Size]) -> str:
    """The table of the README."""
    lines = [
        "| `--type` | experts: gate, up | experts: down | the rest | GB | GiB | bits per weight |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| `{r.type}` | {r.gate_up_experts} | {r.down_experts} | {r.rest} | {r.gb:.1f} | {r.gib:.1f} "
            f"| {r.bits_per_weight:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    rows = sizes()
    with Path(arguments[0] if arguments else CSV).open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Size)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print(markdown(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
