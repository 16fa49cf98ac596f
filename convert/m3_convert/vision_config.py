"""The vision half of a checkpoint's configuration: `vision_config` and the projector's fields of config.json, and
preprocessor_config.json; and the refusal of what a vision file cannot express.

Readers of the file have the tower's constants compiled in: the frequencies of its rotation, two frames to a patch, two
by two patches to a token, GELU. A checkpoint that says otherwise is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from m3_convert.config import Section, is_number, parse_config
from m3_convert.json_file import read_object
from m3_runtime.errors import InputError
from m3_runtime.limits import MAX_DIM, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS

CHANNELS: Final = 3  #: of a pixel: red, green, blue
FRAMES: Final = 2  #: of a patch; an image is taken twice
MERGE: Final = 2  #: patches on each side of the square that becomes one token
MIN_HEAD_DIM: Final = 6  #: one frequency for each of the three axes
MAX_PATCH: Final = 64
MAX_IMAGE: Final = 65536

# Fields that may be absent have these values in the reference implementation (transformers 5.24, `minimax_m3_vl`).
VISION_CONSTANTS: Final[Mapping[str, bool | int | float | str]] = {
    "num_channels": CHANNELS,
    "hidden_act": "gelu",
    "position_embedding_type": "rope",
    "rope_mode": "3d",
    "rope_theta": 10000.0,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}
COMPRESSION_CONSTANTS: Final[Mapping[str, bool | int | float | str]] = {
    "image_token_compression_method": "patch_merge",
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}
ROOT_CONSTANTS: Final[Mapping[str, bool | int | float | str]] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
PREPROCESSOR_CONSTANTS: Final[Mapping[str, bool | int | float | str]] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "temporal_patch_size": FRAMES,
    "merge_size": MERGE,
    "resample": 3,  # bicubic
}


@dataclass(frozen=True)
class VisionConfig:
    """Dimensions of the vision half; widths in elements, sizes in pixels."""

    n_layer: int
    hidden: int
    heads: int
    ff: int
    patch: int
    image: int  #: the side that the tower was trained with; nothing depends on it
    eps: float  #: of the LayerNorms
    projector: int  #: width inside projector and merger
    text_hidden: int  #: of the text model, and of the tokens that come out
    mean: tuple[float, ...]  #: of each channel, pixels being from 0 to 1
    std: tuple[float, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def axis_frequencies(self) -> int:
        """Frequencies of each of the axes time, height and width; two channels of a head turn with each."""
        return self.head_dim // 3 // 2


def load_vision_config(folder: Path) -> VisionConfig:
    """Reads both files. Raises InputError that names the file and the field, what was expected and what was found."""
    path = folder / "config.json"
    config = read_object(path)
    text = parse_config(config, str(path))
    root = Section(config, str(path))
    section = root.values.get("vision_config")
    if not isinstance(section, dict):
        raise root.refuse("vision_config", "an object (a model without a vision part has no vision file)", section)
    vision = Section(section, f"{path}: vision_config")
    root.check_constants(ROOT_CONSTANTS)
    vision.check_constants(VISION_CONSTANTS)
    _check_rope(vision)
    for owner in (root, vision):
        _check_compression(owner)
    heads, hidden = vision.integer("num_attention_heads", 1, MAX_HEADS), vision.integer("hidden_size", 1, MAX_DIM)
    if hidden % heads or not MIN_HEAD_DIM <= hidden // heads <= MAX_HEAD_DIM or hidden // heads % 2:
        expected = f"{heads} heads of an even number of channels from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        raise vision.refuse("hidden_size", expected, hidden)
    patch = vision.integer("patch_size", 1, MAX_PATCH)
    mean, std = _pixels(folder / "preprocessor_config.json", patch)
    return VisionConfig(
        n_layer=vision.integer("num_hidden_layers", 1, MAX_LAYERS),
        hidden=hidden,
        heads=heads,
        ff=vision.integer("intermediate_size", 1, MAX_DIM),
        patch=patch,
        image=vision.integer("image_size", 1, MAX_IMAGE),
        eps=vision.positive("layer_norm_eps"),
        projector=root.integer("projector_hidden_size", 1, MAX_DIM),
        text_hidden=text.hidden,
        mean=mean,
        std=std,
    )


def _check_rope(vision: Section) -> None:
    rope = vision.values.get("rope_parameters")
    if rope is None:
        return
    theta = VISION_CONSTANTS["rope_theta"]
    if (
        not isinstance(rope, dict)
        or rope.get("rope_type", "axial") != "axial"
        or rope.get("rope_theta", theta) != theta
    ):
        raise vision.refuse("rope_parameters", f"rope_type axial with rope_theta {theta:g}", rope)


def _check_compression(owner: Section) -> None:
    key = "img_token_compression_config"
    values = owner.values.get(key)
    if values is None:
        return
    if not isinstance(values, dict):
        raise owner.refuse(key, "an object", values)
    Section(values, f"{owner.name}: {key}").check_constants(COMPRESSION_CONSTANTS)


def _pixels(path: Path, patch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not path.exists():
        raise InputError(f"{path}: is missing, expected image_mean and image_std")
    section = Section(read_object(path), str(path))
    section.check_constants({**PREPROCESSOR_CONSTANTS, "patch_size": patch})
    return _three(section, "image_mean", allow_zero=True), _three(section, "image_std", allow_zero=False)


def _three(section: Section, key: str, *, allow_zero: bool) -> tuple[float, ...]:
    value: Any = section.values.get(key)
    least = "from 0" if allow_zero else "above 0"
    expected = f"{CHANNELS} numbers {least} to 1, one for each channel"
    if not isinstance(value, list) or len(value) != CHANNELS:
        raise section.refuse(key, expected, value)
    # A deviation near 0 would make numbers that float32 does not hold.
    low = 0.0 if allow_zero else 2.0**-16
    if not all(is_number(v) and low <= v <= 1 for v in value):
        raise section.refuse(key, expected, value)
    return tuple(float(v) for v in value)
