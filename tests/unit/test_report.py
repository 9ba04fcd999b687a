"""The report of a sweep: noise, groups, the verdict, and the three files, from fabricated runs."""

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from fabricated import run, sweep

from launcher.cli import main
from launcher.errors import LauncherError
from launcher.report.curves import mean_curve
from launcher.report.group import families, kind_of_loss
from launcher.report.noise import Sample, compare, t_quantile
from launcher.report.read import Curve, Run, read
from launcher.report.verdict import Judgement, Verdict, judge, samples_to
from launcher.report.words import details, headline, mean_text, unfinished
from launcher.report.write import html, markdown, report, write_report

TABLE = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 10: 1.812, 30: 1.697, 100: 1.660}
"""NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: upper critical values of Student's t, 0.95."""


def seeds(rule: str, batch: int, losses: list[float | None], **how: Any) -> list[tuple[str, dict[str, Any] | None]]:
    """Members of a sweep over rules, batches and seeds, one for each final loss; None: that one diverged."""
    members: list[tuple[str, dict[str, Any] | None]] = []
    for seed, loss in enumerate(losses):
        broken = {"state": "failed", "exit_code": 4} if loss is None else {}
        values = {"batch": batch, "seed": seed, "losses": [9.0, 5.0, loss], "rule": rule, "base": 64, "updates": 3}
        overrides = f"scaling.rule={rule} batch.global_batch_size={batch} run.seed={seed}"
        members.append((overrides, values | broken | how))
    return members


def verdict(folder: Path, *groups: list[tuple[str, dict[str, Any] | None]]) -> Verdict:
    runs = read(sweep(folder, [one for group in groups for one in group])).runs
    (family,) = families(runs)
    return judge(family, kind_of_loss(runs))


@pytest.mark.parametrize(("freedom", "value"), TABLE.items())
def test_quantiles_of_t_are_those_of_the_table(freedom, value):
    assert t_quantile(0.95, freedom) == pytest.approx(value, abs=5e-4)


def test_t_between_the_lines_of_the_table():
    # with 1 degree it is Cauchy's tan(pi (p - 1/2)); with 2 it is (2p - 1) / sqrt(2p (1 - p))
    assert t_quantile(0.975, 1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-9)
    assert t_quantile(0.975, 2) == pytest.approx(0.95 / math.sqrt(2 * 0.975 * 0.025), rel=1e-9)
    assert t_quantile(0.95, 2) < t_quantile(0.95, 1.5) < t_quantile(0.95, 1)


def test_welch_by_hand():
    # a: mean 3, variance 1, n 3, so 1/3; b: mean 1, variance 4, n 3, so 4/3
    # df = (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = (25/9) / (17/18) = 50/17
    found = compare(Sample((2.0, 3.0, 4.0)), Sample((-1.0, 1.0, 3.0)))
    assert found.difference == 2
    assert found.margin == pytest.approx(t_quantile(0.95, 50 / 17) * math.sqrt(5 / 3))
    assert found.margin == pytest.approx(2.37 * 1.291, abs=0.02)
    assert found.holds
    # the same spread and number on both sides: Student's test with 2n - 2 degrees
    found = compare(Sample((5.0, 6.0, 7.0)), Sample((1.0, 2.0, 3.0)))
    assert found.margin == pytest.approx(2.132 * math.sqrt(2 / 3), abs=1e-3)
    assert not found.holds


def test_a_lower_loss_holds_and_one_seed_says_nothing():
    assert compare(Sample((1.0, 1.1)), Sample((2.0, 2.1))).holds
    for one, other in (((1.0,), (2.0, 2.1)), ((1.0, 1.1), (2.0,)), ((1.0,), (2.0,))):
        assert compare(Sample(one), Sample(other)).holds is None
    assert compare(Sample((2.0, 2.0)), Sample((2.0, 2.0))).holds
    assert compare(Sample((2.1, 2.1)), Sample((2.0, 2.0))).holds is False
    assert Sample((2.0,)).standard_error is None
    assert Sample((1.0, 2.0, 3.0, 4.0)).standard_error == pytest.approx(math.sqrt((2.25 + 0.25) * 2 / 3 / 4))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((2.30, 2.31, 2.32), "2.3100 ± 0.0058"),
        ((250.0, 290.0), "270 ± 20"),
        ((2.345678,), "2.3457"),
        ((1.5, 1.5), "1.5 ± 0"),
    ],
)
def test_a_mean_has_the_digits_that_its_error_leaves(values, text):
    assert mean_text(Sample(values)) == text


