"""sweep.json: the members of a sweep and what became of them, and the command that the sweep goes on by."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict, read_write

from launcher.config.choices import Retry
from launcher.config.compose import Arguments
from launcher.config.difference import ABSENT, Difference, differences, listed
from launcher.errors import ConfigError, LauncherError
from launcher.lock import holding
from launcher.plan.batch import GLOBAL
from launcher.prepare import short
from launcher.run_dir import RunDir, State, to_json, write_atomic
from launcher.sweep.members import FOLDER, Member

RESUME, RETRY = "sweep.resume", "sweep.retry"
_OWN = (RESUME, RETRY, FOLDER[0], "hydra.mode")
"""Keys that say how a sweep is started, and not what its runs are."""


class SweepFolder:
    """The folder of a sweep: from `open` or `reopen` on this process's alone, until the end of a with block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = ExitStack()
        self.is_open = False
        self._command: dict[str, Any] = {}

    @property
    def file(self) -> Path:
        return self.path / "sweep.json"

    def open(self, arguments: Arguments) -> None:
        """Makes the folder, or says who has it.

        Raises:
            ConfigError: it holds a sweep, or can't be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # exclusive creation decides which of several starts owns the folder
            self.file.touch(exist_ok=False)
        except FileExistsError:
            raise ConfigError(FOLDER[0], self.path, "this folder already holds a sweep; give it another") from None
        except OSError as error:
            raise ConfigError(FOLDER[0], self.path, f"can't be written: {error.strerror}") from error
        self._command = {
            "overrides": [one for one in arguments.overrides if _key(one) not in _OWN],
            "config_name": arguments.config_name,
            "config_dir": None if arguments.config_dir is None else str(Path(arguments.config_dir).resolve()),
            "cwd": os.getcwd(),
        }
        self._hold()

    def reopen(self, record: "Record") -> None:
        """Takes over the folder of a sweep that goes on. Raises LauncherError: another process has it."""
        self._command = record.command
        self._hold()

    def _hold(self) -> None:
        self._held.enter_context(holding(RunDir(self.path)))
        self.is_open = True

    def __enter__(self) -> "SweepFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def write(self, members: Sequence[Member]) -> None:
        """Records where the members stand. Raises StorageError."""
        planned = {str(one.num): one.planned for one in members if one.planned is not None}
        content = {"members": [one.record() for one in members], "command": self._command, "planned": planned}
        write_atomic(self.file, to_json(content))


@dataclass(frozen=True)
class Record:
    """What sweep.json says of a sweep that goes on."""

    folder: Path
    members: list[dict[str, Any]]
    command: dict[str, Any]
    planned: dict[str, dict[str, Any]]
    """For each member that could be planned its configuration and its global batch."""

    @classmethod
    def read(cls, given: str) -> "Record":
        """The record of the sweep in the folder `given`. Raises ConfigError."""
        folder = Path(given).resolve()
        file = folder / "sweep.json"
        if not file.is_file():
            hint = "the folder of a sweep stands below sweeps/; launcher resume goes on with a single run"
            raise ConfigError(RESUME, given, "no sweep here: sweep.json is missing", hint=hint)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return cls(folder, content["members"], dict(content["command"]), content["planned"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"sweep.json doesn't say how the sweep was started: {type(error).__name__}: {error}"
            raise ConfigError(RESUME, given, problem, hint="launcher resume goes on with each of its runs") from error

    def arguments(self, given: Arguments) -> Arguments:
        """The command that goes on with the sweep: its own, with what `given` says anew in its place.

        Raises:
            LauncherError: it would be another sweep, or it was started elsewhere.
        """
        cwd = Path(self.command["cwd"])
        if cwd.is_dir() and not cwd.samefile(Path.cwd()):
            raise ConfigError(RESUME, short(self.folder), f"the sweep was started in {cwd}: give the command there")
        config_dir = None if given.config_dir is None else str(Path(given.config_dir).resolve())
        before = {_key(one): one for one in self.command["overrides"]}
        now = {_key(one): one for one in given.overrides if _key(one) not in _OWN}
        found = [
            Difference(name, self.command[key], new)
            for key, name, new in (
                ("config_name", "--config-name", given.config_name),
                ("config_dir", "--config-dir", config_dir),
            )
            if self.command[key] != new
        ]
        found += [
            Difference(key, _value(before.get(key)), _value(one))
            for key, one in now.items()
            if before.get(key) != one and (_makes_members(before.get(key)) or _makes_members(one))
        ]
        self.refuse(found)
        if "submit" in now:  # a job's own keys say nothing of another place
            before = {key: one for key, one in before.items() if not key.startswith("submit.")}
        return Arguments([*(before | now).values()], given.config_name, given.config_dir)

    def check(self, members: Sequence[Member]) -> None:
        """That the members are those of the record. Raises LauncherError with the keys that differ."""
        if len(members) != len(self.members):
            text = f"the sweep there has {len(self.members)} runs, and this command makes {len(members)}"
            raise ConfigError(RESUME, short(self.folder), text)
        found: dict[str, Difference] = {}
        for member in members:
            known = self.planned.get(str(member.num))
            if known is None or member.planned is None:  # refused then, or now
                continue
            differing = differences(known["config"], member.planned["config"])
            batches = [one["global_batch_size"] for one in (known, member.planned)]
            differing += [Difference(GLOBAL, *batches)] if batches[0] != batches[1] else []
            found |= {str(one): one for one in differing}
        self.refuse(list(found.values()))

    def refuse(self, found: Sequence[Difference]) -> None:
        """Raises LauncherError where anything differs."""
        if found:
            keys = "a key differs" if len({one.key for one in found}) == 1 else "keys differ"
            raise LauncherError(
                f"{short(self.folder)}: {keys} from the sweep that is there, whose results would not go together\n"
                f"{listed(found)}\n  leave it as it was ({RESUME} alone is enough), or start another sweep"
            )

    def place(self, member: Member) -> None:
        """Puts a composed member where the record has it, also where the sweep was moved, and says how it stands."""
        if member.num >= len(self.members):  # `check` says so
            return
        known = self.members[member.num]
        folder = Path(known["dir"])
        if not folder.is_dir():
            below = [self.folder.joinpath(*folder.parts[-count:]) for count in range(1, len(folder.parts))]
            folder = next((one for one in below if one.is_dir()), self.folder / folder.name)
        assert member.composed is not None
        with read_write(member.composed), open_dict(member.composed):
            member.composed.hydra.sweep.subdir = os.path.relpath(folder, self.folder)
        member.where, member.state = folder, State(known["state"])
        member.exit_code, member.reason, member.metric = known["exit_code"], known["error"], known["metric"]
        if member.run.status.is_file():  # it may have gone on by itself since
            member.take_end()

    def is_left(self, member: Member, retry: Retry) -> bool:
        """Whether a member is to run when the sweep goes on."""
        return member.state is State.failed if retry is Retry.failed else member.state is not State.finished


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _value(override: str | None) -> object:
    return ABSENT if override is None else override.partition("=")[2]


def _makes_members(override: str | None) -> bool:
    """Whether an override decides which runs a sweep has."""
    if override is None:
        return False
    key = _key(override)
    if key == "sweep" or key.startswith(("hydra.sweep", "hydra/sweeper")):
        return True
    return OverridesParser.create().parse_override(override).is_sweep_override()
