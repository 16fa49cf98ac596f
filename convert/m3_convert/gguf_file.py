"""The header of a GGUF file: everything before the tensor data, encoded by the `gguf` library."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, Keys
from gguf.gguf_writer import WriterState

from m3_convert.metadata import Metadata
from m3_convert.plan import Plan, PlannedTensor, aligned
from m3_runtime.engine import Model
from m3_runtime.errors import InputError
from m3_runtime.sampler import SamplerOptions
from m3_runtime.template import ChatTemplate
from m3_runtime.text import ChatTokenizer


@dataclass(frozen=True)
class OutputFile:
    """A file to be written: header, then the data of the tensors at their offsets from the end of the header."""

    path: Path
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def n_bytes(self) -> int:
        """Size of the whole file."""
        last = self.tensors[-1]
        return len(self.header) + aligned(last.offset + last.n_bytes)


def header_bytes(plan: Plan, metadata: Metadata) -> bytes:
    """Magic, version, metadata and tensor list, padded to the alignment: the data section starts where the bytes end.

    Raises InputError for a metadata value that GGUF cannot hold.
    """
    return encode_header(plan, metadata, plan.tensors)


def encode_header(plan: Plan, metadata: Metadata, tensors: Sequence[PlannedTensor], *, pad: bool = True) -> bytes:
    """The header of a file with these of the plan's tensors and no keys but `metadata`; see `header_bytes`."""
    architecture = metadata.get(Keys.General.ARCHITECTURE)
    writer = GGUFWriter(None, str(architecture.value) if architecture else "")
    if architecture is None:  # the writer's own first key
        writer.kv_data[0].clear()
    for key, value in metadata.items():
        if key != Keys.General.ARCHITECTURE:
            writer.add_key_value(key, value.value, value.type, value.sub_type)
    for tensor in tensors:
        type_ = GGMLQuantizationType(int(tensor.type))
        # Any dtype but uint8, for which the writer would take the shape to be in bytes; raw_dtype is what it stores.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=type_)
    buffer = io.BytesIO()
    # The writer opens files by path; handing it an open one keeps the header in memory, for dry runs too.
    writer.fout = [io.BufferedWriter(buffer)]
    writer.state = WriterState.EMPTY
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.flush()
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"metadata of {plan.source.path} cannot be encoded: {error}") from error
    header = buffer.getvalue()
    return header + bytes(aligned(len(header)) - len(header)) if pad else header


def check_header(header: bytes, name: str) -> None:
    """Lets the engine and the chat judge the header, so that no file is written that m3-run would refuse.

    `name` of the file stands in messages. Raises InputError as running the file would: dimensions, tokenizer, sampling
    defaults, chat template (which may be absent).
    """
    with Model.from_header(header, name, device="cpu") as model:
        metadata = model.gguf.metadata
        try:
            ChatTokenizer(metadata)
            SamplerOptions.from_metadata(metadata)
            if "tokenizer.chat_template" in metadata:
                ChatTemplate.from_metadata(metadata)
        except InputError as error:
            raise InputError(f"{name}: m3-run would refuse the file: {error}") from error
