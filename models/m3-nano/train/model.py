"""The MiniMax-M3 text model in torch, for training: M3's semantics, small enough to be read in one go.

Norms multiply by 1 + w in float32; each head's q, k, index q and index k is normalized before RoPE, which turns the
first `rotary` channels in NeoX halves; index scores are float32; the router is a sigmoid in float32 whose bias only
chooses; SwiGLU-OAI everywhere. The residual stream is float32, matrices run in the type that the caller names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from attention import (
    ScoreChange,
    block_scores,
    full_attention,
    index_loss,
    masked_attention,
    select_blocks,
    tiled_attention,
)

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
EPSILON = 1e-6
ROUTED_SCALE = 2.0
INDEX_PARAMETERS = frozenset(("index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm"))


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions, those of m3-nano by default. Widths in elements, `top_k` in blocks, `block` in tokens."""

    hidden: int = 256
    layers: int = 5
    dense: int = 1  #: leading layers with full attention and a dense MLP
    heads: int = 8
    kv_heads: int = 2  #: also the number of index heads
    head_dim: int = 128
    rotary: int = 64
    index_dim: int = 128
    block: int = 128
    top_k: int = 4
    experts: int = 8
    top: int = 2  #: experts per token
    inter: int = 256  #: width of an expert, routed or shared
    dense_inter: int = 1024
    vocab: int = 4096
    context: int = 4096
    theta: float = 5e6


#: For tests: trains for some steps on a CPU in seconds.
SMALL = ModelConfig(
    hidden=64,
    layers=3,
    heads=4,
    head_dim=32,
    rotary=16,
    index_dim=32,
    block=64,
    top_k=2,
    experts=4,
    inter=64,
    dense_inter=64,
    context=512,
)


class Stage(Enum):
    """What the sparse layers do, as the training goes."""

    FULL = 1  #: full attention, from which the index branch learns
    SPARSE = 2  #: attention over the selected blocks


class Way(Enum):
    """How attention over selected blocks is computed."""

    MASKED = "masked"  #: by its definition
    TILED = "tiled"  #: FlexAttention


@dataclass
class Pass:
    """What one pass over the layers is told, and what it leaves behind, one entry a sparse layer."""

    stage: Stage
    dtype: torch.dtype  #: of the matrices
    way: Way = Way.MASKED
    rows: Tensor | None = None  #: queries of the index loss, None: none is computed
    change: ScoreChange | None = None  #: applied to block scores before selection
    index_dtype: torch.dtype = torch.float32  #: of index queries, keys and scores


@dataclass(frozen=True)
class LayerResult:
    """x: float32 [B, S, hidden]; of a sparse layer: scalar index loss, experts bool [B, S, experts], selection."""

    x: Tensor
    loss: Tensor | None = None
    experts: Tensor | None = None
    selection: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """float32, over the last dimension."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * (1 + weight.float())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, heads, S, D] with tables [S, rotary / 2]; channels past `rotary` pass through."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x times the transposed weight, in the type of x."""
    return F.linear(x, weight.to(x.dtype))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU-OAI: the gate is clamped from above only."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


