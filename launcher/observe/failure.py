"""A rank's traceback as people read it first: their own frames."""

import re
from pathlib import Path

_OURS = re.compile(re.escape(str(Path(__file__).resolve().parents[1])) + r"/|/(site|dist)-packages/torch/")
_FRAME = re.compile(r'  File "(.*?)", line \d+')
_START = "Traceback (most recent call last):"


def for_screen(reason: str) -> str:
    """`reason` without the frames of the launcher and of torch with which its tracebacks begin.

    One that has no others, and a message that is no traceback, stay whole.
    """
    lines, kept, index = reason.splitlines(), list[str](), 0
    while index < len(lines):
        kept.append(lines[index])
        index += 1
        if not kept[-1].endswith(_START):
            continue
        frames, index = _frames(lines, index)
        theirs = next((number for number, frame in enumerate(frames) if not _is_ours(frame)), 0)
        if theirs:
            kept.append(f"  … {theirs} frames of the launcher and torch: see the log")
        kept += [line for frame in frames[theirs:] for line in frame]
    return "\n".join(kept)


def _frames(lines: list[str], index: int) -> tuple[list[list[str]], int]:
    """The frames from `index` on, each with the lines below it, and where they end."""
    frames: list[list[str]] = []
    while index < len(lines) and lines[index].startswith("  "):
        if _FRAME.match(lines[index]) or not frames:
            frames.append([])
        frames[-1].append(lines[index])
        index += 1
    return frames, index


def _is_ours(frame: list[str]) -> bool:
    found = _FRAME.match(frame[0])
    return found is not None and _OURS.search(found[1]) is not None
