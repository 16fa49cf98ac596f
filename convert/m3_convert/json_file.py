"""Reading of the JSON files of a checkpoint, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from m3_convert.file_kind import file_kind
from m3_runtime.errors import InputError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, line ends unchanged. Raises InputError if it cannot be read or is not UTF-8."""
    try:
        if (kind := file_kind(path)) not in ("a file", "nothing"):  # a pipe would wait for its other end
            raise InputError(f"{path}: expected a file, found {kind}")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text: {error}") from error


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in `text`; `name` stands for it in messages. Raises InputError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises InputError if there is none."""
    return parse_object(read_text(path), str(path))
