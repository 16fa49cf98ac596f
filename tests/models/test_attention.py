"""The parts of m3-nano's training code against their definitions: selection, index loss, experts, weighted loss."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention import index_loss, masked_attention, select_blocks, selected_keys, tiled_attention  # noqa: E402
from model import SMALL, SWIGLU_ALPHA, Model, Pass, Stage, swiglu, weighted_loss  # noqa: E402

BLOCK = 4


def blocks_of(selection: torch.Tensor) -> list[int]:
    return [block for block in range(32) if int(selection) >> block & 1]


def select(rows: list[list[float]], top_k: int) -> list[list[int]]:
    """For one head, scores of the queries at the first position of each block."""
    scores = torch.full((1, 1, len(rows) * BLOCK, len(rows)), -torch.inf)
    for i, row in enumerate(rows):
        scores[0, 0, i * BLOCK : (i + 1) * BLOCK, : len(row)] = torch.tensor(row)
    chosen = select_blocks(scores, top_k, BLOCK)[0, 0]
    return [blocks_of(chosen[i * BLOCK]) for i in range(len(rows))]


def test_the_best_blocks_and_the_own_one_are_selected():
    rows = [[1.0], [1.0, -9.0], [1.0, 2.0, -9.0], [1.0, 3.0, 2.0, -9.0]]
    assert select(rows, 2) == [[0], [0, 1], [1, 2], [1, 3]]
    assert select(rows, 3) == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]


def test_of_equal_scores_the_lower_block_wins():
    rows = [[0.0], [0.0, 0.0], [5.0, 5.0, 0.0], [5.0, 5.0, 5.0, 0.0], [1.0, 5.0, 5.0, 5.0, 0.0]]
    assert select(rows, 2) == [[0], [0, 1], [0, 2], [0, 3], [1, 4]]
    assert select(rows, 3)[3:] == [[0, 1, 3], [1, 2, 4]]


def test_the_last_bit_can_be_selected_and_no_more():
    scores = torch.zeros(1, 1, 32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)
    selection = select_blocks(scores, 2, 1)
    assert selected_keys(selection, 32, 1)[0, 0, 31].nonzero().flatten().tolist() == [0, 31]
    with pytest.raises(ValueError, match="33 blocks"):
        select_blocks(torch.zeros(1, 1, 33, 33), 2, 1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tiles_give_what_the_mask_gives():
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 64, 16), torch.randn(2, 2, 64, 16), torch.randn(2, 2, 64, 16)
    scores = torch.randn(2, 2, 64, 4)
    future = torch.arange(4)[None] > torch.arange(64)[:, None] // 16
    selection = select_blocks(scores.masked_fill(future, -torch.inf), 2, 16)
    expected = masked_attention(q, k, v, selection, 16)
    torch.testing.assert_close(tiled_attention(q, k, v, selection, 16), expected)
    full = masked_attention(q, k, v, torch.full_like(selection, 15), 16)
    assert (full - expected).abs().max() > 0.1  # the selection matters here


@pytest.mark.parametrize("sparse", [False, True])
def test_the_index_loss_is_the_divergence_over_the_keys_that_are_read(sparse: bool):
    """Written out for each query in NumPy."""
    torch.manual_seed(2)
    s, heads, groups, size = 12, 4, 2, 8
    q, k = torch.randn(1, heads, s, size), torch.randn(1, groups, s, size)
    index_q, index_k = torch.randn(1, groups, s, size), torch.randn(1, 1, s, size)
    selection = torch.tensor([[[1] * 4 + [2] * 4 + [5] * 4, [1] * 4 + [3] * 4 + [6] * 4]], dtype=torch.int32)
    rows = torch.tensor([3, 6, 11])
    total = 0.0
    for group in range(groups):
        for row in rows.tolist():
            keys = [key for key in range(row + 1) if not sparse or selection[0, group, row] >> (key // BLOCK) & 1]
            target = np.zeros(len(keys))
            for head in (2 * group, 2 * group + 1):
                logits = (k[0, group, keys] @ q[0, head, row]).numpy() / size**0.5
                target += np.exp(logits) / np.exp(logits).sum() / 2
            logits = (index_k[0, 0, keys] @ index_q[0, group, row]).numpy() / size**0.5
            learned = np.exp(logits) / np.exp(logits).sum()
            total += float((target * np.log(target / learned)).sum())
    loss = index_loss(q, k, index_q, index_k, rows, selection if sparse else None, BLOCK)
    assert loss.item() == pytest.approx(total / 6, abs=1e-5)


def test_swiglu_clamps_the_gate_from_above_and_the_other_on_both_sides():
    gate, up = torch.tensor([9.0, -9.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 9.0, -9.0])
    g, u = np.array([7.0, -9.0, 1.0, 1.0]), np.array([1.0, 1.0, 7.0, -7.0])
    expected = g / (1 + np.exp(-SWIGLU_ALPHA * g)) * (u + 1)
    np.testing.assert_allclose(swiglu(gate, up).numpy(), expected, rtol=1e-5)


def test_a_token_takes_its_number_of_experts_even_if_all_are_equal():
    model = Model(SMALL)
    layer = model.sparse_layers()[0]
    with torch.no_grad():
        layer.router.zero_()
    out = model.body(torch.zeros(1, SMALL.context, dtype=torch.long), Pass(Stage.FULL, torch.float32))
    assert (out.experts[0].sum(-1) == SMALL.top).all()


def test_the_loss_weighs_its_targets():
    torch.manual_seed(4)
    x, norm, head = torch.randn(1, 2, 8), torch.zeros(8), torch.randn(16, 8)
    targets = torch.tensor([[3, 5]])
    each = [weighted_loss(x[:, i : i + 1], norm, head, targets[:, i : i + 1], torch.ones(1, 1), torch.float32)[0]
            for i in (0, 1)]  # fmt: skip
    loss, mean = weighted_loss(x, norm, head, targets, torch.tensor([[3.0, 1.0]]), torch.float32)
    assert loss.item() == pytest.approx((3 * each[0] + each[1]).item() / 4, rel=1e-5)
    assert mean.item() == pytest.approx((each[0] + each[1]).item() / 2, rel=1e-5)
