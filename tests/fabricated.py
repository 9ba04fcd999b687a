"""What ranks leave of a run, for tests that start none."""

import json
from pathlib import Path


def checkpoint(run: Path, update: int, *, size: int = 3) -> None:
    """A complete checkpoint, as far as files go. `size`: what its manifest says of a file of three bytes."""
    folder = run / "checkpoints" / f"update_{update:010d}"
    folder.mkdir(parents=True)
    (folder / "state").write_text("abc")
    files = {"state": {"size": size, "sha256": "0"}}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "update": update, "files": files}))
