"""What a check did not test, in sentences for people: a report must not be taken for more than it is."""

from m3_convert.check_report import CheckReport


def not_tested(r: CheckReport) -> list[str]:
    n, first = len(r.sample.ids), r.result.rule.always_read
    o = r.reference_options
    found = [
        f"Queries up to position {first - 1:,}: they see no more blocks than they read, and read them all.",
        f"Contexts beyond {n:,} tokens; the model was trained for {r.hparams.context_train:,}.",
        "Other texts than this one.",
    ]
    if r.result.selection is None:
        found.append("The candidate's selection: it was run dense.")
    if r.result.candidate is None:
        found.append("What comes out: logits were left out (--selection-only).")
    if r.result.isolated is None and r.result.selection:
        found.append("Each layer on its own (--isolate).")
    if r.groups is None and r.result.selection:
        found.append("Which group of tensors is to blame (--attribute).")
    found += [
        "Which experts are chosen; a changed choice shows in the logits only.",
        f"Other caches than K and V in {o.kv_type.upper()} and index keys in {o.index_type.upper()} for the reference.",
        f"Other programs and other instruction sets than {r.isa} of this engine, which may round another way.",
        "Sampling, answers, and pictures.",
    ]
    for side in (r.reference, r.candidate):
        if side.kind == "checkpoint":
            found.append(f"The content of the shards of {side.name}: the hash is that of {side.hash_of}.")
    return found