def test_the_largest_batch_is_the_last_of_an_unbroken_row(tmp_path):
    found = verdict(
        tmp_path / "sweep",
        seeds("linear", 64, [2.00, 2.02, 2.01]),
        seeds("linear", 128, [2.02, 2.00, 2.03]),
        seeds("linear", 256, [2.20, 2.21, 2.22]),
        seeds("linear", 512, [2.00, 2.01, 2.02]),
        seeds("sqrt", 64, [2.00, 2.02, 2.01]),
        seeds("sqrt", 128, [1.00, 1.02, 1.01]),
        seeds("sqrt", 256, [2.01, 2.02, 2.03]),
        seeds("sqrt", 512, [2.01, None, 2.01]),
    )
    linear, root = found.series
    assert [one.judgement.value for one in linear.judged] == ["reference", "holds", "higher", "holds"]
    assert [one.judgement.value for one in root.judged] == ["holds", "holds", "holds", "diverged"]
    assert (linear.reached, root.reached, found.reached) == (128, 256, 256)
    assert "within the noise of the seeds, is 256, with scaling.rule=sqrt." in headline(found)
    said = "\n".join(details(found))
    assert "scaling.rule=linear: batch 128 holds" in said
    assert "batch 256 higher (+0.2, noise 0.017)" in said
    assert "batch 512 diverged" in said
    assert "run 22 (" in unfinished(found.family.configurations, found.kind)[0]


def test_the_reference_is_the_base_batch_where_it_was_tried(tmp_path):
    small = [("batch.global_batch_size=32", {"batch": 32, "losses": [1.0], "base": 64})]
    found = verdict(tmp_path / "a", small, seeds("linear", 64, [2.0]))
    # the two differ in what is overridden, so that one has a rule's override and the other hasn't
    assert found.family.reference_batch == 64
    other = [(one.replace("run.seed=0", ""), how) for one, how in seeds("none", 128, [2.0], base=100)]
    assert verdict(tmp_path / "b", other, seeds("none", 256, [2.0], base=100)).family.reference_batch == 128


def test_batches_below_the_reference_are_not_judged(tmp_path):
    found = verdict(
        tmp_path / "s",
        seeds("linear", 32, [9.0, 9.1]),
        seeds("linear", 64, [2.0, 2.1]),
        seeds("linear", 128, [2.0, 2.1]),
    )
    assert [one.judgement.value for one in found.series[0].judged] == ["smaller batch", "reference", "holds"]
    assert found.reached == 128


def test_at_each_batch_the_best_rate_is_judged(tmp_path):
    losses = {(0.1, 64): 2.0, (0.2, 64): 2.3, (0.1, 128): 2.3, (0.2, 128): 2.0, (0.1, 256): 2.5, (0.2, 256): 2.2}
    members = [
        (
            f"optimizer.lr={lr} batch.global_batch_size={batch} run.seed={seed}",
            {"batch": batch, "seed": seed, "losses": [loss + seed / 100], "lr": lr},
        )
        for (lr, batch), loss in losses.items()
        for seed in (0, 1)
    ]
    found = verdict(tmp_path / "s", members)
    (series,) = found.series
    assert [one.configuration.chosen for one in series.judged] == [
        ("optimizer.lr=0.1",),
        ("optimizer.lr=0.2",),
        ("optimizer.lr=0.2",),
    ]
    assert found.reached == 128
    said = "\n".join(details(found))
    assert "batch 128 with optimizer.lr=0.2 holds (0, noise" in said
    assert "Lowest loss: optimizer.lr=0.1 at batch 64 (2.0050 ± 0.0050); optimizer.lr=0.2 at batch 128" in said
    assert "chosen by the same losses" in said
    other = next(one for one in found.judged if one.configuration.batch == 64 and one.judgement is Judgement.higher)
    assert other.configuration.tuning == ("optimizer.lr=0.2",)


def test_one_seed_gives_no_verdict(tmp_path):
    found = verdict(tmp_path / "s", seeds("linear", 64, [2.0]), seeds("linear", 128, [2.0]))
    assert found.reached is None
    assert headline(found).startswith("No verdict: of the reference batch 64 one seed alone has finished")
    assert "batch 128 (0, one seed)" in details(found)[0]
    found = verdict(tmp_path / "t", seeds("linear", 64, [2.0, 2.1]), seeds("linear", 128, [2.0]))
    assert headline(found).startswith("No verdict: of no batch beside 64 have two seeds finished")


def test_a_batch_without_enough_seeds_ends_the_row(tmp_path):
    found = verdict(
        tmp_path / "s",
        seeds("linear", 64, [2.0, 2.1]),
        seeds("linear", 128, [2.0, 2.1]),
        seeds("linear", 256, [2.0]),
        seeds("linear", 512, [2.0, 2.1]),
    )
    assert found.reached == 128


def test_a_diverged_reference_gives_no_verdict(tmp_path):
    found = verdict(tmp_path / "s", seeds("linear", 64, [None, 2.0]), seeds("linear", 128, [2.0, 2.1]))
    assert "at the reference batch 64 training diverged" in headline(found)
    assert found.series[0].judged[1].judgement is Judgement.unknown


