"""Real text that every machine has: the source of the running Python's own standard library."""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from launcher.data.text import ByteSamples, check_arguments, select
from launcher.errors import DataError

# Tests aren't the library; encodings are over a hundred near copies of one file, which a held-out copy would reward.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class PythonStdlib(ByteSamples):
    """The functions, methods and classes of the standard library, each as its exact bytes, cut at `max_bytes`.

    A sample starts at its first decorator. A function inside a function is a part of that function's sample only; a
    method is a sample of its own and part of its class's. Files are in the order of their paths; those that can't be
    read or parsed are left out.

    Args:
        split: `train` or `validation`; None: all.
        max_bytes: longest sample.
        holdout: the share of the files that validation is made of, chosen by a hash of their paths; nothing of them
            is in `train`.

    Raises:
        DataError: this Python came without the source of its library.
    """

    def __init__(self, split: str | None = "train", max_bytes: int = 512, holdout: float = 0.1) -> None:
        check_arguments(split, holdout, max_bytes)
        root = Path(sysconfig.get_path("stdlib"))
        names = _source_files(root)
        chosen = [names[index] for index in select(names, split, holdout)]
        super().__init__(sample[:max_bytes] for name in chosen for sample in _definitions(root / name))
        if len(self) == 0:
            raise DataError(f"no Python source in {root}: this Python came without the source of its standard library")


def _source_files(root: Path) -> list[str]:
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(names)


def _definitions(file: Path) -> Iterator[bytes]:
    try:
        source = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
        source.decode("utf-8")  # positions in the syntax tree count bytes of UTF-8
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node in _walk(tree):
        # Python 3.8 and later give the line of `def` itself; the decorators' `@` stand in the same column.
        first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        yield source[starts[first_line - 1] + node.col_offset : starts[node.end_lineno - 1] + node.end_col_offset]


def _walk(node: ast.AST) -> Iterator[Definition]:
    """The definitions below `node` in the order of the source, without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            yield from _walk(child)
