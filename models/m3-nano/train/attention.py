"""MiniMax sparse attention (MSA, arXiv 2606.13392) in torch: block scores, selection, attention, the indexer's loss.

Shapes: B sequences, S positions, H query heads, G key/value heads = index heads, D the head's size, N = S / block
blocks. A selection is an int32 [B, G, S] with bit n set where the query reads block n, so a context holds at most 32
blocks. Index scores are raw dot products in float32; block positions are absolute.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.nn.attention.flex_attention import BlockMask, flex_attention

MAX_BLOCKS = 32  #: bits of a selection

ScoreChange = Callable[[Tensor], Tensor]  #: block scores [B, G, S, N] to others, for experiments


def block_scores(index_q: Tensor, index_k: Tensor, block: int) -> Tensor:
    """The best score in each block: index_q [B, G, S, D], index_k [B, 1, S, D] -> [B, G, S, N], -inf in the future."""
    b, g, s, d = index_q.shape
    scores = torch.bmm(index_q.reshape(b, g * s, d), index_k[:, 0].transpose(1, 2)).view(b, g, s, s)
    scores = scores.float()
    position = torch.arange(s, device=scores.device)
    scores = torch.where(position[None, :] <= position[:, None], scores, float("-inf"))
    return scores.view(b, g, s, s // block, block).amax(-1)


def select_blocks(scores: Tensor, top_k: int, block: int) -> Tensor:
    """The top_k blocks of each query, its own block always among them; equal scores: the lower block.

    scores: float32 [B, G, S, N]. Returns a selection. Raises ValueError for more than MAX_BLOCKS blocks.
    """
    s, n = scores.shape[-2:]
    if n > MAX_BLOCKS:
        raise ValueError(f"{n} blocks, a selection has bits for {MAX_BLOCKS}")
    own = torch.arange(s, device=scores.device)[:, None] // block
    blocks = torch.arange(n, device=scores.device)
    scores = torch.where(blocks == own, float("inf"), scores)
    mine, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    rank = ((other > mine) | ((other == mine) & (blocks[None, :] < blocks[:, None]))).sum(-1)
    keep = (rank < top_k) & (blocks <= own)
    return (keep.to(torch.int32) << blocks.to(torch.int32)).sum(-1, dtype=torch.int32)


def selected_keys(selection: Tensor, n_keys: int, block: int) -> Tensor:
    """Which keys a selection lets through, causal or not: int32 [..., S] -> bool [..., S, n_keys]."""
    blocks = torch.arange(n_keys, device=selection.device) // block
    return ((selection.unsqueeze(-1) >> blocks.to(torch.int32)) & 1).bool()


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [B, H, S, D], k and v [B, G, S, D] -> [B, H, S, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, selection: Tensor, block: int) -> Tensor:
    """Causal attention over the selected blocks, by a mask of S x S: the definition, on any device."""
    s = q.shape[2]
    mask = selected_keys(selection, s, block) & torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    mask = mask.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def tiles_of(selection: Tensor, heads: int, block: int) -> BlockMask:
    """Which tiles of block x block FlexAttention must visit, and which keys count in them.

    A tile is visited if any of its queries selects it.
    """
    b, g, s = selection.shape
    n = s // block
    group = heads // g
    blocks = torch.arange(n, device=selection.device)
    chosen = ((selection.unsqueeze(-1) >> blocks.to(torch.int32)) & 1).view(b, g, n, block, n).amax(3)
    chosen = chosen * (blocks[None, :] <= blocks[:, None])
    count = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen, dim=-1, descending=True, stable=True).to(torch.int32)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        word = selection[batch, head // group, query]
        return (query >= key) & (((word >> (key // block)) & 1) == 1)

    return BlockMask.from_kv_blocks(
        count.repeat_interleave(group, 1),
        order.repeat_interleave(group, 1),
        BLOCK_SIZE=(block, block),
        mask_mod=visible,
        seq_lengths=(s, s),
    )


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, selection: Tensor, block: int) -> Tensor:
    """`masked_attention` by FlexAttention, fast when compiled on a GPU."""
    out = flex_attention(q, k, v, block_mask=tiles_of(selection, q.shape[1], block), enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


def index_loss(
    q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, rows: Tensor, selection: Tensor | None, block: int
) -> Tensor:
    """KL divergence of the index branch's attention from the main branch's, mean over `rows` and index heads.

    The target is the mean attention of a group's query heads, without gradient; both run over the visible keys, and
    with a selection over the selected ones only. rows: int64 [R], the queries that count. Returns a scalar.
    """
    b, h, s, d = q.shape
    g, r = k.shape[1], rows.numel()
    with torch.no_grad():
        queries = q[:, :, rows].float().reshape(b, g, h // g * r, d)
        scores = (queries @ k.float().transpose(-1, -2)).view(b, g, h // g, r, s) * d**-0.5
        seen = (torch.arange(s, device=q.device)[None, :] <= rows[:, None]).expand(b, g, r, s)
        if selection is not None:
            seen = seen & selected_keys(selection[:, :, rows], s, block)
        target = scores.masked_fill(~seen.unsqueeze(2), float("-inf")).softmax(-1).mean(2)
    index_rows = index_q[:, :, rows].reshape(b, g * r, -1)
    scores = (index_rows @ index_k[:, 0].transpose(-1, -2)).view(b, g, r, s) * index_q.shape[-1] ** -0.5
    learned = scores.masked_fill(~seen, float("-inf")).log_softmax(-1).masked_fill(~seen, 0.0)
    return (target * ((target + 1e-9).log() - learned)).sum(-1).mean()
