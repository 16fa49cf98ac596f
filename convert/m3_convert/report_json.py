"""What m3-check-selection reports, as JSON; the report for people and the page are made from this alone.

Schema version 2. Positions are token positions from 0. Counts are lists: one for each query that had a choice of
blocks, index head and sparse layer. Overlap is the Jaccard index of two lists, 0 to 1; a tie counts as 1. Mass is a
share of the reference's attention, 0 to 1: what a query head gives to blocks that the candidate does not read is lost.
A flip is a lost block, those of ties too; its margin is in standard deviations of the scores (flip_margin.py). KL
divergence is that of the candidate's next-token distribution from the reference's, in nats. A dense candidate has no
lists: its overlaps are null, it loses nothing.

    schema      {"name": "m3-check-selection", "version": 2}
    program     version of this program
    versions    {"engine_sha256": of the library that computed, "python", "numpy", "tokenizers"}
    verdict     {"text": up to three sentences, "evidence": [sentences], "cause", "cost": see verdict_cause.py,
                 "status": "reported" | "passed" | "fell short", "exit_code", "failed": [names of thresholds]}
    thresholds  {"min_overlap", "max_mass_lost", "max_kld"}: number or null; they judge overall.worst.overlap_mean,
                overall.mass_lost.worst.mean and logits.candidate.kld.mean
    reference   {"path", "kind": "gguf" | "checkpoint", "bytes": on disk, "types": {tensor group: {type: bytes}},
                 "sha256", "hash_of": which files, in words}: a checkpoint is evaluated, and described, as the file that
                `m3-convert --type auto` makes of it
    candidate   the same
    model       {"layers", "dense_layers", "heads", "index_heads", "block_size", "top_k", "local_blocks"}
    text        {"name", "bytes", "sha256": of the whole text, "tokens": that were evaluated, "whole": true if these
                 are all of the text, "wanted": what --context asked for, or null}
    settings    {"reference": {"attention": "sparse" | "dense", "kv_type", "index_type"}, "candidate": the same, "isa",
                 "threads": 0 for all cores}
    tested      {"queries": that had a choice, "first_position": of these, "lists": that were compared}
    overall     {"equal", "ties", "changed": these three add up to tested.lists, "blocks_lost": without ties,
                 "overlap_mean", "worst": {"layer", "head", "overlap_mean"}: the layer and head with the lowest mean,
                 "lowest": {"layer", "head", "overlap", "position": null if all lists agree}: the worst single list,
                 "first_changed": position or null,
                 "mass_lost": {"mean", "worst": {"layer", "head", "query_head", "mean"}: the query head that loses most,
                               "max": {"layer", "query_head", "position" or null, "value"}: of a single query},
                 "flips": {"edges": of the bins of margins, the last null for infinity, "counts": [by bin], "mass": [sum
                           by bin, each flip's the mean of the query heads of its list; over tested.lists it is
                           mass_lost.mean], "near_ties": share of flips in the bins below 0.1, or null}}
    buckets     [{"first", "last", "queries"}]: ranges of positions, last included
    layers      [{"layer", "rounding": difference of block scores up to which a swap is a tie,
                  "index_deviation": {"queries": [by head], "keys"}: of the indexer's tensors from the reference's,
                                     relative, root mean square,
                  "heads": [{"head", "equal", "ties", "changed", "blocks_lost", "overlap_mean", "overlap_min",
                             "overlap_min_position", "first_changed": positions or null,
                             "mass_lost": {"mean", "max", "max_position",
                                           "query_heads": [{"head": of all of the layer, "mean", "max"}]},
                             "flips": {"counts", "mass"},
                             "histogram": {"changed", "overlap_mean", "overlap_min", "mass_lost"}: lists by bucket}]}]
    logits      null, or {"positions", "reference": {"perplexity"},
                 "candidate": {"perplexity", "kld": {"mean", "median", "p99", "max", "max_position"}, "top1": share of
                               positions with the same most likely token},
                 "forced": the same of the candidate that reads the reference's blocks,
                 "selection": {"kld", "top1", "log_perplexity"}: candidate less forced, what the lists alone do,
                 "buckets": [{"first", "last", "candidate_kld", "forced_kld"}]}: of all positions
    isolated    null, or [{"layer", "heads": [{"head", "overlap_mean", "overlap_min", "mass_lost", "equal", "ties",
                "changed"}]}]: each layer of the candidate fed with the reference's hidden state
    attribution null, or {"baseline": {"overlap_mean", "worst_overlap": lowest mean of a layer and head, "mass_lost":
                 mean, "kld" or null}: of the candidate, "groups": [{"group", "types": {type: bytes} of the candidate,
                 "bytes", "reference_bytes", and what baseline has, of the candidate with this group from the
                 reference, "returned": {"overlap", "kld"}: share of what was lost, null if nothing was}], "same":
                 [groups that are the same on both sides]}
    worst       up to 10 [{"layer", "head", "query_head", "position", "mass_lost", "overlap", "text_before", "token",
                "text_after", "reference_blocks", "candidate_blocks", "lost": [{"block", "score", "margin": null for
                infinity, "mass", "text": its beginning}], "gained": [{"block", "score", "text"}]}]: scores are the
                reference's; of queries of one layer, head and block only the worst
    not_tested  [sentences]
    memory      {"estimated_bytes", "peak_bytes": of the process, pages of mapped files included}
    seconds     wall time of this run
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from m3_convert.check_report import CheckReport, GroupSummary, SideSummary
from m3_convert.comparison import LayerComparison, MassCell, SelectionComparison
from m3_convert.divergence import Divergence
from m3_convert.flip_margin import EDGES, near_tie_share
from m3_convert.not_tested import not_tested
from m3_convert.selection import PositionBuckets
from m3_convert.walker import WalkOptions
from m3_convert.worst_queries import WorstQuery
from m3_runtime.engine import Hparams

SCHEMA_VERSION: Final = 2

Json = dict[str, Any]


def report_json(report: CheckReport) -> Json:
    """The report; the schema stands at the top of this file."""
    r, h = report.result, report.hparams
    return {
        "schema": {"name": "m3-check-selection", "version": SCHEMA_VERSION},
        "program": report.program,
        "versions": dict(report.versions),
        "verdict": _verdict(report),
        "thresholds": {
            "min_overlap": report.thresholds.min_overlap,
            "max_mass_lost": report.thresholds.max_mass_lost,
            "max_kld": report.thresholds.max_kld,
        },
        "reference": _side(report.reference),
        "candidate": _side(report.candidate),
        "model": {
            "layers": h.n_layer,
            "dense_layers": h.n_dense_layer,
            "heads": h.n_head,
            "index_heads": h.n_index_head,
            "block_size": h.block_size,
            "top_k": h.top_k,
            "local_blocks": h.local_blocks,
        },
        "text": {
            "name": report.sample.text.name,
            "bytes": report.sample.text.n_bytes,
            "sha256": report.sample.text.sha256,
            "tokens": len(report.sample.ids),
            "whole": report.sample.whole,
            "wanted": report.wanted_tokens,
        },
        "settings": {
            "reference": _settings(report.reference_options),
            "candidate": _settings(report.candidate_options),
            "isa": report.isa,
            "threads": report.reference_options.threads,
        },
        "tested": {
            "queries": len(report.sample.ids) - r.rule.always_read,
            "first_position": r.rule.always_read,
            "lists": r.selection.agreement.lists if r.selection else 0,
        },
        "overall": _overall(r.selection, h) if r.selection else _dense_overall(h),
        "buckets": [{"first": first, "last": last, "queries": last - first + 1} for first, last in r.buckets.ranges()],
        "layers": _layers(report),
        "logits": _logits(report),
        "isolated": [_isolated_layer(layer) for layer in r.isolated.layers] if r.isolated else None,
        "attribution": _attribution(report),
        "worst": [_worst(query, report) for query in r.worst],
        "not_tested": not_tested(report),
        "memory": {"estimated_bytes": report.estimated_bytes, "peak_bytes": report.peak_bytes},
        "seconds": round(report.seconds, 3),
    }


def _verdict(report: CheckReport) -> Json:
    v = report.verdict
    return {
        "text": v.text,
        "evidence": list(v.evidence),
        "cause": v.cause,
        "cost": v.cost,
        "status": v.status,
        "exit_code": int(v.exit_code),
        "failed": [name for name, _ in v.shortfalls],
    }


def _side(side: SideSummary) -> Json:
    types = {group: dict(sizes) for group, sizes in side.types.items()}
    return {
        "path": side.name,
        "kind": side.kind,
        "bytes": side.n_bytes,
        "types": types,
        "sha256": side.sha256,
        "hash_of": side.hash_of,
    }


def _settings(options: WalkOptions) -> Json:
    return {"attention": options.attention, "kv_type": options.kv_type, "index_type": options.index_type}


# ------------------------------------------------------------------------------------------------ selection


def _overall(selection: SelectionComparison, h: Hparams) -> Json:
    a = selection.agreement
    lowest, position = a.lowest
    changes = [layer.first_change for layer in a.layers if layer.first_change >= 0]
    return {
        "equal": a.equal,
        "ties": a.ties,
        "changed": a.changed,
        "blocks_lost": a.blocks_lost,
        "overlap_mean": a.overlap_mean,
        "worst": {"layer": a.worst.layer, "head": a.worst.head, "overlap_mean": a.worst.overlap},
        "lowest": {
            "layer": lowest.layer,
            "head": lowest.head,
            "overlap": lowest.overlap,
            "position": _position(position),
        },
        "first_changed": min(changes, default=None),
        "mass_lost": _mass_lost(selection.mass_lost, selection.worst_mass, selection.largest_mass, h),
        "flips": {
            "edges": _edges(),
            "counts": selection.flip_counts.tolist(),
            "mass": selection.flip_mass.tolist(),
            "near_ties": near_tie_share(selection.flip_counts),
        },
    }


def _mass_lost(mean: float, worst: MassCell, largest: MassCell, h: Hparams) -> Json:
    head = worst.query_head // (h.n_head // h.n_index_head)
    return {
        "mean": mean,
        "worst": {"layer": worst.layer, "head": head, "query_head": worst.query_head, "mean": worst.value},
        "max": {
            "layer": largest.layer,
            "query_head": largest.query_head,
            "position": _position(largest.position),
            "value": largest.value,
        },
    }


def _dense_overall(h: Hparams) -> Json:
    nothing = MassCell(h.n_dense_layer, 0, 0.0)
    return {
        **dict.fromkeys(("equal", "ties", "changed", "blocks_lost"), 0),
        **dict.fromkeys(("overlap_mean", "worst", "lowest", "first_changed")),
        "mass_lost": _mass_lost(0.0, nothing, nothing, h),
        "flips": {"edges": _edges(), **_no_flips(), "near_ties": None},
    }


def _no_flips() -> Json:
    n = len(EDGES) - 1
    return {"counts": [0] * n, "mass": [0.0] * n}


def _edges() -> list[float | None]:
    return [_finite(edge) for edge in EDGES]


def _layers(report: CheckReport) -> list[Json]:
    r, h = report.result, report.hparams
    deviations = {
        layer: {"queries": [_finite(x) for x in d.queries], "keys": _finite(d.keys)}
        for layer, d in r.deviations.items()
    }
    if r.selection is None:
        heads = _dense_heads(h, len(r.buckets))
        return [
            {"layer": layer, "rounding": None, "index_deviation": deviation, "heads": heads}
            for layer, deviation in deviations.items()
        ]
    return [
        {
            "layer": layer.agreement.layer,
            "rounding": layer.agreement.rounding,
            "index_deviation": deviations[layer.agreement.layer],
            "heads": _heads(layer),
        }
        for layer in r.selection.layers
    ]


def _heads(layer: LayerComparison) -> list[Json]:
    a, n = layer.agreement, layer.agreement.n_heads
    bucket_overlap = a.bucket_overlap_sum / a.bucket_tested[:, None]
    bucket_mass = layer.mass.bucket_mean(n)
    return [
        {
            "head": head,
            "equal": int(a.equal[head]),
            "ties": int(a.ties[head]),
            "changed": int(a.changed[head]),
            "blocks_lost": int(a.blocks_lost[head]),
            "overlap_mean": float(a.overlap_mean[head]),
            "overlap_min": float(a.overlap_min[head]),
            "overlap_min_position": _position(int(a.overlap_min_at[head])),
            "first_changed": _position(int(a.first_changed[head])),
            "mass_lost": _head_mass(layer, head),
            "flips": {"counts": layer.flips.counts[head].tolist(), "mass": layer.flips.mass[head].tolist()},
            "histogram": {
                "changed": a.bucket_changed[:, head].tolist(),
                "overlap_mean": bucket_overlap[:, head].tolist(),
                "overlap_min": a.bucket_overlap_min[:, head].tolist(),
                "mass_lost": bucket_mass[:, head].tolist(),
            },
        }
        for head in range(n)
    ]


def _head_mass(layer: LayerComparison, head: int) -> Json:
    mass = layer.mass
    group = mass.n_head // layer.agreement.n_heads
    heads = range(head * group, (head + 1) * group)
    most = max(heads, key=lambda i: mass.largest[i])
    return {
        "mean": float(mass.by_index_head(layer.agreement.n_heads)[head]),
        "max": float(mass.largest[most]),
        "max_position": _position(int(mass.largest_at[most])),
        "query_heads": [{"head": i, "mean": float(mass.mean[i]), "max": float(mass.largest[i])} for i in heads],
    }


def _dense_heads(h: Hparams, n_buckets: int) -> list[Json]:
    group = h.n_head // h.n_index_head
    return [
        {
            "head": head,
            **dict.fromkeys(("equal", "ties", "changed", "blocks_lost"), 0),
            **dict.fromkeys(("overlap_mean", "overlap_min", "overlap_min_position", "first_changed")),
            "mass_lost": {
                "mean": 0.0,
                "max": 0.0,
                "max_position": None,
                "query_heads": [{"head": i, "mean": 0.0, "max": 0.0} for i in range(head * group, (head + 1) * group)],
            },
            "flips": _no_flips(),
            "histogram": {
                "changed": [0] * n_buckets,
                "overlap_mean": [None] * n_buckets,
                "overlap_min": [None] * n_buckets,
                "mass_lost": [0.0] * n_buckets,
            },
        }
        for head in range(h.n_index_head)
    ]


def _isolated_layer(layer: LayerComparison) -> Json:
    a = layer.agreement
    mass = layer.mass.by_index_head(a.n_heads)
    return {
        "layer": a.layer,
        "heads": [
            {
                "head": head,
                "overlap_mean": float(a.overlap_mean[head]),
                "overlap_min": float(a.overlap_min[head]),
                "mass_lost": float(mass[head]),
                "equal": int(a.equal[head]),
                "ties": int(a.ties[head]),
                "changed": int(a.changed[head]),
            }
            for head in range(a.n_heads)
        ],
    }


def _attribution(report: CheckReport) -> Json | None:
    r = report.result
    if report.groups is None or r.selection is None:
        return None
    returned = {restored.group: restored for restored in report.findings.restored}
    return {
        "baseline": _costs(r.selection, r.candidate),
        "groups": [
            {
                **_group(group),
                **_costs(r.groups[group.group], r.group_logits.get(group.group)),
                "returned": {"overlap": returned[group.group].agreement, "kld": returned[group.group].kld},
            }
            for group in report.groups
        ],
        "same": list(report.same_groups),
    }


def _group(group: GroupSummary) -> Json:
    return {
        "group": group.group,
        "types": dict(group.types),
        "bytes": group.n_bytes,
        "reference_bytes": group.reference_bytes,
    }


def _costs(selection: SelectionComparison, logits: Divergence | None) -> Json:
    return {
        "overlap_mean": selection.agreement.overlap_mean,
        "worst_overlap": selection.agreement.worst.overlap,
        "mass_lost": selection.mass_lost,
        "kld": logits.kld_mean if logits else None,
    }


# ------------------------------------------------------------------------------------------------ logits


def _logits(report: CheckReport) -> Json | None:
    r = report.result
    if r.reference is None or r.candidate is None or r.forced is None:
        return None
    candidate, forced = r.candidate, r.forced
    return {
        "positions": len(candidate.kld),
        "reference": {"perplexity": r.reference.perplexity},
        "candidate": _divergence(candidate),
        "forced": _divergence(forced),
        "selection": {
            "kld": candidate.kld_mean - forced.kld_mean,
            "top1": candidate.top1_share - forced.top1_share,
            "log_perplexity": candidate.log_perplexity - forced.log_perplexity,
        },
        "buckets": [
            {
                "first": first,
                "last": last,
                "candidate_kld": candidate.kld_between(first, last),
                "forced_kld": forced.kld_between(first, last),
            }
            for first, last in _all_ranges(r.buckets)
        ],
    }


def _all_ranges(buckets: PositionBuckets) -> Sequence[tuple[int, int]]:
    """Those of the queries that had a choice, and the positions before."""
    return [(0, buckets.first - 1), *buckets.ranges()]


def _divergence(d: Divergence) -> Json:
    return {
        "perplexity": d.perplexity,
        "kld": {
            "mean": d.kld_mean,
            "median": d.kld_quantile(0.5),
            "p99": d.kld_quantile(0.99),
            "max": d.kld_max,
            "max_position": d.kld_max_at if d.kld_max else None,
        },
        "top1": d.top1_share,
    }


# ------------------------------------------------------------------------------------------------ queries


def _worst(query: WorstQuery, report: CheckReport) -> Json:
    text = report.text
    before, token, after = text.around(query.position)
    return {
        "layer": query.layer,
        "head": query.head,
        "query_head": query.query_head,
        "position": query.position,
        "mass_lost": query.mass_lost,
        "overlap": query.overlap,
        "text_before": before,
        "token": token,
        "text_after": after,
        "reference_blocks": query.reference_blocks,
        "candidate_blocks": query.candidate_blocks,
        "lost": [
            {
                "block": lost.block,
                "score": lost.score,
                "margin": _finite(lost.margin),
                "mass": lost.mass,
                "text": text.block(lost.block),
            }
            for lost in query.lost
        ],
        "gained": [
            {"block": gained.block, "score": gained.score, "text": text.block(gained.block)} for gained in query.gained
        ],
    }


def _position(position: int) -> int | None:
    return position if position >= 0 else None


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
