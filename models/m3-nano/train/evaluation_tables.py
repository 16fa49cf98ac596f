"""The figures that evaluate.py writes, as Markdown tables."""

from collections.abc import Iterable, Sequence
from typing import Any

Figures = dict[str, Any]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def _share(part: Figures) -> str:
    return _percent(part["right"] / part["of"]) if part["of"] else "-"


def print_tables(figures: Figures) -> None:
    """Prints all tables with a line above each that says what is counted."""
    variants: list[Figures] = list(figures["variants"].values())
    rows = figures["rows"]
    print(
        f"{rows['text']} rows of text, {rows['recall']} of recall and {rows['hard']} of hard recall, "
        f"{figures['config']['context']} tokens each; budget {figures['budget']} tokens. "
        f"{figures['device']}, torch {figures['torch']}, float32, {figures['seconds']:.0f} s. "
        f"Rounding: {figures['rounding']}.\n"
    )
    _print_variants(variants, figures["budget"])
    for kind in ("recall", "hard"):
        _print_distances(kind, [v for v in variants if kind in v])
    _print_positions([v for v in variants if "kl_by_position" in v][1:], figures["position_bucket"])
    _print_overlap([v for v in variants if "overlap" in v][1:], figures["config"]["dense"])
    for kind, readers in figures["readers"].items():
        _print_readers(kind, readers)


def _print_variants(variants: list[Figures], budget: int) -> None:
    print(
        f"KL divergence and other top-1 token against the first row, past position {budget}; overlap: Jaccard index "
        "of the blocks selected there, mean (worst layer; worst head).\n"
    )
    head = ["variant", "perplexity", f"past {budget}", "KL", "other top-1", "recall", "hard", "overlap"]
    lines = []
    for v in variants:
        line = [v["title"]]
        if "perplexity" in v:
            line += [f"{v['perplexity']:.3f}", f"{v['perplexity_past_budget']:.3f}"]
            line += [f"{v['kl']:.4f}", _percent(v["other_top1"])]
        else:
            line += ["-"] * 4
        line += [_share(v[kind][0]) if kind in v else "-" for kind in ("recall", "hard")]
        overlap = v.get("overlap")
        if overlap:
            worst = f"{overlap['worst_layer']['mean']:.3f}; {overlap['worst_head']['mean']:.3f}"
            line.append(f"{overlap['mean']:.3f} ({worst})")
        else:
            line.append("reads all")
        lines.append(line)
    _table(head, lines)


def _print_distances(kind: str, variants: list[Figures]) -> None:
    if not variants:
        return
    buckets = variants[0][kind]
    print(f"Right answers of the {kind} rows by the tokens between fact and answer:\n")
    head = ["variant", f"all ({buckets[0]['of']})"]
    head += [f"{b['from']} to {b['to'] - 1} ({b['of']})" for b in buckets[1:]]
    _table(head, [[v["title"], *(_share(b) for b in v[kind])] for v in variants])


def _print_positions(variants: list[Figures], bucket: int) -> None:
    if not variants:
        return
    count = len(variants[0]["kl_by_position"])
    print("KL divergence from the model as trained by position:\n")
    head = ["variant", *(f"from {bucket * i}" for i in range(count))]
    _table(head, [[v["title"], *(f"{x:.4f}" for x in v["kl_by_position"])] for v in variants])


def _print_overlap(variants: list[Figures], first_layer: int) -> None:
    if not variants:
        return
    print("Overlap of the selected blocks by layer and index head:\n")
    heads = variants[0]["overlap"]["heads"]
    head = ["variant"]
    head += [f"layer {first_layer + i} head {g}" for i, layer in enumerate(heads) for g in range(len(layer))]
    _table(head, [[v["title"], *(f"{x:.3f}" for layer in v["overlap"]["heads"] for x in layer)] for v in variants])


def _print_readers(kind: str, readers: Figures) -> None:
    if not readers["answers"]:
        return
    print(
        f"Which index heads read the block of the fact at a token of the answer: share of {readers['answers']} right "
        f"answers of the {kind} rows whose fact is in another block; some head did at {_percent(readers['any'])}.\n"
    )
    count = len(next(iter(readers["layers"].values())))
    head = ["layer", *(f"head {g}" for g in range(count))]
    _table(head, [[layer, *(_percent(x) for x in heads)] for layer, heads in readers["layers"].items()])
