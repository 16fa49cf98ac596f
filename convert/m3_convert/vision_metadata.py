"""The metadata keys of the vision file: those that llama.cpp's converter writes for "minimax_m3", in its order.

Not in the file, since its readers have them compiled in: the frequencies of the rotation and the limits of image sizes.
"""

from types import MappingProxyType
from typing import Final

import gguf
from gguf import GGUFWriter

from m3_convert.checkpoint import Checkpoint
from m3_convert.metadata import Metadata, add_general, check_values
from m3_convert.plan import Plan
from m3_convert.vision_config import MERGE, VisionConfig

ARCHITECTURE: Final = "clip"
PROJECTOR: Final = "minimax_m3"


def vision_metadata(plan: Plan, checkpoint: Checkpoint, config: VisionConfig) -> Metadata:
    """All keys of the vision file of a checkpoint. Raises InputError for values that GGUF cannot hold."""
    writer = GGUFWriter(None, ARCHITECTURE)
    writer.add_type(gguf.GGUFType.MMPROJ)
    add_general(writer, plan, checkpoint)
    writer.add_file_type(plan.file_type)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.text_hidden)
    writer.add_vision_image_size(config.image)
    writer.add_vision_patch_size(config.patch)
    writer.add_vision_embedding_length(config.hidden)
    writer.add_vision_feed_forward_length(config.ff)
    writer.add_vision_block_count(config.n_layer)
    writer.add_vision_head_count(config.heads)
    writer.add_vision_image_mean(config.mean)
    writer.add_vision_image_std(config.std)
    writer.add_clip_projector_type(PROJECTOR)
    writer.add_vision_use_gelu(True)
    writer.add_vision_attention_layernorm_eps(config.eps)
    writer.add_vision_spatial_merge_size(MERGE)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    (metadata,) = writer.kv_data
    check_values(metadata)
    return MappingProxyType(metadata)
