"""The lock of a run's folder: at most one launcher looks after a run at a time, also where several machines see it.

``RUN/lock.json`` names the process that holds it. One that has ended without letting go is recognised by its id and the
time it was started, or by the machine having been started anew since.
"""

import errno
import getpass
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from launcher.errors import LauncherError
from launcher.run_dir import RunDir, to_json

_PROC = Path("/proc")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What a file system says that has no hard links."""


class Locked(LauncherError):
    """The run's folder is another launcher's."""


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock."""

    host: str
    boot: str
    """Of the machine, new each time it starts; empty where it isn't known."""
    namespace: str
    """Of process ids: a container has its own."""
    pid: int
    started: int
    """When the process was started, in ticks since the machine was; 0 where it isn't known."""
    user: str
    since: float
    """When it took the lock, in Unix seconds."""
    handed_by: int | None = None
    """The id of the process that held it before and has started this one."""
    job: str = ""
    """The job of a scheduler that it is part of; empty: none."""
    job_start: int = 0
    """How often that job had been queued again."""

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(
            host=socket.gethostname(),
            boot=_text(_PROC / "sys/kernel/random/boot_id"),
            namespace=_namespace(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
            user=_user(),
            since=time.time(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            job_start=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    def is_process(self, other: "Owner") -> bool:
        """Whether both are the same process."""
        return self.pid == other.pid and self.started == other.started and self.is_beside(other)

    def is_beside(self, other: "Owner") -> bool:
        """Whether each sees the other among its own machine's processes."""
        return (self.host, self.boot, self.namespace) == (other.host, other.boot, other.namespace)

    def has_ended(self, seen_by: "Owner") -> bool:
        """Whether this process is known to have ended. That of another machine never is."""
        if self.job and self.job == seen_by.job and self.job_start < seen_by.job_start:
            return True  # a scheduler ends all of a job before it starts it again
        if self.host != seen_by.host:
            return False
        if self.boot != seen_by.boot:
            return True
        if not self.is_beside(seen_by):
            return False
        started = _started(self.pid)
        return started is None or (0 not in (started, self.started) and started != self.started)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id without a name, as in containers
        return str(os.getuid())


def _started(pid: int) -> int | None:
    """When a process of this machine was started; 0: it lives, and the system doesn't say; None: it has ended."""
    try:
        # behind the command's name, which may hold anything
        state, *fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # ended, another user's that is hidden, or a system without these files
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    return None if state in "ZX" else int(fields[18])


def path_of(run: RunDir) -> Path:
    """Where the lock of a run stands."""
    return run.path / "lock.json"


def is_held(run: RunDir) -> bool:
    """Whether a process has the lock of a run that isn't known to have ended. One that can't be read is held."""
    path = path_of(run)
    holder = _read(path)
    if holder is not None:
        return not holder.has_ended(Owner.this_process())
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # in a folder of another user's
        return True
    return True


@contextmanager
def holding(run: RunDir, *, force: bool = False) -> Iterator[None]:
    """Holds the lock of a run while inside.

    A process that holds it may ask again, and one that it starts takes it over for as long as that one lives.

    Args:
        force: take it from a process of another machine, which nothing here can be known of.

    Raises:
        Locked: another launcher looks after this run.
        LauncherError: the lock can't be written.
    """
    path, me = path_of(run), Owner.this_process()
    holder = _read(path)
    if holder is not None and holder.is_process(me):
        yield
        return
    parent = holder if holder is not None and holder.pid == os.getppid() and holder.is_beside(me) else None
    try:
        if parent is None:
            _take(path, me, run, force=force)
        else:
            me = replace(me, handed_by=parent.pid)
            _write(path, me, over=True)
    except OSError as error:
        raise LauncherError(f"{path}: the run's folder can't be locked: {error.strerror or error}") from error
    try:
        yield
    finally:
        _let_go(path, me, parent, run)


def let_go(run: RunDir) -> None:
    """Leaves a run that this process holds to a job, which looks after it from now on."""
    _let_go(path_of(run), Owner.this_process(), None, run)


def _take(path: Path, me: Owner, run: RunDir, *, force: bool) -> None:
    """Makes the lock at `path` this process's. Raises Locked, OSError."""
    while not _write(path, me, over=False):
        holder = _read(path)
        if holder is None and not path.exists():  # let go of a moment ago
            continue
        if holder is None and not force:
            raise Locked(f"{path}: can't be read; if nothing runs in this folder, `launcher resume --force` goes on")
        if holder is not None and not holder.has_ended(me) and (not force or holder.is_beside(me)):
            raise Locked(_refusal(holder, me, run))
        # of several that find it left behind one takes it: whoever has the lock of this very lock
        over = path.with_name(f".{path.name}.{_digest(path)}")
        _take(over, me, run, force=force)
        try:
            if _read(path) == holder:
                _write(path, me, over=True)
                return
        finally:
            over.unlink(missing_ok=True)


def _let_go(path: Path, me: Owner, parent: Owner | None, run: RunDir) -> None:
    """Gives the lock back to the process it came from, or removes it; another's stays."""
    with suppress(OSError, Locked):
        holder = _read(path)
        if holder is not None and holder.handed_by == me.pid and holder.is_beside(me):
            _take(path, me, run, force=False)  # of a process that was killed; one that lives keeps it
            holder = me
        if holder is None or not holder.is_process(me):
            return
        if parent is not None and not parent.has_ended(me):
            _write(path, parent, over=True)
        else:
            path.unlink()


def _read(path: Path) -> Owner | None:
    """Who holds the lock; None: nobody, or it can't be read."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return "gone"


def _write(path: Path, owner: Owner, *, over: bool) -> bool:
    """Writes the lock whole. False: there is one, and it isn't to be written over. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(to_json(asdict(owner)), encoding="utf-8")
        if over:
            os.replace(temporary, path)
            return True
        try:
            os.link(temporary, path)  # unlike a file that is opened it is never there in half
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with open(path, "x", encoding="utf-8") as file:
                file.write(to_json(asdict(owner)))
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _refusal(holder: Owner, me: Owner, run: RunDir) -> str:
    since = datetime.fromtimestamp(holder.since).strftime("%Y-%m-%d %H:%M:%S")
    who = f"process {holder.pid} on {holder.host} (user {holder.user}) since {since}"
    text = f"{run.path}: another launcher is running here: {who}"
    if holder.is_beside(me):
        return f"{text}\n  wait for its end, or end it: kill {holder.pid}"
    return (
        f"{text}, {_last_sign(run)}\n  nothing is known here of the processes there; if that one has ended, "
        f"`launcher resume {run.path} --force` takes the folder over"
    )


def _last_sign(run: RunDir) -> str:
    """When the run last said that it lives."""
    try:
        heartbeat = float(run.read_status()["heartbeat"])
    except (LauncherError, KeyError, TypeError, ValueError):
        return "which has given no sign of life yet"
    return f"whose last sign of life was {max(0, round(time.time() - heartbeat))} s ago"
