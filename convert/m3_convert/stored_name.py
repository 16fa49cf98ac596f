"""Names of input files that are written into the output."""

from pathlib import Path

from m3_runtime.errors import InputError


def stored_name(path: Path, what: str) -> str:
    """The name of a file, which GGUF holds as UTF-8. Raises InputError if it is not.

    what: the file is, as in "recipe".
    """
    try:
        path.name.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{path}: the name of the {what} is written into the file: expected UTF-8, found other bytes; rename it"
        ) from error
    return path.name
