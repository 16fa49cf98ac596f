"""GGUF files that are broken on purpose, built byte by byte.

`small_file` and `model_file` build two good files, a header with two tensors and a whole (tiny, random) M3 model;
`file_cases` and `model_cases` are what is wrong with copies of them. A case of the first list is no valid GGUF file; a
case of the second is one that holds no model that can be run.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from make_checkpoint import SPECIAL_TOKENS, TOP_IDS, VISIBLE_TOKENS

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

TYPE_F32, TYPE_F16, TYPE_Q8_0, TYPE_Q4_K, TYPE_Q8_K, TYPE_BF16, TYPE_MXFP4 = 0, 1, 8, 12, 15, 30, 39


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A string as GGUF stores it; `length` replaces the true one."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


@dataclass(frozen=True)
class Key:
    """A key with one value or an array; `raw` replaces type and value."""

    name: str | bytes
    type: int = U32
    value: Any = 0
    raw: bytes | None = None
    name_length: int | None = None

    def pack(self) -> bytes:
        head = text(self.name, self.name_length)
        if self.raw is not None:
            return head + self.raw
        if isinstance(self.value, list):
            return head + array(self.type, self.value)
        return head + struct.pack("<I", self.type) + _pack(self.type, self.value)


def _pack(type_: int, value: Any) -> bytes:
    return text(value) if type_ == STRING else struct.pack("<" + _FORMATS[type_], value)


def array(type_: int, values: Sequence[Any], count: int | None = None) -> bytes:
    """Type and value of an array; `count` replaces the true length."""
    head = struct.pack("<IIQ", ARRAY, type_, len(values) if count is None else count)
    return head + b"".join(_pack(type_, value) for value in values)


@dataclass(frozen=True)
class Tensor:
    """An entry of the tensor list; `offset` None places it after the ones before it."""

    name: str | bytes
    ne: tuple[int, ...]  #: GGUF order, ne[0] contiguous
    type: int = TYPE_F32
    offset: int | None = None
    n_dims: int | None = None
    name_length: int | None = None
    data: bytes = b""


@dataclass(frozen=True)
class GGUFFile:
    """All of a file, with every field that a writer would fill in open to be wrong."""

    keys: tuple[Key, ...]
    tensors: tuple[Tensor, ...]
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = 32

    def pack(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = bytearray(self.magic + self.version + struct.pack("<QQ", n_tensors, n_keys))
        for key in self.keys:
            out += key.pack()
        blob = bytearray()
        for tensor in self.tensors:
            blob += bytes(-len(blob) % self.alignment)
            offset = len(blob) if tensor.offset is None else tensor.offset
            out += text(tensor.name, tensor.name_length)
            out += struct.pack("<I", len(tensor.ne) if tensor.n_dims is None else tensor.n_dims)
            out += struct.pack(f"<{len(tensor.ne)}Q", *tensor.ne)
            out += struct.pack("<IQ", tensor.type, offset)
            blob += tensor.data
        return bytes(out + bytes(-len(out) % self.alignment) + blob)

    def with_keys(self, *keys: Key) -> "GGUFFile":
        """With these in place of keys of the same name, or at the end."""
        new = {key.name: key for key in keys}
        kept = tuple(new.pop(key.name, key) for key in self.keys)
        return replace(self, keys=kept + tuple(new.values()))

    def without_keys(self, *names: str) -> "GGUFFile":
        return replace(self, keys=tuple(key for key in self.keys if key.name not in names))

    def with_tensor(self, which: str, /, **changes: Any) -> "GGUFFile":
        tensors = tuple(replace(t, **changes) if t.name == which else t for t in self.tensors)
        return replace(self, tensors=tensors)


def _values(name: str, ne: tuple[int, ...]) -> bytes:
    """Random float32; norms around 1."""
    numbers = np.random.default_rng(len(name)).standard_normal(int(np.prod(ne)), dtype=np.float32)
    return (1 + 0.1 * numbers if "norm" in name else 0.2 * numbers).astype("<f4").tobytes()


def _tensor(name: str, *ne: int) -> Tensor:
    return Tensor(name, ne, data=_values(name, ne))


# ---------------------------------------------------------------------------------------------- good files


def small_file() -> GGUFFile:
    """A header with four keys and two tensors, 300 odd bytes; valid, but no model."""
    return GGUFFile(
        keys=(
            Key("general.architecture", STRING, "minimax-m3"),
            Key("general.alignment", U32, 32),
            Key("some.numbers", F32, [1.0, 2.0, 3.0]),
            Key("some.words", STRING, ["one", "two"]),
        ),
        tensors=(_tensor("first.weight", 4, 2), _tensor("second.weight", 3)),
    )


EMBD, HEADS, HEAD_DIM, N_FF, N_FF_EXPERT, EXPERTS, LAYERS = 32, 2, 16, 64, 32, 2, 2
VOCAB = 256 + TOP_IDS
ARCH = "minimax-m3."


def _tokenizer_keys() -> tuple[Key, ...]:
    special = [*SPECIAL_TOKENS, *(f"[PAD{i}]" for i in range(256 + len(SPECIAL_TOKENS), VOCAB))]
    kinds = [5 if t.startswith("[PAD") else 4 if t in VISIBLE_TOKENS else 3 for t in special]
    return (
        Key("tokenizer.ggml.model", STRING, "gpt2"),
        Key("tokenizer.ggml.pre", STRING, "minimax-m2"),
        Key("tokenizer.ggml.tokens", STRING, [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]),
        Key("tokenizer.ggml.token_type", I32, [1] * 256 + kinds),
        Key("tokenizer.ggml.merges", STRING, []),
        Key("tokenizer.ggml.bos_token_id", U32, 256 + SPECIAL_TOKENS.index("]~!b[")),
        Key("tokenizer.ggml.eos_token_id", U32, 256 + SPECIAL_TOKENS.index("[e~[")),
        Key("tokenizer.ggml.unknown_token_id", U32, 256 + SPECIAL_TOKENS.index("]!d~[")),
        Key("tokenizer.chat_template", STRING, "{% for m in messages %}{{ m.content }}{% endfor %}"),
    )


def _layer_tensors(i: int) -> Iterator[Tensor]:
    width = HEADS * HEAD_DIM
    yield _tensor(f"blk.{i}.attn_norm.weight", EMBD)
    yield _tensor(f"blk.{i}.ffn_norm.weight", EMBD)
    yield _tensor(f"blk.{i}.attn_q.weight", EMBD, width)
    yield _tensor(f"blk.{i}.attn_k.weight", EMBD, width)
    yield _tensor(f"blk.{i}.attn_v.weight", EMBD, width)
    yield _tensor(f"blk.{i}.attn_output.weight", width, EMBD)
    yield _tensor(f"blk.{i}.attn_q_norm.weight", HEAD_DIM)
    yield _tensor(f"blk.{i}.attn_k_norm.weight", HEAD_DIM)
    if i == 0:
        yield _tensor(f"blk.{i}.ffn_gate.weight", EMBD, N_FF)
        yield _tensor(f"blk.{i}.ffn_up.weight", EMBD, N_FF)
        yield _tensor(f"blk.{i}.ffn_down.weight", N_FF, EMBD)
        return
    yield _tensor(f"blk.{i}.indexer.q_proj.weight", EMBD, width)
    yield _tensor(f"blk.{i}.indexer.k_proj.weight", EMBD, HEAD_DIM)
    yield _tensor(f"blk.{i}.indexer.q_norm.weight", HEAD_DIM)
    yield _tensor(f"blk.{i}.indexer.k_norm.weight", HEAD_DIM)
    yield _tensor(f"blk.{i}.ffn_gate_inp.weight", EMBD, EXPERTS)
    yield _tensor(f"blk.{i}.exp_probs_b.bias", EXPERTS)
    yield _tensor(f"blk.{i}.ffn_gate_exps.weight", EMBD, N_FF_EXPERT, EXPERTS)
    yield _tensor(f"blk.{i}.ffn_up_exps.weight", EMBD, N_FF_EXPERT, EXPERTS)
    yield _tensor(f"blk.{i}.ffn_down_exps.weight", N_FF_EXPERT, EMBD, EXPERTS)
    yield _tensor(f"blk.{i}.ffn_gate_shexp.weight", EMBD, N_FF_EXPERT)
    yield _tensor(f"blk.{i}.ffn_up_shexp.weight", EMBD, N_FF_EXPERT)
    yield _tensor(f"blk.{i}.ffn_down_shexp.weight", N_FF_EXPERT, EMBD)


def model_file() -> GGUFFile:
    """A whole model: one dense and one sparse layer, a byte tokenizer, random weights."""
    numbers = {
        "block_count": LAYERS,
        "context_length": 4096,
        "embedding_length": EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "expert_count": EXPERTS,
        "expert_used_count": 1,
        "expert_gating_func": 2,
        "expert_feed_forward_length": N_FF_EXPERT,
        "expert_shared_count": 1,
        "rope.dimension_count": 8,
        "leading_dense_block_count": 1,
        "attention.indexer.head_count": HEADS,
        "attention.indexer.key_length": HEAD_DIM,
        "attention.indexer.top_k": 2,
        "attention.indexer.block_size": 16,
        "attention.indexer.local_blocks": 1,
    }
    reals = {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-6, "expert_weights_scale": 2.0}
    layers = [tensor for i in range(LAYERS) for tensor in _layer_tensors(i)]
    return GGUFFile(
        keys=(
            Key("general.architecture", STRING, "minimax-m3"),
            Key("general.type", STRING, "model"),
            Key("general.file_type", U32, 0),
            *(Key(ARCH + name, U32, value) for name, value in numbers.items()),
            *(Key(ARCH + name, F32, value) for name, value in reals.items()),
            Key(ARCH + "expert_weights_norm", BOOL, True),
            *_tokenizer_keys(),
        ),
        tensors=(
            _tensor("output.weight", EMBD, VOCAB),
            _tensor("token_embd.weight", EMBD, VOCAB),
            *layers,
            _tensor("output_norm.weight", EMBD),
        ),
    )


REQUIRED_KEYS = tuple(str(key.name) for key in model_file().keys if str(key.name).startswith(ARCH))
REQUIRED_TENSORS = tuple(str(tensor.name) for tensor in model_file().tensors)


# ---------------------------------------------------------------------------------------------- bad files


@dataclass(frozen=True)
class Case:
    """A broken file, and a pattern for what its one-line error must say besides the file's name."""

    name: str
    content: bytes | GGUFFile = field(repr=False)
    expected: str

    def pack(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.pack()


def file_cases() -> list[Case]:
    """Files that are not valid GGUF."""
    small = small_file()
    first, second = small.tensors
    unaligned = small.without_keys("general.alignment")
    good = small.pack()
    big_endian = replace(small, version=struct.pack(">I", 3))

    def key(name: str, expected: str, *extra: Key) -> Case:
        return Case(name, replace(small, keys=(*unaligned.keys, *extra)), expected)

    def tensor(case: str, expected: str, /, **changes: Any) -> Case:
        return Case(case, replace(small, tensors=(first, replace(second, **changes))), expected)

    def count(name: str, **changes: Any) -> Case:
        return Case(name, replace(small, **changes), "keys|tensor")

    return [
        Case("empty", b"", "truncated|empty|0 bytes"),
        Case("only the magic", b"GGUF", "truncated|4 bytes"),
        Case("wrong magic", b"GGML" + good[4:], "not a GGUF file"),
        Case("zip file", b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        Case("big endian", big_endian, "version.*endian|endian"),
        Case("version 1", replace(small, version=struct.pack("<I", 1)), "version 1"),
        Case("version 2", replace(small, version=struct.pack("<I", 2)), "version 2"),
        Case("version 4", replace(small, version=struct.pack("<I", 4)), "version 4"),
        count("2^63 keys", n_keys=2**63),
        count("2^64-1 keys", n_keys=2**64 - 1),
        count("2^31 keys", n_keys=2**31),
        count("one key too many", n_keys=len(small.keys) + 1),
        count("2^63 tensors", n_tensors=2**63),
        count("2^64-1 tensors", n_tensors=2**64 - 1),
        count("one tensor too many", n_tensors=3),
        key("alignment 0", "general.alignment", Key("general.alignment", U32, 0)),
        key("alignment 24", "general.alignment", Key("general.alignment", U32, 24)),
        key("alignment 2^30", "general.alignment", Key("general.alignment", U32, 2**30)),
        key("alignment 2^31", "general.alignment", Key("general.alignment", U32, 2**31)),
        key("alignment of type string", "general.alignment", Key("general.alignment", STRING, "32")),
        key("alignment of type u64", "general.alignment", Key("general.alignment", U64, 32)),
        key("alignment array", "general.alignment", Key("general.alignment", U32, [32])),
        key("key length 2^63", "key", Key("broken", name_length=2**63)),
        key("key length past the end", "key", Key("broken", name_length=100_000)),
        key("empty key", "key", Key("")),
        key("key of 70000 bytes", "key", Key("k" * 70_000)),
        key("string length 2^64-1", "string", Key("broken", raw=struct.pack("<I", STRING) + text("x", 2**64 - 1))),
        key("string length past the end", "string", Key("broken", raw=struct.pack("<I", STRING) + text("x", 10_000))),
        key("value type 13", "'broken'.*13", Key("broken", raw=struct.pack("<II", 13, 0))),
        key("value type 2^32-1", "'broken'", Key("broken", raw=struct.pack("<II", 2**32 - 1, 0))),
        key(
            "array of arrays",
            "'broken'.*array",
            Key("broken", raw=struct.pack("<IIQ", ARRAY, ARRAY, 1) + array(U8, [1])),
        ),
        key("array of type 13", "'broken'.*13", Key("broken", raw=struct.pack("<IIQI", ARRAY, 13, 1, 0))),
        key("array of 2^63 bytes", "needs|truncated", Key("broken", raw=array(U8, [1], 2**63))),
        key("array of 2^61 u64", "needs|truncated", Key("broken", raw=array(U64, [1], 2**61))),
        key("array of 2^60 strings", "needs|truncated", Key("broken", raw=array(STRING, ["x"], 2**60))),
        key("array of 2^64-1 strings", "needs|truncated", Key("broken", raw=array(STRING, ["x"], 2**64 - 1))),
        key("array string past the end", "string", Key("broken", raw=array(STRING, ["a"], 1)[:-9] + text("a", 2**62))),
        key("duplicate key", "'twice'", Key("twice", U32, 1), Key("other", U32, 1), Key("twice", U32, 2)),
        key("split file", "split", Key("split.no", U16, 0), Key("split.count", U16, 2)),
        key("split of 2^64-1", "split", Key("split.count", U64, 2**64 - 1)),
        key("split of type string", "split", Key("split.count", STRING, "2")),
        tensor("name length 2^63", "tensor name", name_length=2**63),
        tensor("name length past the end", "tensor name", name_length=10_000),
        tensor("empty name", "tensor name", name=""),
        tensor("name of 65 bytes", "tensor name", name="n" * 65),
        tensor("duplicate tensor", "'first.weight'", name="first.weight", ne=(4, 2)),
        tensor("no dimensions", "'second.weight'.*dimensions", n_dims=0, ne=()),
        tensor("5 dimensions", "'second.weight'.*dimensions", ne=(3, 1, 1, 1, 1)),
        tensor("2^31 dimensions", "'second.weight'.*dimensions", n_dims=2**31),
        tensor("2^32-1 dimensions", "'second.weight'.*dimensions", n_dims=2**32 - 1),
        tensor("dimension 0", "'second.weight'.*zero", ne=(3, 0)),
        tensor("all dimensions 0", "'second.weight'.*zero", ne=(0, 0, 0, 0)),
        tensor("dimension -3", "'second.weight'.*dimension", ne=(2**64 - 3,)),
        tensor("dimension 2^63", "'second.weight'.*dimension", ne=(2**63,)),
        tensor("product 2^64", "'second.weight'", ne=(2**32, 2**32)),
        tensor("product 2^64 + 4", "'second.weight'", ne=(2**62 + 1, 4)),
        tensor("product wraps to 3", "'second.weight'", ne=(3, 0xAAAAAAAAAAAAAAAB, 3)),
        tensor("2^62 elements, bytes wrap to 0", "'second.weight'", ne=(2**62,)),
        tensor("2^61 elements", "'second.weight'", ne=(2**61,)),
        tensor("tensor type 99", "'second.weight'.*99", type=99),
        tensor("withdrawn type 4", "'second.weight'.*4", type=4),
        tensor("type 2^32-1", "'second.weight'", type=2**32 - 1),
        tensor("type 2^31", "'second.weight'", type=2**31),
        tensor("type Q8_K, which no file holds", "'second.weight'.*Q8_K", type=TYPE_Q8_K, ne=(256,)),
        tensor("Q8_0 rows of 3", "'second.weight'.*Q8_0", type=TYPE_Q8_0),
        tensor("Q4_K rows of 32", "'second.weight'.*32.*Q4_K", type=TYPE_Q4_K, ne=(32,)),
        tensor("MXFP4 rows of 16", "'second.weight'.*16.*MXFP4", type=TYPE_MXFP4, ne=(16, 2)),
        tensor("Q4_K block a byte short", "'second.weight'.*bytes", type=TYPE_Q4_K, ne=(256,), data=bytes(143)),
        tensor("MXFP4 block a byte short", "'second.weight'.*bytes", type=TYPE_MXFP4, ne=(32,), data=bytes(16)),
        tensor("offset not aligned", "'second.weight'.*align", offset=36),
        tensor("offset overlaps", "overlap|second.weight", offset=0),
        tensor("offset beyond the file", "'second.weight'.*bytes", offset=2**20),
        tensor("offset 2^63", "'second.weight'", offset=2**63),
        tensor("offset near 2^64", "'second.weight'", offset=2**64 - 32),
        tensor("offset wraps into the header", "'second.weight'", offset=2**64 - 256),
        tensor("more elements than data", "'second.weight'.*bytes", ne=(4,)),
        tensor("a row more than data", "'second.weight'.*bytes", ne=(3, 2)),
        tensor("F16 data declared F32", "'second.weight'.*bytes", data=second.data[:6]),
        Case(
            "first tensor reaches into the second",
            replace(small, tensors=(replace(first, ne=(3, 3)), replace(second, data=second.data + bytes(64)))),
            "'first.weight' and 'second.weight' overlap",
        ),
        Case("one byte short", good[:-1], "'second.weight'.*bytes"),
        Case("cut in half", good[: len(good) // 2], "truncated"),
        tensor("newline in a name", "control characters", name="line\nbreak\r\x1b[31m", type=99),
        tensor("name of broken UTF-8", "99", name=b"\xff\xfe\x80", type=99),
        key("newline in a key", "control characters", Key("line\nbreak\x00", raw=struct.pack("<II", 13, 0))),
    ]


def _no_indexer(model: GGUFFile) -> GGUFFile:
    """What the first exporters wrote: the keys and tensors of the indexer left out."""
    return replace(
        model,
        keys=tuple(key for key in model.keys if ".indexer." not in str(key.name)),
        tensors=tuple(tensor for tensor in model.tensors if ".indexer." not in str(tensor.name)),
    )


def _old_names(model: GGUFFile) -> GGUFFile:
    """The second generation: indexer tensors under the checkpoint's names."""

    def rename(name: str) -> str:
        return name.replace("indexer.q_", "index_q_").replace("indexer.k_", "index_k_")

    return replace(model, tensors=tuple(replace(t, name=rename(str(t.name))) for t in model.tensors))


def model_cases() -> list[Case]:
    """Valid GGUF files that hold no model which can be run."""
    model = model_file()

    def number(name: str, value: int, expected: str | None = None) -> Case:
        return Case(f"{name} {value}", model.with_keys(Key(ARCH + name, U32, value)), expected or name)

    def real(name: str, value: float) -> Case:
        return Case(f"{name} {value}", model.with_keys(Key(ARCH + name, F32, value)), name)

    def key(name: str, expected: str, *changes: Key) -> Case:
        return Case(name, model.with_keys(*changes), expected)

    def shape(name: str, *ne: int) -> Case:
        return Case(f"{name} {ne}", model.with_tensor(name, ne=ne, data=_values(name, ne)), f"'{name}'")

    tokens = "tokenizer.ggml.tokens"
    words = next(key.value for key in model.keys if key.name == tokens)
    without_tensor = [
        Case(
            f"without {name}",
            replace(model, tensors=tuple(t for t in model.tensors if t.name != name)),
            f"'{name}'.*missing",
        )
        for name in REQUIRED_TENSORS
    ]
    return [
        Case("no keys at all", replace(model, keys=()), "general.architecture"),
        Case("no tensors at all", replace(model, tensors=()), "token_embd|tensor"),
        Case("no architecture", model.without_keys("general.architecture"), "general.architecture"),
        key("architecture llama", "'llama'.*'minimax-m3'", Key("general.architecture", STRING, "llama")),
        key("architecture minimax-m2", "'minimax-m2'", Key("general.architecture", STRING, "minimax-m2")),
        key("architecture is a number", "general.architecture", Key("general.architecture", U32, 3)),
        key("architecture with a newline", "expected 'minimax-m3'", Key("general.architecture", STRING, "a\nb\tc")),
        Case("first generation: no indexer", _no_indexer(model), "without MSA.*indexer|indexer.*without MSA"),
        Case("second generation: old names", _old_names(model), "index_q_proj"),
        *(Case(f"without {name}", model.without_keys(name), name.removeprefix(ARCH)) for name in REQUIRED_KEYS),
        *without_tensor,
        key("block_count is a string", "block_count", Key(ARCH + "block_count", STRING, "2")),
        key("block_count is a float", "block_count", Key(ARCH + "block_count", F32, 2.0)),
        key("block_count is an array", "block_count", Key(ARCH + "block_count", U32, [2])),
        key("block_count is -1", "block_count", Key(ARCH + "block_count", I32, -1)),
        key("block_count is 2^64-1", "block_count", Key(ARCH + "block_count", U64, 2**64 - 1)),
        key("block_count is 2^32+2", "block_count", Key(ARCH + "block_count", U64, 2**32 + 2)),
        key("rope base is a string", "rope.freq_base", Key(ARCH + "rope.freq_base", STRING, "10000")),
        number("block_count", 0),
        number("block_count", 1, "not part|blk.0|blk.1"),
        number("block_count", 3, "blk.2"),
        number("block_count", 2**31),
        number("leading_dense_block_count", 2, "blk.1"),
        number("leading_dense_block_count", 3, "dense"),
        number("embedding_length", 0),
        number("embedding_length", 64, "token_embd"),
        number("embedding_length", 2**31),
        number("context_length", 0),
        number("attention.head_count", 0),
        number("attention.head_count", 3, "head"),
        number("attention.head_count", 4, "attn_q"),
        number("attention.head_count_kv", 0),
        number("attention.head_count_kv", 1, "head"),
        number("attention.key_length", 0),
        number("attention.key_length", 32, "value_length|attn_q"),
        number("attention.value_length", 32),
        number("rope.dimension_count", 0),
        number("rope.dimension_count", 7),
        number("rope.dimension_count", 18),
        number("expert_count", 0),
        number("expert_count", 3, "ffn_gate_inp|exp"),
        number("expert_used_count", 0),
        number("expert_used_count", 3, "experts"),
        number("expert_gating_func", 1),
        number("expert_shared_count", 2, "shexp"),
        number("expert_shared_count", 0, "shexp"),
        number("attention.indexer.head_count", 1, "index heads"),
        number("attention.indexer.key_length", 4, "rope.dimension_count|indexer"),
        number("attention.indexer.top_k", 0),
        number("attention.indexer.top_k", 2**20),
        number("attention.indexer.block_size", 0),
        number("attention.indexer.block_size", 8),
        number("attention.indexer.block_size", 24, "block size"),
        number("attention.indexer.block_size", 2048),
        number("attention.indexer.local_blocks", 0),
        number("attention.indexer.local_blocks", 3, "local"),
        key("experts not normalized", "expert_weights_norm", Key(ARCH + "expert_weights_norm", BOOL, False)),
        real("rope.freq_base", 0.0),
        real("rope.freq_base", float("nan")),
        real("rope.freq_base", float("inf")),
        real("attention.layer_norm_rms_epsilon", -1e-6),
        real("expert_weights_scale", float("nan")),
        key("rope scaling", "scaling", Key(ARCH + "rope.scaling.type", STRING, "yarn")),
        shape("blk.0.attn_q.weight", HEADS * HEAD_DIM // 2, EMBD * 2),
        shape("blk.0.attn_norm.weight", EMBD // 2),
        shape("blk.0.ffn_down.weight", EMBD, N_FF),
        shape("blk.1.ffn_gate_exps.weight", EMBD, N_FF_EXPERT * EXPERTS),
        shape("blk.1.ffn_gate_inp.weight", EXPERTS, EMBD),
        shape("output.weight", EMBD, VOCAB - 1),
        shape("token_embd.weight", EMBD, VOCAB, 2),
        Case(
            "a norm of type F16",
            model.with_tensor("blk.0.attn_norm.weight", type=TYPE_F16, data=bytes(2 * EMBD)),
            "'blk.0.attn_norm.weight'.*F16",
        ),
        Case(
            "a tensor too many",
            replace(model, tensors=(*model.tensors, _tensor("blk.0.surprise.weight", 4))),
            "'blk.0.surprise.weight'",
        ),
        key("tokens of type i8", "tokenizer.ggml.tokens", Key(tokens, I8, [1] * VOCAB)),
        key("tokens of type u32", "tokenizer.ggml.tokens", Key(tokens, U32, [1] * VOCAB)),
        key("tokens are one string", "tokenizer.ggml.tokens", Key(tokens, STRING, "abc")),
        key("a token missing", "tokenizer.ggml.tokens", Key(tokens, STRING, words[:-1])),
        key("no tokens", "tokenizer.ggml.tokens", Key(tokens, STRING, [])),
    ]
