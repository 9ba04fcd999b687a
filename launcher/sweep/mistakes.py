"""What a sweeper of Hydra's can't work with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException

from launcher.errors import LauncherError


class Over(Exception):
    """Leaves a sweeper in the middle: it was interrupted, or only its plan was wanted."""


@contextmanager
def sweeper_mistakes(name: str | None) -> Iterator[None]:
    """What a sweeper can't work with, in one message."""
    try:
        yield
    except (LauncherError, Over):
        raise
    except HydraException as error:
        raise LauncherError(f"hydra/sweeper={name}: {error}") from error
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise LauncherError(f"hydra/sweeper={name}: {type(error).__name__}: {error}") from error
