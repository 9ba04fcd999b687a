"""Packages that only some data sets need."""

import importlib
from typing import Any

from launcher.errors import DataError


def imported(module: str, extra: str) -> Any:
    """The module of that name. Raises DataError with the command that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise DataError(f"{error.name} isn't installed: pip install 'launcher[{extra}]'") from error
