"""Reports of m3-check-selection as its JSON has them, made up: what the page must show whatever a check found."""

from random import Random
from typing import Any

Report = dict[str, Any]

EDGES = [0, 0.01, 0.03, 0.1, 0.3, 1, None]
GROUPS = {
    "index": {"F32": 1_600_000},
    "norms": {"F32": 22_000},
    "router": {"F32": 33_000},
    "experts": {"Q4_K": 2_400_000, "Q5_K": 1_200_000},
    "shared experts": {"Q6_K": 430_000},
    "attention": {"Q6_K": 890_000, "Q8_0": 557_000},
    "dense mlp": {"Q6_K": 322_000},
    "embeddings": {"Q6_K": 860_160},
    "head": {"Q6_K": 860_160},
}
#: Text that would break a page that trusted it.
HOSTILE = (
    '<script>alert("1")</script>',
    "</title></style><img src=x onerror=alert(2)>",
    "\"'`&amp;<!-- --> {{ 7*7 }} {% raw %}",
    "\u202eevil.gguf\u202c مرحبا بالعالم \u2067",
    "W" * 400,
    "line\none\r\ntwo\ttab\x00\x1b[31m\x85\udcff\ufffe",
)


def full(
    *, n_layers: int = 4, heads: int = 2, group: int = 4, n_buckets: int = 7, damage: float = 1.0, seed: int = 1
) -> Report:
    """A report with every part. damage: 0 for a candidate equal to its reference."""
    draw, dense = Random(seed), 3 if n_layers > 9 else 1
    block, top_k = 128, 16 if n_layers > 9 else 4
    width = 4 * block
    first = top_k * block
    buckets = [
        {"first": first + n * width, "last": first + (n + 1) * width - 1, "queries": width} for n in range(n_buckets)
    ]
    tokens = buckets[-1]["last"] + 1
    layers = [_layer(draw, dense + n, heads, group, buckets, damage * (1 + n / n_layers)) for n in range(n_layers)]
    cells = [(layer["layer"], head) for layer in layers for head in layer["heads"]]
    worst_layer, worst = min(cells, key=lambda cell: cell[1]["overlap_mean"])
    low_layer, low = min(cells, key=lambda cell: cell[1]["overlap_min"])
    queries = [(layer, head, q) for layer, head in cells for q in head["mass_lost"]["query_heads"]]
    mass_layer, mass_head, mass = max(queries, key=lambda entry: entry[2]["mean"])
    most_layer, most_head, most = max(queries, key=lambda entry: entry[2]["max"])
    n_queries = tokens - first
    lists = n_queries * len(cells)
    ties, changed = (sum(head[key] for _, head in cells) for key in ("ties", "changed"))
    overlap_mean = sum(head["overlap_mean"] for _, head in cells) / len(cells)
    counts = [int(damage * n) for n in (412, 655, 980, 702, 311, 44)]
    return {
        "schema": {"name": "m3-check-selection", "version": 2},
        "program": "0.1.0",
        "versions": {"engine_sha256": "e6" * 32, "python": "3.12.4", "numpy": "2.3.1", "tokenizers": "0.22.0"},
        "verdict": _verdict(worst_layer, worst) if damage else _same_verdict(),
        "thresholds": {"min_overlap": 0.99, "max_mass_lost": 0.05, "max_kld": None},
        "reference": _side(
            "models/m3-nano", "checkpoint", {name: {"BF16": 2 * n} for name, n in _sizes()}, "config.json"
        ),
        "candidate": _side(
            "nano-q4_k_m.gguf", "gguf", {name: dict(types) for name, types in GROUPS.items()}, "the file"
        ),
        "model": {
            "layers": n_layers + dense,
            "dense_layers": dense,
            "heads": heads * group,
            "index_heads": heads,
            "block_size": block,
            "top_k": top_k,
            "local_blocks": 1,
        },
        "text": {
            "name": "built-in text",
            "bytes": 4 * tokens + 11,
            "sha256": "5e" * 32,
            "tokens": tokens,
            "whole": False,
            "wanted": tokens,
        },
        "settings": {
            "reference": {"attention": "sparse", "kv_type": "f16", "index_type": "f32"},
            "candidate": {"attention": "sparse", "kv_type": "q8_0", "index_type": "f32"},
            "isa": "avx2",
            "threads": 0,
        },
        "tested": {"queries": n_queries, "first_position": first, "lists": lists},
        "overall": {
            "equal": lists - ties - changed,
            "ties": ties,
            "changed": changed,
            "blocks_lost": sum(counts),
            "overlap_mean": overlap_mean,
            "worst": {"layer": worst_layer, "head": worst["head"], "overlap_mean": worst["overlap_mean"]},
            "lowest": {
                "layer": low_layer,
                "head": low["head"],
                "overlap": low["overlap_min"],
                "position": low["overlap_min_position"],
            },
            "first_changed": None if damage == 0 else 525,
            "mass_lost": {
                "mean": sum(q["mean"] for _, _, q in queries) / len(queries),
                "worst": {
                    "layer": mass_layer,
                    "head": mass_head["head"],
                    "query_head": mass["head"],
                    "mean": mass["mean"],
                },
                "max": {
                    "layer": most_layer,
                    "query_head": most["head"],
                    "position": most_head["mass_lost"]["max_position"],
                    "value": most["max"],
                },
            },
            "flips": {
                "edges": list(EDGES),
                "counts": counts,
                "mass": [damage * x for x in (0.41, 0.66, 3.2, 8.8, 11.4, 6.3)],
                "near_ties": sum(counts[:3]) / sum(counts) if damage else None,
            },
        },
        "buckets": buckets,
        "layers": layers,
        "logits": _logits(draw, tokens, first, damage),
        "isolated": [_isolated(layer) for layer in layers],
        "attribution": _attribution(overlap_mean, worst["overlap_mean"], mass["mean"], damage),
        "worst": [_query(draw, layers, tokens, block, top_k, n) for n in range(10)] if damage else [],
        "not_tested": [
            f"{first:,} queries that saw no more blocks than they read: they read all of them.",
            f"Contexts beyond {tokens:,} tokens.",
            "Which experts the router chose.",
            "The vision part.",
            "Sampling, and other cache types than those above.",
        ],
        "memory": {"estimated_bytes": 512_000_000, "peak_bytes": 498_300_000},
        "seconds": 83.412,
    }