def test_a_finished_run_without_a_finite_loss_has_diverged(tmp_path):
    # metrics.jsonl and result.json have null where a loss was NaN
    found = verdict(
        tmp_path / "s",
        seeds("linear", 64, [2.0, 2.1]),
        seeds("linear", 128, [2.0, None], state="finished", exit_code=0),
    )
    assert found.series[0].judged[1].judgement is Judgement.diverged


def test_the_same_seed_counts_once(tmp_path):
    twice = [one for _ in range(2) for one in seeds("linear", 64, [2.0])]
    found = verdict(tmp_path / "s", twice, seeds("linear", 128, [2.0, 2.1]))
    assert found.reference is not None
    assert found.reference.sample("validation") == Sample((2.0,))
    assert any(line.startswith("run 1 (") and "repeats a seed" in line for line in details(found))


def test_what_trains_something_else_is_judged_apart(tmp_path):
    members = [
        (
            f"model.num_layers={layers} batch.global_batch_size={batch} run.seed={seed}",
            {"batch": batch, "seed": seed, "losses": [loss]},
        )
        for layers, loss in ((2, 3.0), (4, 2.0))
        for batch in (64, 128)
        for seed in (0, 1)
    ]
    made = report(read(sweep(tmp_path / "s", members)))
    assert [one.family.training for one in made.verdicts] == [("model.num_layers=2",), ("model.num_layers=4",)]
    assert "## model.num\\_layers=4" in markdown(made)


def test_samples_to_the_target_by_hand(tmp_path):
    found = verdict(
        tmp_path / "s",
        seeds("linear", 64, [2.0, 2.2]),
        seeds("linear", 128, [2.1, 2.3]),
    )
    assert found.target == 2.2
    larger = found.family.configurations[1]
    assert samples_to(2.2, larger.runs, "validation") == [3 * 128]
    assert samples_to(5.0, larger.runs, "validation") == [2 * 128, 2 * 128]
    text = markdown(report(read(tmp_path / "s")))
    assert "384 (1 of 2)" in text
    assert "| 1.5 s |" in text  # three updates of half a second each
    assert "| 256 |" in text  # samples a second at batch 128


def test_a_curve_is_the_mean_over_common_updates():
    one = Curve((1, 2, 3), (10, 20, 30), (1, 2, 3), (4.0, 3.0, 2.0))
    other = Curve((2, 3, 4), (20, 30, 40), (4, 6, 8), (5.0, 4.0, 3.0))
    assert mean_curve([one, other]) == Curve((2, 3), (20, 30), (3, 4.5), (4.0, 3.0))
    assert mean_curve([one, Curve((9,), (1,), (1,), (1.0,))]) == Curve()


def test_without_validation_the_training_loss_counts(tmp_path):
    members = [
        (f"batch.global_batch_size={batch} run.seed={seed}", {"batch": batch, "seed": seed, "training": [3.0, 2.0]})
        for batch in (8, 16)
        for seed in (0, 1)
    ]
    made = report(read(sweep(tmp_path / "s", members)))
    assert made.verdicts[0].kind == "training"
    assert "final training loss" in markdown(made)


def test_a_sweep_that_is_still_running(tmp_path):
    members = seeds("linear", 64, [2.0, 2.1])
    members += seeds("linear", 128, [2.0], state="running", exit_code=None)
    members += [("scaling.rule=linear batch.global_batch_size=128 run.seed=1", None)]
    made = report(read(sweep(tmp_path / "s", members)))
    text = markdown(made)
    assert "this is how it stands so far" in text
    assert "run 2 (scaling.rule=linear batch.global\\_batch\\_size=128 run.seed=0): running at update 3 of 3" in text
    assert "run 3 (scaling.rule=linear batch.global\\_batch\\_size=128 run.seed=1): not started" in text
    assert "| 1 running, 1 not started |" in text


def test_a_sweep_of_which_nothing_has_started(tmp_path):
    found = write_report(sweep(tmp_path / "s", [("optimizer.lr=0.1", None), ("optimizer.lr=0.2", None)]))
    assert headline(found.verdicts[0]) == "No run has started yet."


