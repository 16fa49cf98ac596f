"""Entry points of the commands; see m3_runtime.start."""

from importlib import import_module
from typing import NoReturn

from m3_runtime.start import start


def m3_convert() -> NoReturn:
    """m3-convert."""
    start("m3-convert", lambda: import_module("m3_convert.cli").main)


def m3_check_selection() -> NoReturn:
    """m3-check-selection."""
    start("m3-check-selection", lambda: import_module("m3_convert.check_cli").main)


def m3_imatrix() -> NoReturn:
    """m3-imatrix."""
    start("m3-imatrix", lambda: import_module("m3_convert.imatrix_cli").main)