def minimal() -> Report:
    """No threshold, and none of the parts that a check may leave out."""
    report = full()
    report["thresholds"] = dict.fromkeys(report["thresholds"])
    report["verdict"].update(status="reported", exit_code=0, failed=[])
    report.update(logits=None, isolated=None, attribution=None, worst=[])
    report["candidate"]["sha256"] = None
    return report


def all_equal() -> Report:
    """A candidate equal to its reference."""
    return full(damage=0)


def release() -> Report:
    """The shape of the 428B release: 57 sparse layers, 4 index heads, 64 query heads."""
    return full(n_layers=57, heads=4, group=16, n_buckets=16, damage=0.6, seed=3)


def dense_candidate() -> Report:
    """A candidate that reads all visible blocks: it has no lists, and loses nothing."""
    report = full(damage=0)
    report["settings"]["candidate"]["attention"] = "dense"
    report["thresholds"].update(min_overlap=None, max_mass_lost=None)
    report["verdict"].update(text="Dense: the candidate reads every visible block.", status="reported", cause="dense")
    report["tested"]["lists"] = 0
    for layer in report["layers"]:
        layer["rounding"] = None
        for head in layer["heads"]:
            head.update(equal=0, overlap_mean=None, overlap_min=None, overlap_min_position=None)
            empty = [None] * len(report["buckets"])
            head["histogram"].update(overlap_mean=empty, overlap_min=empty)
    report["overall"].update(equal=0, overlap_mean=None, worst=None, lowest=None)
    report.update(isolated=None, attribution=None)
    report["logits"] = full()["logits"]
    return report


def hostile() -> Report:
    """Every string that comes from outside is one of HOSTILE."""
    report = full()
    texts = iter(HOSTILE * 30)
    report["reference"]["path"], report["candidate"]["path"] = HOSTILE[0] + HOSTILE[3], HOSTILE[1] + HOSTILE[5]
    report["text"]["name"] = HOSTILE[4] + HOSTILE[2]
    report["verdict"].update(text=HOSTILE[0] + HOSTILE[4], evidence=list(HOSTILE))
    report["not_tested"] = list(HOSTILE)
    for query in report["worst"]:
        query.update(text_before=next(texts), token=next(texts), text_after=next(texts))
        for block in (*query["lost"], *query["gained"]):
            block["text"] = next(texts)
    report["candidate"]["types"][HOSTILE[2]] = {HOSTILE[0]: 1}
    report["attribution"]["groups"][0]["group"] = HOSTILE[1]
    report["attribution"]["groups"][0]["types"] = {HOSTILE[0]: 1}
    return report


