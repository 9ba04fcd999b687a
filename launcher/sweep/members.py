"""The runs of a sweep, its members: composed, asked and planned together, before the first of them starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

from launcher.config.choices import SubmitKind
from launcher.config.compose import Arguments, make_importable
from launcher.config.compose_members import MemberConfigs
from launcher.errors import Exit, LauncherError
from launcher.plan.facts import Facts, ask_all
from launcher.prepare import Draft, Prepared, asks_here, draft, folder, settle
from launcher.run_dir import RunDir, State

FOLDER = ("hydra.sweep.dir", "hydra.sweep.subdir")
MOST_PROBLEMS = 10


@dataclass
class Member:
    """One run of a sweep and where it stands."""

    num: int
    overrides: list[str]
    """Of this member, without those that all have in common."""
    composed: DictConfig | None = None
    """None: refused."""
    drafted: Draft | None = None
    """None: refused."""
    prepared: Prepared | None = None
    """None: refused."""
    is_left: bool = True
    """Whether it is to run; False: it has, in a sweep that goes on."""
    where: Path = Path()
    state: State = State.planned
    exit_code: int | None = None
    reason: str | None = None
    """Why it failed, whole."""
    log: str | None = None
    """Where more of that stands."""
    metric: float | None = None
    """The validation loss at its end, or the training loss where nothing is validated."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.where)

    @property
    def name(self) -> str:
        """``run 2 (optimizer.lr=0.1)``."""
        return f"run {self.num} ({' '.join(self.overrides)})" if self.overrides else f"run {self.num}"

    @property
    def has_failed(self) -> bool:
        return self.exit_code not in (None, Exit.FINISHED, Exit.STOPPED)

    def refuse(self, error: LauncherError) -> None:
        """Records that this member can't run."""
        self.state, self.exit_code, self.reason = State.failed, int(error.exit_code), str(error)

    @property
    def is_queued(self) -> bool:
        """Whether it is a job of Slurm."""
        return self.drafted is not None and self.drafted.config.submit.kind is SubmitKind.slurm

    @property
    def planned(self) -> dict[str, Any] | None:
        """What decides its result; None: refused."""
        if self.prepared is None:
            return None
        return {"config": self.prepared.text, "global_batch_size": self.prepared.plan.global_batch_size}

    def begin(self) -> None:
        """It runs: what is known of an earlier end is past."""
        self.state, self.exit_code, self.reason, self.log, self.metric = State.running, None, None, None, None

    def take_end(self) -> None:
        """Reads from its folder how it has ended, or how it stands. Raises LauncherError: it can't be read."""
        run = self.run
        status = run.read_status()
        self.state, self.exit_code = State(status["state"]), status["exit_code"]
        error = status.get("error") or {}
        self.reason = self.log = None
        if error:
            who = "" if error.get("rank") is None else f"rank {error['rank']}: "
            self.reason, self.log = who + error["reason"], error.get("log")
        if self.state is State.finished and run.result.is_file():  # not there where it was only submitted
            is_validated = run.read_json(run.plan)["facts"].get("validation_samples") is not None
            loss = run.read_json(run.result)["validation_loss" if is_validated else "train_loss"]
            self.metric = float("nan") if loss is None else float(loss)

    def record(self) -> dict[str, Any]:
        """This member in sweep.json."""
        return {
            "num": self.num,
            "overrides": self.overrides,
            "dir": str(self.where),
            "state": self.state.value,
            "exit_code": self.exit_code,
            "error": self.reason,
            "metric": self.metric,
        }


def plan_members(
    hydra: Hydra,
    arguments: Arguments,
    sweep: DictConfig,
    batch: Sequence[Sequence[str]],
    first: int,
    is_fixed: Callable[[str], bool],
    *,
    keep_going: bool = False,
    place: Callable[[Member], None] | None = None,
) -> list[Member]:
    """The members numbered from `first` whose overrides are in `batch`, planned and able to start.

    `keep_going`: one that can't work is recorded as failed, instead of refusing all, once there is one that can.
    `place`: puts a composed member into the folder that it has already; None: its folder must be new.

    Raises:
        LauncherError: one of them can't work: which, and why.
    """
    members = [
        Member(first + index, [one for one in overrides if not is_fixed(one)]) for index, overrides in enumerate(batch)
    ]
    problems: dict[int, LauncherError] = {}
    drafts: dict[int, Draft] = {}
    configs = MemberConfigs(hydra, arguments, sweep)
    for member, overrides in zip(members, batch, strict=True):
        try:
            member.composed = configs.compose(overrides, member.num)
            if place is not None:
                place(member)
            drafts[member.num] = member.drafted = draft(member.composed, *FOLDER)
            member.where = folder(member.composed, *FOLDER)
        except LauncherError as error:
            problems[member.num] = error
    if drafts:
        pythonpath = make_importable(arguments)
        here = {num: one for num, one in drafts.items() if asks_here(one.config)}
        answers = dict(zip(here, ask_all([one.text for one in here.values()], pythonpath) if here else [], strict=True))
        for num in drafts:
            facts = answers.get(num, Facts())
            try:
                if isinstance(facts, LauncherError):
                    raise facts
                members[num - first].prepared = settle(drafts[num], facts, pythonpath)
            except LauncherError as error:
                problems[num] = error
    if place is None:
        problems |= _taken_folders([member for member in members if member.prepared is not None])
    if problems and not (keep_going and (first or len(problems) < len(members))):
        raise _refusal(members, problems)
    for num, problem in problems.items():
        members[num - first].refuse(problem)
    return members


def _taken_folders(members: Sequence[Member]) -> dict[int, LauncherError]:
    """For each member whose folder holds a run, or is another's: what is wrong."""
    problems: dict[int, LauncherError] = {}
    owners: dict[Path, Member] = {}
    for member in members:
        owner = owners.setdefault(member.where, member)
        if owner is not member:
            text = f"hydra.sweep.subdir: {member.where} is the folder of run {owner.num} too; give each its own"
            problems[member.num] = LauncherError(text)
        elif member.run.config.exists():
            problems[member.num] = LauncherError(f"hydra.sweep.subdir: {member.where} already holds a run")
    return problems


def _refusal(members: Sequence[Member], problems: Mapping[int, LauncherError]) -> LauncherError:
    """One message for a batch that can't work. What is wrong with all of them alike is said once."""
    messages = {str(error) for error in problems.values()}
    if len(problems) == len(members) and len(messages) == 1:
        return next(iter(problems.values()))
    lines = [f"{len(problems)} of {len(members)} runs of the sweep can't work; none was started"]
    for member in members:
        if member.num in problems and len(lines) <= MOST_PROBLEMS:
            lines.append(f"{member.name}: {problems[member.num]}")
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"… and {len(problems) - MOST_PROBLEMS} more")
    return LauncherError("\n  ".join(line.replace("\n", "\n  ") for line in lines))
