"""A training under random faults: it has to come to its end by itself or with `launcher resume`, and to the very
weights of one that nobody disturbed.

Faults: SIGKILL to a rank, to the agent or to the launcher, SIGTERM to one rank, SIGINT to the launcher, a byte flipped
in the newest checkpoint or its end cut off (and a rank killed, so that it is looked at), and a full disk, where the
folder lies on a file system that the script may fill: on Linux as root it mounts a small one.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --faults 5 --updates 30 --seed 7
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.checkpoints import completed
from launcher.observe.records import read_metrics
from launcher.process import children
from launcher.run_dir import RunDir

GOES_ON = (0, 3, 75, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""How a disturbed launcher may end."""


class SlowSamples:
    """Numbers that take a moment to read, so that faults meet a run in the middle."""

    def __init__(self, count: int = 40, seconds: float = 0.02) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[int]:
        time.sleep(self.seconds)
        return [(index * 7 + step) % 13 for step in range(1 + index % 5)]


def overrides(arguments: argparse.Namespace) -> list[str]:
    """A small transformer with dropout on 2 ranks, in windows that don't divide by them."""
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "vocab_size": 14}
    return [
        *[f"model.{name}={value}" for name, value in sizes.items()],
        "model.dropout=0.2",
        "task.vocab_size=14",
        "task.bos=13",
        "data=custom",
        "data.train._target_=chaos.SlowSamples",
        "batch.global_batch_size=7",
        "optimizer=sgd",
        "optimizer.lr=0.3",
        "optimizer.momentum=0.9",
        "cluster.device=cpu",
        "cluster.ranks_per_node=2",
        f"training.duration={arguments.updates} updates",
        "training.max_restarts=1000",
        "checkpoint.every=3 updates",
        "logging.progress=false",
        *arguments.overrides,
    ]