#: All of these, by name.
REPORTS = {make.__name__: make for make in (full, minimal, all_equal, release, dense_candidate, hostile)}


# ------------------------------------------------------------------------------------------------ parts


def _sizes() -> list[tuple[str, int]]:
    return [(name, sum(types.values())) for name, types in GROUPS.items()]


def _side(path: str, kind: str, types: dict[str, dict[str, int]], hash_of: str) -> Report:
    total = sum(n for sizes in types.values() for n in sizes.values())
    return {"path": path, "kind": kind, "bytes": total, "types": types, "sha256": "c0de" * 16, "hash_of": hash_of}


def _verdict(layer: int, head: Report) -> Report:
    query_head = max(head["mass_lost"]["query_heads"], key=lambda q: q["mean"])
    return {
        "text": f"Selection changed: other blocks in 1.71% of 28,672 lists, most in layer {layer}, head {head['head']} "
        f"(mean overlap {head['overlap_mean']:.4f}), because the other weights move the hidden states. It costs "
        f"{100 * query_head['mean']:.2f}% of the attention of query head {query_head['head']} of layer {layer} and a "
        "KL divergence of 0.0183, which is 0.0159 with the reference's blocks. Fell short: the overlap is below 0.99.",
        "evidence": [
            "The output changes, but little of that comes from the selection.",
            "Means hide it: one query head loses ten times what all together lose.",
            "The index projections are the reference's, value for value.",
        ],
        "cause": "weights",
        "cost": "weights",
        "status": "fell short",
        "exit_code": 1,
        "failed": ["min_overlap"],
    }


def _same_verdict() -> Report:
    return {
        "text": "Same selection: the candidate reads the reference's blocks in all lists.",
        "evidence": [],
        "cause": "equal",
        "cost": "none",
        "status": "passed",
        "exit_code": 0,
        "failed": [],
    }


def _layer(draw: Random, layer: int, heads: int, group: int, buckets: list[Report], damage: float) -> Report:
    return {
        "layer": layer,
        "rounding": 1.2e-4,
        "index_deviation": {"queries": [damage * 0.01 * head for head in range(heads)], "keys": damage * 0.0043},
        "heads": [_head(draw, head, group, buckets, damage) for head in range(heads)],
    }


def _head(draw: Random, head: int, group: int, buckets: list[Report], damage: float) -> Report:
    loss = damage * 0.02 * draw.random() ** 2
    means = [1 - loss * (0.5 + n / len(buckets)) * draw.random() * 1.3 for n in range(len(buckets))]
    mean = sum(means) / len(means)
    n = sum(bucket["queries"] for bucket in buckets)
    changed = min(n, int(n * (1 - mean) * 2.5))
    ties = int(damage * 5 * draw.random())
    query_heads = [
        {"head": head * group + q, "mean": damage * 0.03 * draw.random() ** 6, "max": damage * 0.4 * draw.random()}
        for q in range(group)
    ]
    somewhere = buckets[-1]["first"] + 17
    return {
        "head": head,
        "equal": n - changed - ties,
        "ties": ties,
        "changed": changed,
        "blocks_lost": changed + changed // 10,
        "overlap_mean": mean,
        "overlap_min": 0.6 if damage else 1.0,
        "overlap_min_position": somewhere if damage else None,
        "first_changed": buckets[0]["first"] + 13 if damage else None,
        "histogram": {
            "changed": [int(bucket["queries"] * (1 - m)) for bucket, m in zip(buckets, means, strict=True)],
            "overlap_mean": means,
            "overlap_min": [0.6 if m < 1 else 1.0 for m in means],
            "mass_lost": [(1 - m) / 10 for m in means],
        },
        "mass_lost": {
            "mean": sum(q["mean"] for q in query_heads) / group,
            "max": max(q["max"] for q in query_heads),
            "max_position": somewhere if damage else None,
            "query_heads": query_heads,
        },
        "flips": {"counts": [int(damage * c) for c in (40, 66, 99, 71, 30, 4)], "mass": [damage * 0.1] * 6},
    }