class Layer(nn.Module):
    """One layer; `sparse` ones have an index branch and experts, the others full attention and a dense MLP."""

    def __init__(self, config: ModelConfig, sparse: bool) -> None:
        super().__init__()
        c, width = config, config.hidden
        self.config, self.sparse = config, sparse
        self.input_norm, self.post_norm = _zeros(width), _zeros(width)
        self.q_proj, self.o_proj = _empty(c.heads * c.head_dim, width), _empty(width, c.heads * c.head_dim)
        self.k_proj, self.v_proj = _empty(c.kv_heads * c.head_dim, width), _empty(c.kv_heads * c.head_dim, width)
        self.q_norm, self.k_norm = _zeros(c.head_dim), _zeros(c.head_dim)
        if not sparse:
            self.gate_up, self.down = _empty(2, c.dense_inter, width), _empty(width, c.dense_inter)
            return
        self.index_q_proj, self.index_k_proj = _empty(c.kv_heads * c.index_dim, width), _empty(c.index_dim, width)
        self.index_q_norm, self.index_k_norm = _zeros(c.index_dim), _zeros(c.index_dim)
        self.router = _empty(c.experts, width)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(c.experts))
        self.expert_gate_up, self.expert_down = _empty(c.experts, 2, c.inter, width), _empty(c.experts, width, c.inter)
        self.shared_gate_up, self.shared_down = _empty(2, c.inter, width), _empty(width, c.inter)

    def forward_dense(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """A dense layer: x float32 [B, S, hidden] to the same."""
        _, q, k, v = self._project(x, cos, sin, dtype)
        x = x + self._merge(full_attention(q, k, v))
        h = rms_norm(x, self.post_norm).to(dtype)
        return x + linear(swiglu(linear(h, self.gate_up[0]), linear(h, self.gate_up[1])), self.down)

    def forward_sparse(self, x: Tensor, cos: Tensor, sin: Tensor, run: Pass) -> LayerResult:
        """A sparse layer: x float32 [B, S, hidden]. The index branch sees the layer's input without its gradient."""
        c = self.config
        h, q, k, v = self._project(x, cos, sin, run.dtype)
        index_q, index_k = self.index_branch(h.detach(), cos, sin, run.index_dtype)
        selection = None
        if run.stage is Stage.SPARSE:
            with torch.no_grad():
                scores = block_scores(index_q, index_k, c.block)
                selection = select_blocks(run.change(scores) if run.change else scores, c.top_k, c.block)
            attend = tiled_attention if run.way is Way.TILED else masked_attention
            attended = attend(q, k, v, selection, c.block)
        else:
            attended = full_attention(q, k, v)
        loss = None
        if run.rows is not None:
            loss = index_loss(q.detach(), k.detach(), index_q, index_k, run.rows, selection, c.block)
        x = x + self._merge(attended)
        y, experts = self._experts(rms_norm(x, self.post_norm), run.dtype)
        return LayerResult(x + y, loss, experts, selection)

    def index_branch(self, h: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Index queries [B, G, S, index_dim] and the index key [B, 1, S, index_dim] of the normalized input."""
        b, s, _ = h.shape
        dim = self.config.index_dim
        query = rms_norm(linear(h, self.index_q_proj).view(b, s, -1, dim), self.index_q_norm)
        key = rms_norm(linear(h, self.index_k_proj).view(b, s, 1, dim), self.index_k_norm)
        query, key = rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin)
        return query.to(dtype), key.to(dtype)

    def _project(
        self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The normalized input [B, S, hidden], and q [B, H, S, D], k, v [B, G, S, D], all in `dtype`."""
        b, s, _ = x.shape
        h = rms_norm(x, self.input_norm).to(dtype)

        def heads(y: Tensor) -> Tensor:
            return y.view(b, s, -1, self.config.head_dim)

        q = rotate(rms_norm(heads(linear(h, self.q_proj)), self.q_norm).transpose(1, 2), cos, sin).to(dtype)
        k = rotate(rms_norm(heads(linear(h, self.k_proj)), self.k_norm).transpose(1, 2), cos, sin).to(dtype)
        return h, q, k, heads(linear(h, self.v_proj)).transpose(1, 2)

    def _merge(self, attended: Tensor) -> Tensor:
        b, _, s, _ = attended.shape
        return linear(attended.transpose(1, 2).reshape(b, s, -1), self.o_proj)

    def _experts(self, h: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """h float32 [B, S, hidden] -> the same, and which experts each token takes, bool [B, S, experts].

        All experts are computed and those not chosen weigh 0: exact, and fast enough at this size.
        """
        c = self.config
        b, s, _ = h.shape
        affinity = torch.sigmoid(linear(h, self.router))
        best = (affinity + self.bias).detach().topk(c.top, -1).indices
        chosen = torch.zeros_like(affinity, dtype=torch.bool).scatter(-1, best, True)
        weight = affinity * chosen
        weight = ROUTED_SCALE * weight / weight.sum(-1, keepdim=True)
        h = h.to(dtype)
        y = linear(h, self.expert_gate_up.view(-1, c.hidden)).view(b, s, c.experts, 2, c.inter)
        y = swiglu(y[..., 0, :], y[..., 1, :]) * weight.unsqueeze(-1).to(dtype)
        routed = linear(y.reshape(b, s, -1), self.expert_down.permute(1, 0, 2).reshape(c.hidden, -1))
        shared = swiglu(linear(h, self.shared_gate_up[0]), linear(h, self.shared_gate_up[1]))
        return routed + linear(shared, self.shared_down), chosen


@dataclass(frozen=True)
class Output:
    """What the layers give: x float32 [B, S, hidden] and, one entry a sparse layer, losses, experts and selections."""

    x: Tensor
    losses: list[Tensor]
    experts: list[Tensor]
    selections: list[Tensor]


class Model(nn.Module):
    """The whole text model. `compile` makes its layers fast; results stay the same to rounding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.embed, self.head = _empty(c.vocab, c.hidden), _empty(c.vocab, c.hidden)
        self.norm = _zeros(c.hidden)
        self.layers = nn.ModuleList(Layer(c, sparse=i >= c.dense) for i in range(c.layers))
        # In float32, as transformers and the engine do: angles in float64 move logits by 1e-3 at 4,000 tokens.
        frequency = 1.0 / c.theta ** (torch.arange(0, c.rotary, 2, dtype=torch.float32) / c.rotary)
        angle = torch.arange(c.context, dtype=torch.float32)[:, None] * frequency[None]
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self._initialize()
        self._dense: Callable[..., Tensor] = Layer.forward_dense
        self._sparse: Callable[..., LayerResult] = Layer.forward_sparse
        self._loss: Callable[..., tuple[Tensor, Tensor]] = weighted_loss

    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            kind = name.split(".")[-1]
            if parameter.dim() < 2:
                continue
            std = 0.5 / parameter.shape[-1] ** 0.5
            if kind == "embed":
                std = 0.3
            elif kind in ("o_proj", "down", "expert_down", "shared_down"):
                std /= (2 * self.config.layers) ** 0.5  # each adds to the residual stream
            elif kind in INDEX_PARAMETERS:
                std *= 2
            nn.init.normal_(parameter, std=std)

    def compile_layers(self) -> None:
        """One graph for each kind of layer, shared by the layers, and one for the loss."""
        self._dense = torch.compile(Layer.forward_dense, dynamic=False, fullgraph=True)
        self._sparse = torch.compile(Layer.forward_sparse, dynamic=False, fullgraph=True)
        self._loss = torch.compile(weighted_loss, dynamic=False, fullgraph=True)

    def sparse_layers(self) -> list[Layer]:
        """In order."""
        return [layer for layer in self.layers if isinstance(layer, Layer) and layer.sparse]

    def body(self, ids: Tensor, run: Pass, *, plain: bool = False) -> Output:
        """Embeds ids int64 [B, S] and runs the layers. plain: never the compiled ones."""
        s = ids.shape[1]
        cos, sin = self.cos[:s], self.sin[:s]
        dense, sparse = (Layer.forward_dense, Layer.forward_sparse) if plain else (self._dense, self._sparse)
        x = self.embed[ids].float()
        results = []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            if layer.sparse:
                result = sparse(layer, x, cos, sin, run)
                results.append(result)
                x = result.x
            else:
                x = dense(layer, x, cos, sin, run.dtype)
        return Output(
            x,
            [r.loss for r in results if r.loss is not None],
            [r.experts for r in results if r.experts is not None],
            [r.selection for r in results if r.selection is not None],
        )

    def losses(self, ids: Tensor, targets: Tensor, weight: Tensor, run: Pass) -> tuple[Tensor, Tensor, Output]:
        """Loss to be minimized, mean cross-entropy of all targets (detached), and the layers' output.

        ids, targets int64 [B, S], weight float32 [B, S] of each target.
        """
        out = self.body(ids, run)
        loss, entropy = self._loss(out.x, self.norm, self.head, targets, weight, run.dtype)
        return loss + torch.stack(out.losses).sum(), entropy, out

    @torch.no_grad()
    def logits(self, ids: Tensor, run: Pass) -> tuple[Tensor, Output]:
        """float32 [B, S, vocab] and the layers' output."""
        out = self.body(ids, run, plain=True)
        return linear(rms_norm(out.x, self.norm).to(run.dtype), self.head).float(), out


def weighted_loss(
    x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weighted and plain mean cross-entropy of the next token."""
    logits = linear(rms_norm(x, norm).to(dtype), head).float()
    entropy = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
    entropy = entropy.view(targets.shape)
    return (entropy * weight).sum() / weight.sum(), entropy.detach().mean()


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


def _zeros(n: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(n))
