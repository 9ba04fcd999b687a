"""What happens in the folder of a member: its run is made, or goes on, here or as a job."""

from rich.console import Console

from launcher.config.compose import Arguments, make_importable
from launcher.errors import Exit
from launcher.resume import Wish, going_on, refuse_job
from launcher.run_dir import State, to_json
from launcher.sweep.members import Member


def run_here(member: Member, arguments: Arguments, console: Console) -> None:
    """Starts a member's ranks, from its newest checkpoint where it has one, and follows them. What it ended with is the
    member's."""
    code = _go_on(member, arguments, console) if member.run.config.exists() else _run_new(member, console)
    member.take_end()
    member.exit_code = code


def make_ready(member: Member, arguments: Arguments, console: Console) -> None:
    """Makes the folder of a member's run, or that of one that goes on ready for it. Raises LauncherError."""
    run, prepared = member.run, member.prepared
    assert prepared is not None
    assert member.drafted is not None
    if run.config.exists():
        refuse_job(run)
        with going_on(run, member.drafted, make_importable(arguments), Wish(), console):
            pass
    else:
        run.create(prepared.text, to_json(prepared.plan_in(run).to_dict()))
    run.write_status(state=State.submitted, job=None, pids={}, exit_code=None, error=None)


def _run_new(member: Member, console: Console) -> int:
    assert member.prepared is not None
    assert member.composed is not None
    run, prepared = member.run, member.prepared
    plan = prepared.plan_in(run)
    run.create(prepared.text, to_json(plan.to_dict()))
    live = bool(member.composed.logging.progress)
    launch = prepared.backend.render(run, plan)
    return prepared.backend.submit(run, plan, launch, console, live=live)


def _go_on(member: Member, arguments: Arguments, console: Console) -> int:
    """Goes on with a member from its newest checkpoint, or from its beginning where there is none."""
    assert member.drafted is not None
    with going_on(member.run, member.drafted, make_importable(arguments), Wish(), console) as accepted:
        return int(Exit.FINISHED) if accepted is None else accepted.run_it(console)