def test_three_files_with_everything_in_them(tmp_path, capsys):
    folder = tmp_path / "Prüfung $x$ <b>"
    members = seeds("linear", 64, [2.0, 2.1]) + seeds("linear", 128, [2.0, None], reason="bröken <i> $x_1$")
    sweep(folder, members)
    before = set(folder.iterdir())
    assert main(["report", str(folder)]) == 0
    assert {one.name for one in set(folder.iterdir()) - before} == {"report.html", "report.md", "report.png"}
    said = capsys.readouterr().out
    assert "No batch above 64 reaches the loss of batch 64." in said
    assert f"report  {folder}/report.html" in said
    page = (folder / "report.html").read_text()
    assert "Sweep Prüfung $x$ &lt;b&gt;" in page
    assert "<b>" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "diverged" in page
    png = (folder / "report.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1000
    assert height > 800
    assert "Prüfung" in (folder / "report.md").read_text()


def test_one_run_has_a_report_that_says_so(tmp_path):
    run(tmp_path / "one", batch=64, losses=[3.0, 2.5])
    made = write_report(tmp_path / "one")
    assert headline(made.verdicts[0]) == "One global batch size was tried, 64: there is no other to compare."
    assert "# Run one" in (tmp_path / "one" / "report.md").read_text()


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.2]])
def test_a_sweep_of_one_batch(tmp_path, losses):
    made = write_report(sweep(tmp_path / "s", seeds("linear", 64, losses)))
    assert "there is no other to compare" in headline(made.verdicts[0])


def test_runs_of_different_length_are_drawn_and_named(tmp_path):
    short = (
        seeds("linear", 64, [2.0, 2.1]),
        seeds("linear", 128, [2.0, 2.1], training=[5.0, 4.0, 3.0, 2.0, 2.0], updates=5),
    )
    made = write_report(sweep(tmp_path / "s", [*short[0], *short[1]]))
    assert any("different numbers of samples, 192 to 640" in line for line in details(made.verdicts[0]))


def test_torn_and_missing_lines_are_said(tmp_path):
    folder = sweep(tmp_path / "s", seeds("linear", 64, [2.0, 2.1, 2.2]))
    torn = folder / "0" / "metrics.jsonl"
    lines = torn.read_text().splitlines(keepends=True)
    torn.write_text("".join([lines[0], lines[1], lines[2][:20] + "\n", *lines[3:]]))  # the second update's
    (folder / "1" / "metrics.jsonl").write_text(torn.read_text()[:30])  # not one whole line
    (folder / "2" / "metrics.jsonl").unlink()
    made = write_report(folder)
    assert [line for line in made.notes if "no line" in line] == [
        "run 0 (scaling.rule=linear batch.global_batch_size=64 run.seed=0): 1 update has no line in metrics.jsonl; its "
        "samples and its time leave them out"
    ]
    assert made.source.runs[0].samples == 2 * 64
    assert made.source.runs[1].curves["training"] == Curve()
    assert made.verdicts[0].reference is not None
    assert made.verdicts[0].reference.sample("validation") == Sample((2.0, 2.1, 2.2))


def test_a_run_that_can_not_be_read_is_named(tmp_path):
    folder = sweep(tmp_path / "s", seeds("linear", 64, [2.0, 2.1]))
    (folder / "1" / "plan.json").write_text("{")
    made = write_report(folder)
    assert any("run 1 (" in note and "can't be read" in note for note in made.notes)


def test_a_sweep_that_was_moved(tmp_path):
    folder = sweep(tmp_path / "here", seeds("linear", 64, [2.0, 2.1]))
    folder.rename(tmp_path / "there")
    assert [one.losses for one in read(tmp_path / "there").runs] == [
        {"training": 2.0, "validation": 2.0},
        {"training": 2.1, "validation": 2.1},
    ]


def test_a_run_that_went_on_after_the_sweep_counts(tmp_path):
    folder = sweep(tmp_path / "s", seeds("linear", 64, [2.0]))
    record = json.loads((folder / "sweep.json").read_text())
    record["members"][0] |= {"state": "failed", "exit_code": 3, "error": "lost"}
    (folder / "sweep.json").write_text(json.dumps(record))
    (one,) = read(folder).runs
    assert (one.state, one.exit_code, one.reason) == ("finished", 0, None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "no sweep and no run here"),
        (lambda folder: run(folder / "a", batch=1, losses=[1.0]), "no sweep and no run here"),
        (lambda folder: (folder.mkdir(), (folder / "sweep.json").touch()), "the sweep is just being started"),
        (lambda folder: (folder.mkdir(), (folder / "sweep.json").write_text("[]")), "can't be read"),
    ],
)
def test_a_folder_without_a_sweep_is_refused(tmp_path, make, said, capsys):
    make(tmp_path / "s")
    assert main(["report", str(tmp_path / "s")]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(LauncherError):
        read(tmp_path / "s")


def test_marks_of_markdown_and_html_are_text(tmp_path):
    name = "+data.note=a|b*<i>"
    made = report(read(sweep(tmp_path / "s", [(name, {"batch": 2, "losses": [1.0]})])))
    assert "## +data.note=a\\|b\\*\\<i\\>" in markdown(made)
    assert "<h2>+data.note=a|b*&lt;i&gt;</h2>" in html(made, b"")


def test_a_run_is_named_by_its_overrides():
    assert Run(3, ("a=1", "b=2"), Path(), "planned").name == "run 3 (a=1 b=2)"