def _logits(draw: Random, tokens: int, first: int, damage: float) -> Report:
    def run(kld: float, ppl: float, top1: float) -> Report:
        return {
            "perplexity": ppl,
            "kld": {
                "mean": damage * kld,
                "median": damage * kld / 4,
                "p99": damage * kld * 11,
                "max": damage * kld * 160,
                "max_position": 3011 if damage else None,
            },
            "top1": 1 - damage * top1,
        }

    width = tokens // 16
    return {
        "positions": tokens,
        "reference": {"perplexity": 14.03125},
        "candidate": run(0.0183, 14.03125 + damage * 0.2113, 0.031),
        "forced": run(0.0159, 14.03125 + damage * 0.1902, 0.027),
        "selection": {"kld": damage * 0.0024, "top1": -damage * 0.004, "log_perplexity": damage * 0.0015},
        "buckets": [
            {
                "first": n * width,
                "last": (n + 1) * width - 1 if n < 15 else tokens - 1,
                "candidate_kld": damage * (0.015 + (n * width >= first) * 0.0004 * n + 0.002 * draw.random()),
                "forced_kld": damage * (0.0145 + 0.002 * draw.random()),
            }
            for n in range(16)
        ],
    }


def _isolated(layer: Report) -> Report:
    keys = ("head", "overlap_min", "equal", "ties", "changed")
    return {
        "layer": layer["layer"],
        "heads": [
            {key: head[key] for key in keys}
            | {"overlap_mean": 1 - (1 - head["overlap_mean"]) / 7, "mass_lost": head["mass_lost"]["mean"] / 9}
            for head in layer["heads"]
        ],
    }


def _attribution(overlap: float, worst: float, mass: float, damage: float) -> Report:
    returned = {"index": 0, "attention": 0.31, "dense mlp": 0.04, "shared experts": 0.12, "experts": 0.58}
    returned |= {"embeddings": 0.02, "head": -0.01}
    return {
        "baseline": {"overlap_mean": overlap, "worst_overlap": worst, "mass_lost": mass, "kld": damage * 0.0183},
        "groups": [
            {
                "group": group,
                "types": dict(GROUPS[group]),
                "bytes": sum(GROUPS[group].values()),
                "reference_bytes": 2 * sum(GROUPS[group].values()),
                "overlap_mean": overlap + (1 - overlap) * part,
                "worst_overlap": worst + (1 - worst) * part,
                "mass_lost": mass * (1 - part),
                "kld": damage * 0.0183 * (1 - part * 0.9),
                "returned": {"overlap": part, "kld": part * 0.9} if damage else {"overlap": None, "kld": None},
            }
            for group, part in returned.items()
        ],
        "same": ["norms", "router"],
    }


def _query(draw: Random, layers: list[Report], tokens: int, block: int, top_k: int, n: int) -> Report:
    position = tokens - 1 - draw.randrange(block * 3)
    own = position // block
    blocks = draw.sample(range(own), top_k + 1)
    common, lost, gained = blocks[: top_k - 2], blocks[top_k - 2 : top_k - 1], blocks[top_k - 1 : top_k]
    text = "The watch of the harbor keeps a list of every ship, and the code of each tower stands beside its name. "
    return {
        "layer": layers[-1 - n % 2]["layer"],
        "head": n % 2,
        "query_head": n % 4,
        "position": position,
        "mass_lost": 0.41 - n * 0.03,
        "overlap": 0.6,
        "text_before": text + "What is the code of Tower",
        "token": " 52" if n != 3 else "\n",
        "text_after": "? The code of Tower 52 is 7316. " + text,
        "reference_blocks": sorted([*common, *lost, own]),
        "candidate_blocks": sorted([*common, *gained, own]),
        "lost": [
            {
                "block": b,
                "score": 41.7 - n,
                "margin": None if n == 4 else 0.42,
                "mass": 0.41 - n * 0.03,
                "text": text[:80],
            }
            for b in lost
        ],
        "gained": [{"block": b, "score": 39.9 - n, "text": text[5:85]} for b in gained],
    }
