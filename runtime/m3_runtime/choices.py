"""Names by which options of the engine are chosen, in commands and in Python. Known without the engine's library."""

from enum import StrEnum
from typing import Final

from m3_runtime.errors import InputError

DEVICES: Final = ("auto", "cpu", "cuda")
EXPERTS_ON: Final = ("auto", "gpu", "cpu")
ISAS: Final = ("auto", "scalar", "avx2", "avx512", "neon")
ATTENTIONS: Final = ("sparse", "dense")
INDEX_SCANS: Final = ("auto", "full", "low_bit")
CACHE_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0")  #: of K/V and of index keys


class OnFull(StrEnum):
    """What happens when the context of a chat is full."""

    STOP = "stop"  #: the answer ends, a message that does not fit is refused
    SHIFT = "shift"  #: the oldest whole blocks behind the pinned ones are dropped


def chosen(option: str, value: str, known: tuple[str, ...]) -> str:
    """`value` as it is known, in lower case. Raises InputError naming the option for another."""
    if value.lower() not in known:
        raise InputError(f"{option} is '{value}', expected one of {', '.join(known)}")
    return value.lower()