class Course:
    """One training in a folder, started as often as it takes."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.run, self._overrides = folder, RunDir(folder / "run"), overrides(arguments)
        self.launcher: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        """`launcher train` the first time, then `launcher resume`."""
        again = self.run.plan.is_file()
        own = ["resume", str(self.run.path)] if again else ["train", f"hydra.run.dir={self.run.path}", *self._overrides]
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.folder / "output.log", "ab") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "launcher", *own],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.starts += 1

    @property
    def is_up(self) -> bool:
        return self.launcher is not None and self.launcher.poll() is None

    def is_held(self) -> bool:
        """Whether the last start was refused since somebody else has the folder."""
        return "another launcher is running here" in (self.folder / "output.log").read_text(errors="replace")[-500:]

    def lines(self) -> int:
        """How many updates have been reported, repeated ones too."""
        with suppress(OSError):
            return self.run.metrics.read_bytes().count(b"\n")
        return 0

    def agent(self) -> int | None:
        """The process that looks after the ranks."""
        return next(iter(children(self.launcher.pid)), None) if self.launcher is not None and self.is_up else None

    def ranks(self) -> list[int]:
        agent = self.agent()
        return [] if agent is None else [one for one in children(agent) if "launcher.train.worker" in command(one)]

    def wait(self, seconds: float) -> int:
        assert self.launcher is not None
        return self.launcher.wait(seconds)


def command(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def send(process: int | None, number: int) -> bool:
    if process is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False


class Faults:
    """What is done to a course, chosen by a seed."""

    def __init__(self, course: Course, chosen: random.Random, *, can_fill: bool) -> None:
        self._course, self._random = course, chosen
        self.kinds: dict[str, Callable[[], bool]] = {
            "kill a rank": self._kill_rank,
            "kill the agent": lambda: send(course.agent(), signal.SIGKILL),
            "kill the launcher": lambda: send(course.launcher.pid if course.launcher else None, signal.SIGKILL),
            "terminate one rank": lambda: send(self._any_rank(), signal.SIGTERM),
            "interrupt the launcher": lambda: send(course.launcher.pid if course.launcher else None, signal.SIGINT),
            "flip a byte of the newest checkpoint": lambda: self._damage(flip=True),
            "cut the newest checkpoint": lambda: self._damage(flip=False),
        }
        if can_fill:
            self.kinds["fill the disk"] = self._fill

    def next(self) -> str | None:
        """Does one thing, and says which; None: there was nothing to do it to."""
        name = self._random.choice(sorted(self.kinds))
        return name if self.kinds[name]() else None

    def _any_rank(self) -> int | None:
        ranks = self._course.ranks()
        return self._random.choice(ranks) if ranks else None

    def _kill_rank(self) -> bool:
        return send(self._any_rank(), signal.SIGKILL)

    def _damage(self, *, flip: bool) -> bool:
        there = completed(self._course.run)
        if len(there) < 2:  # the last one is what a run is left with
            return False
        files = [one for one in there[0].path.iterdir() if one.name.endswith(".distcp")]
        if not files:
            return False
        with suppress(FileNotFoundError):
            path = self._random.choice(files)
            size = path.stat().st_size
            place = self._random.randrange(size)
            with open(path, "r+b") as file:
                if flip:
                    file.seek(place)
                    (byte,) = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ (1 << self._random.randrange(8))]))
                else:
                    file.truncate(place)
            self._kill_rank()
            return True
        return False

    def _fill(self) -> bool:
        filler = self._course.folder / "filler"
        with suppress(OSError), open(filler, "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        time.sleep(self._random.uniform(0.5, 2.0))
        filler.unlink(missing_ok=True)
        return True


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A file system of its own below `folder`, where that can be had."""
    folder.mkdir()
    options = f"size={megabytes}m"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "chaos", str(folder)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def undisturbed(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    folder.mkdir()
    course = Course(folder, arguments)
    course.start()
    code = course.wait(600)
    if code:
        raise SystemExit(f"the undisturbed run ended with {code}:\n{(folder / 'output.log').read_text()}")
    return dict(course.run.read_json(course.run.result))


def disturbed(course: Course, faults: Faults, chosen: random.Random, wanted: int) -> dict[str, int]:
    """Starts it and disturbs it until it is through. Gives how often each fault was done."""
    done: dict[str, int] = {}
    codes: list[int] = []
    while True:
        course.start()
        waits_for = 0
        while course.is_up:
            time.sleep(chosen.uniform(0.2, 2.0))
            if sum(done.values()) >= wanted or not course.ranks() or course.lines() < waits_for:
                continue
            # most faults meet a run that has trained on since the last one, and some its start
            waits_for = course.lines() + chosen.choice((0, 1, 3, 9))
            name = faults.next()
            if name is not None:
                done[name] = done.get(name, 0) + 1
                print(f"  {course.lines():>4} updates reported: {name}", flush=True)
        code = course.wait(1)
        if code == 2 and course.is_held():  # its agent, whose launcher was killed, is still about to stop
            time.sleep(0.5)
            continue
        codes.append(code)
        if code == 0:
            break
        if code not in GOES_ON and -code not in (signal.SIGKILL, signal.SIGINT):
            text = (course.folder / "output.log").read_text(errors="replace")
            raise SystemExit(f"a disturbed run ended with {code}:\n{text[-3000:]}")
    print(f"  {course.starts} starts, which ended with {codes}")
    return done


def check(course: Course, expected: dict[str, object], updates: int) -> list[str]:
    """What is wrong with how it has ended."""
    problems = []
    result = course.run.read_json(course.run.result)
    if result["weights_sha256"] != expected["weights_sha256"]:
        problems.append("the weights aren't those of the undisturbed run")
    train, _ = read_metrics(course.run.metrics)
    if [one["update"] for one in train] != list(range(1, updates + 1)):
        problems.append("metrics.jsonl doesn't have every update once")
    if [one["samples"] for one in train] != [7, 7, 7, 7, 7, 5] * (updates // 6) + [7, 7, 7, 7, 7, 5][: updates % 6]:
        problems.append("a window had other samples than it has to")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=None, help="where to work, and to leave what went wrong")
    parser.add_argument("overrides", nargs="*", help="overrides of the run, as strategy=fsdp")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(exist_ok=True)
    expected = undisturbed(folder / "undisturbed", arguments)
    chosen = random.Random(arguments.seed)
    with small_disk(folder / "disturbed", 16) as can_fill:
        course = Course(folder / "disturbed", arguments)
        done = disturbed(course, Faults(course, chosen, can_fill=can_fill), chosen, arguments.faults)
        problems = check(course, expected, arguments.updates)
        if problems:
            shutil.copytree(folder / "disturbed", folder / "kept")
    for name, count in sorted(done.items()):
        print(f"{count:>4} x {name}")
    if sum(done.values()) < arguments.faults:
        problems.append(f"only {sum(done.values())} faults before the run was through: give it more --updates")
    for problem in problems:
        print(f"WRONG: {problem} (seed {arguments.seed}, {folder})")
    if not problems:
        print(f"{sum(done.values())} faults, and the weights are those of the undisturbed run")
        if arguments.folder is None:
            shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
