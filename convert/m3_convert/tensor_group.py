"""The groups of tensors by what they are for: what a report calls a tensor, and what --attribute restores together."""

from fnmatch import fnmatchcase
from typing import Final

INDEX: Final = "index"  #: the indexer, which chooses the blocks

#: The first pattern that matches decides.
TENSOR_GROUPS: Final = (
    (INDEX, "blk.*.indexer.*"),
    ("norms", "*norm.weight"),
    ("router", "blk.*.ffn_gate_inp.weight"),
    ("router", "blk.*.exp_probs_b.bias"),
    ("experts", "blk.*_exps.weight"),
    ("shared experts", "blk.*_shexp.weight"),
    ("attention", "blk.*.attn_*.weight"),
    ("dense mlp", "blk.*.ffn_*.weight"),
    ("embeddings", "token_embd.weight"),
    ("head", "output.weight"),
)

GROUPS: Final = tuple(dict.fromkeys(group for group, _ in TENSOR_GROUPS))


def tensor_group(name: str) -> str:
    """The group of TENSOR_GROUPS that a tensor belongs to, "other" if none."""
    return next((group for group, pattern in TENSOR_GROUPS if fnmatchcase(name, pattern)), "other")
