"""Runs MiniMax-M3 shaped GGUF files: engine, tokenizer, chat."""

from typing import TYPE_CHECKING, Any

from m3_runtime.errors import (
    CancelledError,
    ContextError,
    ExitCode,
    InputError,
    M3Error,
    MachineError,
    NotFiniteError,
    NothingTestedError,
)

if TYPE_CHECKING:
    from m3_runtime.engine import GGUF, Hparams, Memory, Model, Session, SessionOptions

__all__ = [
    "GGUF",
    "CancelledError",
    "ContextError",
    "ExitCode",
    "Hparams",
    "InputError",
    "M3Error",
    "MachineError",
    "Memory",
    "Model",
    "NotFiniteError",
    "NothingTestedError",
    "Session",
    "SessionOptions",
]


def __getattr__(name: str) -> Any:
    # Loaded when first asked for: a missing library is then an error of the command that needs it, not of the import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from m3_runtime import engine

    return getattr(engine, name)
