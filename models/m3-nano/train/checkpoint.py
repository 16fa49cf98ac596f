"""Weights in files: float32 while they are trained, BF16 in the layout of the release when they are published.

    python checkpoint.py MASTER_DIR DATA_DIR OUT_DIR

turns the first into the second. A master folder holds master.json and up to five safetensors files; master.json names
them and is replaced last, so that a folder is whole at every moment. A release folder is what MiniMaxAI/MiniMax-M3
looks like, its vision part small and untrained; in its train/, for the evaluation, the index projections as they were
before rounding to BF16, and the held-out text.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import checkpoint_tensors as release
from checkpoint_tensors import TEXT_PREFIX, make_tensors, write_json
from make_checkpoint import SPECIAL_TOKENS, CheckpointParts, CheckpointSpec, Sampling, make_config, write_checkpoint
from model import Model, ModelConfig
from rows import HELD_OUT
from vocabulary import write_ids

TEMPLATE = Path(__file__).resolve().parent.parent / "chat_template.jinja"
INDEX_MASTER = Path("train", "index_projections_f32.safetensors")  #: in a release folder
FILE_BYTES = 15_000_000  #: limit of a file of a master folder
MAX_FILES = 5
SAMPLING = Sampling(temperature=0.3, top_p=0.9, top_k=40)  #: a very small model is sure of little

State = dict[str, Tensor]  #: of a model, by the names of its `state_dict`


# ---------------------------------------------------------------------------------------------- master


def save_master(folder: Path, model: Model, meta: Mapping[str, Any]) -> None:
    """Writes the float32 weights, the configuration and `meta`, which JSON must hold, into `folder`.

    Until it is done, and if it fails, the folder keeps what it held before. Raises ValueError for weights that
    MAX_FILES files of FILE_BYTES cannot hold, or that are not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in model.state_dict().items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite; {folder} keeps the weights of the last save")
    for left in folder.glob(".tmp*"):  # of a save that was killed
        left.unlink()
    state = {name: value.detach().float().cpu().contiguous() for name, value in model.state_dict().items()}
    path = folder / "master.json"
    old = _read_json(path)["files"] if path.exists() else []
    series = "b" if any(name.startswith("weights-a") for name in old) else "a"
    groups = _split(state)
    names = [f"weights-{series}-{i}-of-{len(groups)}.safetensors" for i in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        _save(group, folder / name)
    part = folder / "master.json.part"
    write_json(part, {"config": dataclasses.asdict(model.config), "files": names, "meta": dict(meta)})
    part.replace(path)
    for stale in folder.glob("weights-*.safetensors"):
        if stale.name not in names:
            stale.unlink()


def load_master(folder: Path, device: str) -> tuple[Model, dict[str, Any]]:
    """The model of a master folder, and its `meta`."""
    master = _read_json(folder / "master.json")
    state: State = {}
    for name in master["files"]:
        state |= load_file(folder / name)
    return _model(ModelConfig(**master["config"]), state, device), master["meta"]


def _save(state: State, path: Path) -> None:
    save_file(state, path)
    path.chmod(0o644)  # the library leaves it to its owner alone


def _split(state: State) -> list[State]:
    """Into as few files as hold it, of about equal size."""
    sizes = {name: 4 * value.numel() for name, value in state.items()}
    for count in range(1, MAX_FILES + 1):
        groups: list[State] = [{} for _ in range(count)]
        filled = [0] * count
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            least = filled.index(min(filled))
            groups[least][name] = state[name]
            filled[least] += sizes[name]
        if max(filled) < FILE_BYTES - 20_000:  # the file's header
            return groups
    raise ValueError(f"{sum(sizes.values())} bytes of weights, expected at most {MAX_FILES} files of {FILE_BYTES}")


def _model(config: ModelConfig, state: State, device: str) -> Model:
    model = Model(config)
    model.load_state_dict(state)
    return model.to(device)


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


# ---------------------------------------------------------------------------------------------- names


@dataclass(frozen=True)
class Place:
    """Where a tensor of the release lies in the model: a name of its `state_dict` and leading indices."""

    name: str
    index: tuple[int, ...] = ()

    def of(self, state: State) -> Tensor:
        """A view."""
        return state[self.name][self.index]


def places(config: ModelConfig) -> dict[str, Place]:
    """All text tensors of the release, by their names there.

    Norms are the same numbers: both models multiply by 1 + w.
    """
    found = {
        f"{TEXT_PREFIX}lm_head.weight": Place("head"),
        f"{TEXT_PREFIX}model.embed_tokens.weight": Place("embed"),
        f"{TEXT_PREFIX}model.norm.weight": Place("norm"),
    }
    for i in range(config.layers):
        for name, place in _layer_places(config, sparse=i >= config.dense):
            found[f"{TEXT_PREFIX}model.layers.{i}.{name}"] = dataclasses.replace(place, name=f"layers.{i}.{place.name}")
    return found


def _layer_places(config: ModelConfig, *, sparse: bool) -> Iterator[tuple[str, Place]]:
    yield "input_layernorm.weight", Place("input_norm")
    yield "post_attention_layernorm.weight", Place("post_norm")
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        yield f"self_attn.{part}.weight", Place(part)
    if not sparse:
        yield "mlp.gate_proj.weight", Place("gate_up", (0,))
        yield "mlp.up_proj.weight", Place("gate_up", (1,))
        yield "mlp.down_proj.weight", Place("down")
        return
    for part in ("index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm"):
        yield f"self_attn.{part}.weight", Place(part)
    yield "block_sparse_moe.gate.weight", Place("router")
    yield "block_sparse_moe.e_score_correction_bias", Place("bias")
    for e in range(config.experts):
        yield f"block_sparse_moe.experts.{e}.w1.weight", Place("expert_gate_up", (e, 0))
        yield f"block_sparse_moe.experts.{e}.w2.weight", Place("expert_down", (e,))
        yield f"block_sparse_moe.experts.{e}.w3.weight", Place("expert_gate_up", (e, 1))
    yield "block_sparse_moe.shared_experts.gate_proj.weight", Place("shared_gate_up", (0,))
    yield "block_sparse_moe.shared_experts.up_proj.weight", Place("shared_gate_up", (1,))
    yield "block_sparse_moe.shared_experts.down_proj.weight", Place("shared_down")


# ---------------------------------------------------------------------------------------------- release


def spec_of(config: ModelConfig) -> CheckpointSpec:
    """The release layout of these dimensions, with the smallest vision part."""
    return CheckpointSpec(
        layers=config.layers,
        dense=config.dense,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rotary=config.rotary,
        index_dim=config.index_dim,
        experts=config.experts,
        top=config.top,
        inter=config.inter,
        shared_inter=config.inter,
        dense_inter=config.dense_inter,
        vocab=config.vocab,
        block=config.block,
        top_k=config.top_k,
        context=config.context,
        theta=config.theta,
        vit_hidden=80,
        vit_layers=2,
        shard_mb=8.0,
    )


def export(model: Model, data_dir: Path, out: Path, sampling: Sampling = SAMPLING) -> None:
    """Writes the release layout into `out`; files there that are none of it stay.

    data_dir: has tokenizer.json and heldout.npy, which goes into train/ for the evaluation. Raises ValueError, before
    anything is written, if a tensor would have another name, shape or type than the release's, if the tokenizer is not
    one of this vocabulary, or if `out` is a master folder, whose weights would be lost.
    """
    if (out / "master.json").exists():
        raise ValueError(f"{out}: holds the float32 weights of a training; export into another folder")
    spec = spec_of(model.config)
    check_tokenizer(data_dir, model.config)
    state = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
    tensors = make_tensors(spec)  # the vision part stays as it is here
    where = places(model.config)
    different = {name for name in tensors if name.startswith(TEXT_PREFIX)} ^ set(where)
    if different:
        raise ValueError(f"{min(different)} is in the model or in the release's layout, not in both")
    for name, place in where.items():
        ours, theirs = _stored(place.of(state), tensors[name].dtype), tensors[name]
        if ours.shape != theirs.shape or len(ours.data) != len(theirs.data):
            raise ValueError(f"{name}: shape {ours.shape}, expected {theirs.shape}")
        tensors[name] = ours
    tokenizer = (data_dir / "tokenizer.json").read_text(encoding="utf-8")
    parts = CheckpointParts(tokenizer, tensors, TEMPLATE.read_text(encoding="utf-8"), sampling)
    write_checkpoint(out, spec, parts)
    (out / INDEX_MASTER).parent.mkdir(exist_ok=True)
    write_ids(out / HELD_OUT, np.load(data_dir / "heldout.npy"))
    _save({name: value for name, value in state.items() if is_index_projection(name)}, out / INDEX_MASTER)


def tokenizer_sha256(folder: Path) -> str:
    """Of the tokenizer.json in a folder: weights belong to one tokenizer."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def check_tokenizer(folder: Path, config: ModelConfig) -> None:
    """Raises ValueError if the named tokens of a folder's tokenizer do not stand at the top of the vocabulary."""
    added = {token["content"]: token["id"] for token in _read_json(folder / "tokenizer.json")["added_tokens"]}
    first = spec_of(config).first_special
    for i, token in enumerate(SPECIAL_TOKENS):
        if added.get(token) != first + i:
            raise ValueError(f"{folder}: the tokenizer has {token} at {added.get(token)}, expected {first + i}")


def _stored(value: Tensor, dtype: str) -> release.Tensor:
    """Raises ValueError for values that are not finite."""
    if not bool(value.isfinite().all()):
        raise ValueError(f"a tensor of shape {tuple(value.shape)} has values that are not finite")
    stored = value.contiguous().to({"F32": torch.float32, "BF16": torch.bfloat16}[dtype])
    return release.Tensor(dtype, tuple(stored.shape), stored.reshape(-1).view(torch.uint8).numpy().tobytes())


def load_release(folder: Path, device: str) -> Model:
    """The text model of a release folder in float32.

    Raises ValueError if config.json has another value than `export` writes, or tensors are missing or too many.
    """
    config = read_config(folder)
    index = _read_json(folder / "model.safetensors.index.json")["weight_map"]
    where = places(config)
    different = {name for name in index if name.startswith(TEXT_PREFIX)} ^ set(where)
    if different:
        raise ValueError(f"{folder}: tensor {min(different)} is missing or not one of the model's")
    model = Model(config)
    state = model.state_dict()
    missing = set(where)
    for shard in sorted(set(index.values())):
        with _open_shard(folder / shard) as file:
            for name in set(file.keys()) & set(where):
                missing.discard(name)
                target, value = where[name].of(state), file.get_tensor(name)
                if target.shape != value.shape:
                    raise ValueError(f"{folder}: {name} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
                target.copy_(value)
    if missing:
        raise ValueError(f"{folder}: {min(missing)} is in the index and in no shard")
    return model.to(device)


def _open_shard(path: Path) -> Any:
    """Raises ValueError with the name of a file that is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_config(folder: Path) -> ModelConfig:
    """The dimensions in a release folder's config.json. ValueError for a value that the training code does not have."""
    text = _read_json(folder / "config.json")["text_config"]
    sparse = text["sparse_attention_config"]
    config = ModelConfig(
        hidden=text["hidden_size"],
        layers=text["num_hidden_layers"],
        dense=text["moe_layer_freq"].count(0),
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        rotary=text["rotary_dim"],
        index_dim=sparse["sparse_index_dim"],
        block=sparse["sparse_block_size"],
        top_k=sparse["sparse_topk_blocks"],
        experts=text["num_local_experts"],
        top=text["num_experts_per_tok"],
        inter=text["intermediate_size"],
        dense_inter=text["dense_intermediate_size"],
        vocab=text["vocab_size"],
        context=text["max_position_embeddings"],
        theta=float(text["rope_theta"]),
    )
    expected = make_config(spec_of(config))["text_config"]
    for key in sorted(set(expected) | set(text)):
        if text.get(key) != expected.get(key):
            raise ValueError(f"{folder}: config.json has {key} {text.get(key)}, expected {expected.get(key)}")
    return config


# ---------------------------------------------------------------------------------------------- index master


def is_index_projection(name: str) -> bool:
    """Whether a name of `state_dict` is a matrix of an index branch."""
    return name.endswith((".index_q_proj", ".index_k_proj"))


def load_index_projections(folder: Path) -> State:
    """The float32 index projections of a release folder, by their names in `state_dict`."""
    return load_file(folder / INDEX_MASTER)


def main() -> None:
    """Parses the command line and exports."""
    parser = argparse.ArgumentParser(description="Writes trained weights in the layout of the release.")
    parser.add_argument("master", type=Path, metavar="MASTER_DIR", help="folder that train.py wrote")
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="folder with the tokenizer.json")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    options = parser.parse_args()
    try:
        model, meta = load_master(options.master, "cpu")
        if meta.get("tokenizer_sha256") not in (None, tokenizer_sha256(options.data)):
            raise ValueError(f"{options.data}: has another tokenizer than the weights were trained with")
        export(model, options.data, options.out)
    except (OSError, ValueError, SafetensorError) as error:
        sys.exit(f"checkpoint: {error}")
    load_release(options.out, "cpu")
    files = sorted(options.out.glob("*.safetensors"))
    print(f"{options.out}: {len(files)} shards, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
