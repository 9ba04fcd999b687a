"""Following, drawing and showing a run by its files alone."""

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fabricated import checkpoint
from rich.console import Console

from launcher.errors import LauncherError
from launcher.observe import progress
from launcher.observe.plot import draw_loss, try_to_draw
from launcher.observe.progress import follow
from launcher.observe.records import Tail, latest_updates, latest_with, next_attempt, read_metrics, seconds_left
from launcher.observe.status import find_runs, read_run, render_status
from launcher.observe.text import duration_text, lr_text, rate_text, some

PNG_WIDTH = slice(16, 20)


def train(update: int, **fields: Any) -> str:
    values = {"kind": "train", "update": update, "attempt": 0, "applied": update, "epoch": update / 40, "loss": 3.21}
    values |= {"lr": 1e-3, "samples": 64, "weight": 64.0, "seconds": 0.5, "skipped": 0}
    return json.dumps(values | fields) + "\n"


def validation(update: int, **fields: Any) -> str:
    values = {"kind": "validation", "update": update, "attempt": 0, "loss": 2.5, "metrics": {"accuracy": 0.75}}
    return json.dumps(values | fields) + "\n"


def make_run(
    path: Path,
    *,
    num_updates: int | None = 100,
    updates_per_epoch: int | None = 40,
    noise_scale_every_updates: int | None = None,
    **status: Any,
) -> Path:
    path.mkdir(parents=True)
    plan = {"num_updates": num_updates, "updates_per_epoch": updates_per_epoch}
    plan |= {"noise_scale_every_updates": noise_scale_every_updates}
    (path / "plan.json").write_text(json.dumps(plan))
    values = {"state": "running", "exit_code": None, "update": 0, "applied": 0, "attempt": 0, "error": None}
    (path / "status.json").write_text(json.dumps(values | {"heartbeat": time.time()} | status))
    return path


def add(run: Path, *lines: str) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(lines))


def steps(*actions: Callable[[], None]) -> Callable[[], bool]:
    """An `alive` that does one thing to the run's files at each look, and then says that the run has ended."""
    waiting: Iterator[Callable[[], None]] = iter(actions)

    def alive() -> bool:
        action = next(waiting, None)
        if action is not None:
            action()
        return action is not None

    return alive


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL", 0.0)


