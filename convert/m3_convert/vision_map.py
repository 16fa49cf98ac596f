"""The tensors of the vision file: names, shapes, and the source tensors they are made from. The order is that of the
file.

Two of them are not copies:
- The convolution of the patch embedding covers two frames; the file holds a two-dimensional one for each.
- Channels of query and key heads change places. The checkpoint turns channel i with i + 3 f, f being the number of
  frequencies of an axis: time, height, width, then the partners in the same order. The file has each axis with its
  partners: time, time, height, height, width, width; what does not turn stays at the end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from m3_convert.checkpoint import Checkpoint, listed
from m3_convert.tensor_map import VISION_PREFIXES, MappedTensor, SourceMatrix, TensorSpec, check_sources
from m3_convert.vision_config import CHANNELS, FRAMES, MERGE, VisionConfig
from m3_runtime.errors import InputError

TOWER = "vision_tower.vision_model."
DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class VisionTensor:
    """One tensor of the file, and how its values lie in its source."""

    spec: TensorSpec
    source_shape: tuple[int, ...]
    row_order: tuple[int, ...] = ()  #: see `SourceMatrix`
    column_order: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        return self.spec.sources[0]


def head_order(config: VisionConfig) -> tuple[int, ...]:
    """Source channel of each channel of q and k in the file, [hidden]."""
    f, dim = config.axis_frequencies, config.head_dim
    turned = [half * 3 * f + axis * f + i for axis in range(3) for half in range(2) for i in range(f)]
    head = [*turned, *range(6 * f, dim)]
    return tuple(h * dim + channel for h in range(config.heads) for channel in head)


def vision_tensors(config: VisionConfig) -> list[VisionTensor]:
    """All tensors of a vision file in file order."""
    text, inner = config.text_hidden, config.projector
    tensors = [
        *_linear("mm.1", "multi_modal_projector.linear_1", inner, config.hidden),
        *_linear("mm.2", "multi_modal_projector.linear_2", text, inner),
        *_linear("mm.merger.fc1", "patch_merge_mlp.linear_1", inner, text * MERGE * MERGE),
        *_linear("mm.merger.fc2", "patch_merge_mlp.linear_2", text, inner),
        *(_patch_embedding(config, frame) for frame in range(FRAMES)),
    ]
    for layer in range(config.n_layer):
        tensors += _layer(config, layer)
    tensors += _norm("v.pre_ln", f"{TOWER}pre_layrnorm", config.hidden)  # the release spells it so
    return tensors


def map_vision(checkpoint: Checkpoint, config: VisionConfig) -> list[MappedTensor]:
    """Finds the sources of every tensor, in file order.

    Raises InputError, naming up to five and the total, for tensors of the vision part that are missing, extra, of
    another shape or dtype. Those of the text part are not looked at.
    """
    tensors = vision_tensors(config)
    wanted = {tensor.source: tensor.source_shape for tensor in tensors}
    _check(checkpoint, wanted)
    return [
        MappedTensor(t.spec, (SourceMatrix(checkpoint.tensors[t.source], None, t.row_order, t.column_order),))
        for t in tensors
    ]


def _check(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> None:
    found, path = checkpoint.tensors, checkpoint.path
    if not any(name.startswith(VISION_PREFIXES) for name in found):
        raise InputError(f"{path}: expected a vision part ({', '.join(VISION_PREFIXES)}), found text tensors only")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise InputError(f"{path}: {len(missing)} vision tensors missing: {listed(missing)}")
    extra = [name for name in found if name.startswith(VISION_PREFIXES) and name not in wanted]
    if extra:
        raise InputError(
            f"{path}: {len(extra)} vision tensors that a model of this config does not have: {listed(extra)}"
        )
    check_sources(checkpoint, wanted, DTYPES, "vision ")


def _patch_embedding(config: VisionConfig, frame: int) -> VisionTensor:
    """The part of the convolution that sees one frame. Source [hidden, channel, frame, row, column]."""
    area = config.patch * config.patch
    name = "v.patch_embd.weight" + (f".{frame}" if frame else "")
    spec = TensorSpec(
        name,
        (config.hidden, CHANNELS, config.patch, config.patch),
        (f"{TOWER}embeddings.patch_embedding.weight",),
    )
    columns = (range((c * FRAMES + frame) * area, (c * FRAMES + frame + 1) * area) for c in range(CHANNELS))
    return VisionTensor(
        spec,
        (config.hidden, CHANNELS, FRAMES, config.patch, config.patch),
        column_order=tuple(column for channel in columns for column in channel),
    )


def _layer(config: VisionConfig, layer: int) -> Iterator[VisionTensor]:
    to, source, width = f"v.blk.{layer}.", f"{TOWER}encoder.layers.{layer}.", config.hidden
    yield from _norm(f"{to}ln1", f"{source}layer_norm1", width)
    yield from _norm(f"{to}ln2", f"{source}layer_norm2", width)
    yield from _linear(f"{to}ffn_up", f"{source}mlp.fc1", config.ff, width)
    yield from _linear(f"{to}ffn_down", f"{source}mlp.fc2", width, config.ff)
    order = head_order(config)
    yield from _linear(f"{to}attn_k", f"{source}self_attn.k_proj", width, width, order)
    yield from _linear(f"{to}attn_out", f"{source}self_attn.out_proj", width, width)
    yield from _linear(f"{to}attn_q", f"{source}self_attn.q_proj", width, width, order)
    yield from _linear(f"{to}attn_v", f"{source}self_attn.v_proj", width, width)


def _norm(name: str, source: str, width: int) -> Iterator[VisionTensor]:
    """LayerNorms are multiplied by w, where the norms of the text model are by 1 + w."""
    for part in ("bias", "weight"):
        yield VisionTensor(TensorSpec(f"{name}.{part}", (width,), (f"{source}.{part}",)), (width,))


def _linear(name: str, source: str, rows: int, columns: int, order: tuple[int, ...] = ()) -> Iterator[VisionTensor]:
    yield VisionTensor(TensorSpec(f"{name}.bias", (rows,), (f"{source}.bias",)), (rows,), column_order=order)
    shape = (rows, columns)
    yield VisionTensor(TensorSpec(f"{name}.weight", shape, (f"{source}.weight",)), shape, row_order=order)
