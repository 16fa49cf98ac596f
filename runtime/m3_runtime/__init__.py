"""Runs MiniMax-M3 shaped GGUF files: engine, tokenizer, chat."""

from m3_runtime.engine import GGUF, Hparams, Memory, Model, Session, SessionOptions
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