def followed(run: Path, *actions: Callable[[], None], width: int | None = None) -> list[str]:
    """The lines printed; `width`: in a terminal that wide."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=width is not None, width=width or 80, color_system=None, legacy_windows=False
    )
    follow(run, steps(*actions), live=True, console=console)
    return out.getvalue().splitlines()


def test_a_line_that_is_not_whole_is_left_until_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    line = train(1, note="naïve").encode()
    for position in range(len(line) - 1):
        with open(path, "ab") as file:
            file.write(line[position : position + 1])
        assert tail.read() == []
    with open(path, "ab") as file:
        file.write(line[-1:] + train(2).encode())
    assert [record["update"] for record in tail.read()] == [1, 2]
    assert tail.read() == []
    path.write_text(train(1))
    assert [record["update"] for record in tail.read()] == [1], "the file was cut off and begun again"


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "tra' + train(1).encode() + b"\n[1]\n\xff\n{}\n" + train(2).encode())
    assert [record["update"] for record in Tail(path).read()] == [2]


def test_the_highest_attempt_of_an_update_counts(tmp_path: Path) -> None:
    lines = [train(1, loss=1.0), train(2, loss=2.0), train(3, loss=3.0), validation(2, loss=9.0)]
    lines += [train(2, loss=20.0, attempt=1), validation(2, loss=8.0, attempt=1)]
    add(tmp_path, *lines)
    trained, validated = read_metrics(tmp_path / "metrics.jsonl")
    assert [(one["update"], one["loss"]) for one in trained] == [(1, 1.0), (2, 20.0)]  # 3 is repeated
    assert [one["loss"] for one in validated] == [8.0]
    assert [one["update"] for one in latest_updates(tmp_path / "metrics.jsonl")] == [2]


def test_plain_lines_are_about_ten_a_run_with_the_first_and_the_last(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shown = followed(
        run,
        lambda: None,
        lambda: add(run, *map(train, range(1, 51)), validation(50), train(51)[:-9]),
        lambda: add(run, train(51)[-9:], *map(train, range(52, 101))),
        lambda: add(run, validation(100, loss=2.25, metrics={})),
    )
    assert shown[0] == "update 1/100  epoch 0.03  loss 3.21  lr 1.0e-3  128 samples/s  0:50 left"
    assert [line.split()[1] for line in shown if "validation" not in line] == [
        f"{update}/100" for update in (1, *range(10, 101, 10))
    ]
    assert shown[6] == "update 50/100  validation loss 2.5  accuracy 0.75"
    assert shown[-1] == "update 100/100  validation loss 2.25"


def test_a_run_that_ends_early_shows_its_last_update_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shown = followed(run, lambda: add(run, *map(train, range(1, 24))))
    assert [line.split()[1] for line in shown] == ["1/100", "10/100", "20/100", "23/100"]
    assert followed(make_run(tmp_path / "silent"), lambda: None) == []


def test_what_is_written_just_before_the_end_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_updates=2)

    def alive() -> bool:
        add(run, train(1), train(2))
        return False

    out = io.StringIO()
    follow(run, alive, live=False, console=Console(file=out, width=80))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/2", "2/2"]


def test_skipped_updates_are_told_then_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_updates=10)
    first = [train(1, skipped=1, loss=None, weight=0), train(2, skipped=1, loss=1e6, spike=1)]
    lines = [*first, *(train(k, skipped=1, loss=None, spike=0) for k in range(3, 7))]
    shown = followed(run, lambda: add(run, *lines))
    told = [line for line in shown if "skipped, " in line]
    assert told[0] == "update 1/10  skipped, every weight is 0"
    assert told[1:] == [
        "update 2/10  skipped, a spike of the loss",
        "update 3/10  skipped, not finite; further ones are only counted",
    ]
    assert "loss not finite" in shown[-1]
    assert "6 skipped" in shown[-1]


def test_a_restart_is_said_and_what_it_repeats_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_updates=50)
    shown = followed(
        run,
        lambda: add(run, *map(train, range(1, 20)), train(20, skipped=1)),
        lambda: add(run, *(train(k, attempt=1) for k in range(11, 23)), train(50, attempt=0)),
    )
    assert "attempt 1: goes on with update 11/50" in shown
    assert shown[-1].startswith("update 22/50")
    assert "skipped" not in shown[-1]


def test_what_stood_there_before_is_not_shown_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add(run, *map(train, range(1, 41)), validation(40))
    shown = followed(run, lambda: add(run, train(41, attempt=1)))
    assert [line.split("  ")[0] for line in shown] == ["attempt 1: goes on with update 41/100", "update 41/100"]


@pytest.mark.parametrize("width", [None, 80])
def test_a_resumed_run_shows_nothing_of_what_it_repeats(tmp_path: Path, width: int | None) -> None:
    run = make_run(tmp_path / "run", state="submitted", update=20, attempt=1)
    add(run, *(train(k, skipped=int(k in (5, 31)), loss=9.87) for k in range(1, 41)))
    shown = followed(
        run, lambda: None, lambda: add(run, *(train(k, attempt=1) for k in range(21, 24))), lambda: None, width=width
    )
    text = "\n".join(shown)
    assert "9.87" not in text
    assert "40/100" not in text
    assert "attempt 1: goes on" not in text  # who resumes it has said so
    assert "1 skipped" in text  # update 5 stays, update 31 is repeated
    if width is None:
        assert [line.split("  ")[0] for line in shown] == ["update 21/100", "update 23/100"]
    else:
        assert "20/100" in text
        assert "23/100" in [line for line in shown if "/100" in line][-1]


@pytest.mark.parametrize("width", [None, 80])
def test_a_resumed_run_that_ends_at_once_shows_no_old_numbers(tmp_path: Path, width: int | None) -> None:
    run = make_run(tmp_path / "run", state="submitted", update=20, attempt=1)
    add(run, *(train(k, loss=9.87) for k in range(1, 41)))
    assert "9.87" not in "".join(followed(run, lambda: None, width=width))


def test_attempts_are_counted_on_from_what_is_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert next_attempt(metrics) == 0
    add(tmp_path, train(1), train(2, attempt=3), validation(2, attempt=3))
    assert next_attempt(metrics) == 4
    add(tmp_path, *(train(k, attempt=3) for k in range(3, 2000)), '{"kind": "train", "att')
    assert next_attempt(metrics) == 4


def test_a_line_that_was_torn_does_not_take_the_next_attempts_first_with_it(tmp_path: Path) -> None:
    from launcher.observe.metrics import MetricsFile  # and with it torch

    metrics = tmp_path / "metrics.jsonl"
    add(tmp_path, train(1), train(2)[:30])
    file = MetricsFile(metrics, attempt=1)
    file.train(update=2, loss=7.0)
    file.close()
    assert [(one["update"], one["attempt"]) for one in read_metrics(metrics)[0]] == [(1, 0), (2, 1)]


def test_the_plan_may_say_how_many_updates_only_later(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_updates=None, updates_per_epoch=None)
    plan = json.dumps({"num_updates": 2, "updates_per_epoch": 4})

    def complete() -> None:
        (run / "plan.json").write_text(plan)
        add(run, train(2))

    shown = followed(run, lambda: add(run, train(1)), complete)
    assert shown[0].startswith("update 1  epoch 0.03  ")
    assert shown[1].startswith("update 2/2  epoch 0.50  ")


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_starts_and_ends_where_it_should(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run", num_updates=20)
    shown = followed(
        run,
        lambda: None,
        lambda: add(run, *map(train, range(1, 6)), validation(5)),
        lambda: add(run, *map(train, range(6, 23))),
        width=width,
    )
    text = "\n".join(shown)
    assert "starting ranks" in text
    assert "validation loss 2.5  accuracy 0.75" in text
    assert "21/20" not in text
    last = [line for line in shown if "/20" in line][-1]
    for part in ("training", "20/20", "100%", "loss 3.21", "128 samples/s", "0:00 left"):
        assert part in last
    assert ("lr 1.0e-3" in last) == (width == 120)


def test_of_many_numbers_the_first_are_shown() -> None:
    assert some([]) == "[]"
    assert some(list(range(10))) == str(list(range(10)))
    assert some(list(range(1000))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …] (1000 in all)"


def test_numbers_as_people_read_them() -> None:
    assert [duration_text(one) for one in (None, 0, 59.6, 130, 3723, 90000)] == [
        "-", "0:00", "1:00", "2:10", "1:02:03", "1 day 1:00:00",
    ]  # fmt: skip
    assert [lr_text(one) for one in (None, 0.0, 1e-3, 0.5, 3e-12)] == ["-", "0", "1.0e-3", "5.0e-1", "3.0e-12"]
    assert [rate_text(one) for one in (None, 0.25, 61.4, 12345.0)] == [
        "-", "0.25 samples/s", "61 samples/s", "12,345 samples/s",
    ]  # fmt: skip


@pytest.mark.parametrize("num_updates", [0, 1, 10, 200])
def test_the_loss_is_drawn_whatever_there_is(tmp_path: Path, num_updates: int) -> None:
    for update in range(1, num_updates + 1):
        add(tmp_path, train(update, loss=None if update == 3 else 5.0 / update))
    add(tmp_path, validation(max(1, num_updates)))
    out = tmp_path / "loss.png"
    out.write_text("an older one")
    draw_loss(tmp_path / "metrics.jsonl", out, baseline=3.0, title="costs $5_a $", unit="nats per token")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert int.from_bytes(out.read_bytes()[PNG_WIDTH], "big") == 960
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "metrics.jsonl"}


def test_no_metrics_and_no_baseline_is_an_empty_picture(tmp_path: Path) -> None:
    draw_loss(tmp_path / "none.jsonl", tmp_path / "loss.png", baseline=None, title="nothing")
    assert (tmp_path / "loss.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise OSError(28, 'No space left on device')", "OSError: [Errno 28] No space left on device"),
        ("import sys; sys.modules[__name__] = None", "ModuleNotFoundError: "),
    ],
)
def test_a_library_that_draws_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, said: str
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "matplotlib.py").write_text(f"{module}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "loss.png"
    told = try_to_draw(tmp_path / "none.jsonl", out, baseline=None, title="nothing")
    sys.modules.pop("matplotlib", None)
    assert told is not None
    assert told.startswith(f"{out}: {said}")
    assert not out.exists()


def test_status_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", update=8, applied=7, attempt=1)
    add(run, *(train(k, attempt=0, seconds=9.0) for k in range(1, 12)), *(train(k, attempt=1) for k in range(5, 11)))
    status = read_run(run)
    assert (status.state.value, status.update, status.num_updates, status.attempt) == ("running", 10, 100, 1)
    assert (status.samples_per_s, status.seconds_left, status.loss) == (128.0, 45.0, 3.21)
    assert not status.is_silent


def test_status_of_a_run_that_has_just_been_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", state="running", update=20, attempt=1)
    add(run, *map(train, range(1, 41)))
    status = read_run(run)
    assert (status.update, status.loss, status.samples_per_s, status.seconds_left) == (20, None, None, None)


def test_how_a_run_goes_on_is_shown_where_it_can(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    stopped = make_run(sweep / "0 stopped", state="stopped", exit_code=75, update=60, attempt=2)
    checkpoint(stopped, 40)
    checkpoint(stopped, 60)
    checkpoint(stopped, 80, size=4)  # cut off
    make_run(sweep / "1", state="failed", exit_code=3, error={"rank": 0, "reason": "broken"})
    checkpoint(make_run(sweep / "2", state="running"), 20)
    checkpoint(make_run(sweep / "3", state="finished", exit_code=0, update=100), 100)
    checkpoint(make_run(sweep / "4", state="running", heartbeat=time.time() - 100), 20)
    out = io.StringIO()
    render_status(sweep, Console(file=out, width=80))
    said = [line for line in out.getvalue().splitlines() if "goes on from" in line]
    assert said == [
        f"1: goes on from the beginning (no checkpoint): launcher resume {sweep}/1",
        f"4: goes on from update 20/100: launcher resume {sweep}/4",
        f"0 stopped: goes on from update 60/100: launcher resume '{sweep}/0 stopped'",
    ]
    assert "attempt" in out.getvalue().splitlines()[0]


def test_a_run_that_has_only_been_planned(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_updates=None)
    (run / "status.json").unlink()
    status = read_run(run)
    assert (status.state.value, status.update, status.loss, status.seconds_left) == ("planned", 0, None, None)
    assert rendered(run)


def rendered(folder: Path) -> str:
    out = io.StringIO()
    render_status(folder, Console(file=out, width=120))
    return out.getvalue()


def test_silence_of_a_running_run_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", heartbeat=time.time() - 130)
    assert "no sign of life for 2:1" in rendered(run)
    done = make_run(tmp_path / "done", state="finished", exit_code=0, update=100, heartbeat=time.time() - 9000)
    assert "no sign" not in rendered(done)
    assert "finished" in rendered(done)


def test_status_of_a_sweep_is_a_row_for_each_run(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        make_run(tmp_path / "sweep" / str(number), update=number)
    error = {"rank": 1, "reason": "killed by SIGKILL [9]"}
    make_run(tmp_path / "sweep" / "group" / "one", state="failed", exit_code=3, error=error)
    torn = make_run(tmp_path / "sweep" / "torn")
    (torn / "status.json").write_text("{")
    make_run(tmp_path / "sweep" / "much" / "too" / "deep" / "one")
    names = [str(path.relative_to(tmp_path / "sweep")) for path in find_runs(tmp_path / "sweep")]
    assert names == ["0", "2", "10", "group/one", "torn"]
    text = rendered(tmp_path / "sweep")
    assert "10/100" in text
    assert "group/one: failed (exit 3): rank 1: killed by SIGKILL [9]" in text
    assert "unreadable" in text
    assert "torn: " in text


@pytest.mark.parametrize("damaged", ["status", "metrics", "loss", "plan"])
def test_a_damaged_run_is_one_row_among_the_others(tmp_path: Path, damaged: str) -> None:
    make_run(tmp_path / "sweep" / "whole", update=3)
    more: dict[str, Any] = {"status": {"reached": {"update": 3}}, "metrics": {"noise_scale_every_updates": 1}}
    run = make_run(tmp_path / "sweep" / "damaged", update=3, **more.get(damaged, {}))
    if damaged != "status":
        broken: dict[str, Any] = {"metrics": {"critical_batch": 8.0}, "loss": {"loss": "?"}, "plan": {}}[damaged]
        add(run, train(3, **broken))
    if damaged == "plan":
        plan = json.loads((run / "plan.json").read_text())
        (run / "plan.json").write_text(json.dumps(plan | {"num_updates": "many"}))
    text = rendered(tmp_path / "sweep")
    assert "3/100" in text
    assert "unreadable" in text
    assert "damaged: its files are damaged" in text.replace("\n", " ")
    with pytest.raises(LauncherError, match="damaged: its files are damaged"):
        rendered(run)


def test_the_table_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    for name in ("a-name-of-a-run-that-is-rather-long_2026-11-29_17-33-30-b2b41e", "b[x]"):
        make_run(tmp_path / "sweep" / name, update=100)
        add(tmp_path / "sweep" / name, train(100, loss=0.0012345678, seconds=0.001))
    out = io.StringIO()
    render_status(tmp_path / "sweep", Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "state", "update", "loss", "rate", "left", "heartbeat"]
    for text in ("running", "100/100", "0.001235", "64,000 samples/s", "0:00 ago", "b[x]"):
        assert text in out.getvalue()
    folded = "".join(line[: lines[0].index("state")].strip() for line in lines[1:])
    assert folded == "a-name-of-a-run-that-is-rather-long_2026-11-29_17-33-30-b2b41eb[x]"
    make_run(tmp_path / "sweep" / "c", attempt=1)
    assert "attempt" in rendered(tmp_path / "sweep")


def test_a_folder_without_a_run_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="no such folder"):
        rendered(tmp_path / "nowhere")
    with pytest.raises(LauncherError, match=r"no run here: a run's folder holds plan\.json"):
        rendered(tmp_path)
    run = make_run(tmp_path / "run", state="dreaming")
    with pytest.raises(LauncherError, match="unknown state 'dreaming'"):
        rendered(run)


def test_status_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "here-it-is")
    monkeypatch.chdir(tmp_path / "here-it-is")
    assert "here-it-is" in rendered(Path("."))


def test_in_a_ramp_the_time_left_counts_samples() -> None:
    record = {"seconds": 2.0, "samples": 8, "epoch": 0.5}
    plan = {"num_updates": 30, "num_samples": 300, "samples_per_epoch": 100}
    assert seconds_left(plan, 20, [record]) == 20.0  # 10 updates of 2 seconds
    assert seconds_left({**plan, "ramp": [{}]}, 20, [record]) == 62.5  # 250 samples, 4 a second
    assert seconds_left({**plan, "ramp": [{}]}, 30, [{**record, "epoch": 3.0}]) == 0.0
    assert seconds_left({"num_updates": None}, 20, [record]) is None
    assert seconds_left(plan, 20, []) is None


def test_the_last_critical_batch_is_found_however_far_back(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", noise_scale_every_updates=50)
    batch = {"critical_batch": 512.0, "critical_batch_error": 12.0}
    add(run, train(1, **batch), train(2, **batch))
    add(run, *(train(update, critical_batch=None) for update in range(3, 2000)))
    assert len(latest_updates(run / "metrics.jsonl")) < 1000, "it doesn't lie in the end that is read anyway"
    found = latest_with(run / "metrics.jsonl", "critical_batch", 0)
    assert found is not None
    assert found["update"] == 2
    assert read_run(run).critical_batch.startswith("critical batch 512 ± 12 (samples")
    assert latest_with(run / "metrics.jsonl", "critical_batch", 1) is None, "an attempt that is past"
    assert latest_with(run / "nothing", "critical_batch", 0) is None
