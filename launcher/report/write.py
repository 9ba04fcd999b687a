"""report.html, report.md and report.png in the folder of a sweep or a run."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from launcher.observe.plot import SMOOTHED, write_picture
from launcher.report.critical import CRITICAL
from launcher.report.draw import MOST_DRAWN, draw
from launcher.report.group import families, kind_of_loss
from launcher.report.read import Source, read
from launcher.report.table import Table, table
from launcher.report.verdict import Verdict, judge
from launcher.report.words import RULE, TARGET, TIME, details, headline, title, unfinished
from launcher.run_dir import write_atomic

HTML, MARKDOWN, PICTURE = "report.html", "report.md", "report.png"

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 1280px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; }
h2 { font-size: 1.15em; margin-top: 1.8em; overflow-wrap: anywhere; }
.folder { color: #666; overflow-wrap: anywhere; margin-top: 0.2em; }
.verdict { font-size: 1.1em; border-left: 4px solid #31688e; padding: 0.4em 0 0.4em 0.9em; margin: 1em 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.87em; }
th, td { text-align: right; padding: 0.35em 0.6em; border-bottom: 1px solid #e2e2e2; vertical-align: top; }
td { white-space: nowrap; }
td.text:not(.judged) { white-space: normal; min-width: 6em; }
th { vertical-align: bottom; border-bottom: 2px solid #999; font-weight: 600; }
th.text, td.text { text-align: left; }
tr.reference { background: #f1f3f5; }
tr.holds td.judged { color: #1a7f37; }
tr.higher td.judged, tr.diverged td.judged { color: #b42318; }
img { max-width: 100%; height: auto; }
li { overflow-wrap: anywhere; }
.notes { color: #555; font-size: 0.92em; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="folder">$folder</p>
$sections
<h2>Curves</h2>
<img alt="loss against samples and time; final loss against the batch" src="data:image/png;base64,$picture">
<h2>How to read this</h2>
<ul class="notes">
$notes
</ul>
</body>
</html>
""")


@dataclass(frozen=True)
class Report:
    """What both texts say."""

    source: Source
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]


def write_report(folder: Path) -> Report:
    """Writes the three files of the report of the sweep or the run in `folder`, from what its runs have left.

    Raises:
        LauncherError: there is neither.
        StorageError: a file can't be written.
    """
    made = report(read(folder))
    where = made.source.folder
    picture = draw(made.verdicts, title(made.source))
    write_picture(where / PICTURE, picture)
    write_atomic(where / MARKDOWN, markdown(made))
    write_atomic(where / HTML, html(made, picture))
    return made


def report(source: Source) -> Report:
    """What there is to say of the runs."""
    kind = kind_of_loss(source.runs)
    verdicts = tuple(judge(family, kind) for family in families(source.runs))
    smoothing = "" if kind == "validation" else f", smoothed over a {SMOOTHED}th of the updates,"
    notes = [RULE] if len(source.runs) > 1 else []
    notes += [TARGET.format(kind=kind, smoothing=smoothing), TIME, *source.notes]
    notes += [CRITICAL] if any(run.critical_batch for run in source.runs) else []
    notes += [f"The curves of the first {MOST_DRAWN} are drawn."] if len(verdicts) > MOST_DRAWN else []
    return Report(source, verdicts, tuple(notes))


def markdown(made: Report) -> str:
    """The report as Markdown, beside its picture."""
    lines = [f"# {_plain(title(made.source))}", "", f"`{made.source.folder}`", ""]
    for verdict in made.verdicts:
        if verdict.family.training:
            lines += [f"## {_plain(' '.join(verdict.family.training))}", ""]
        lines += [f"**{_plain(headline(verdict))}**", ""]
        lines += [f"- {_plain(one)}" for one in details(verdict)]
        lines += ["", *_markdown_table(table(verdict)), ""]
        lines += [f"- {_plain(one)}" for one in unfinished(verdict.family.configurations, verdict.kind)]
        lines.append("")
    lines += ["## Curves", "", f"![loss against samples, time and batch]({PICTURE})", "", "## How to read this", ""]
    lines += [f"- {_plain(one)}" for one in made.notes]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text in which Markdown finds nothing to mark."""
    for character in "\\`*_[]<>|#":
        text = text.replace(character, f"\\{character}")
    return text


def _markdown_table(made: Table) -> list[str]:
    rows = [made.headings, *(cells for cells, _ in made.rows)]
    lines = ["| " + " | ".join(map(_plain, cells)) + " |" for cells in rows]
    rule = "|" + "|".join("---" if one else "---:" for one in made.is_text) + "|"
    return [lines[0], rule, *lines[1:]]


def html(made: Report, picture: bytes) -> str:
    """The report as one page without any other file."""
    sections = []
    for verdict in made.verdicts:
        name = " ".join(verdict.family.training)
        sections += [f"<h2>{escape(name)}</h2>"] if name else []
        sections.append(f'<p class="verdict">{escape(headline(verdict))}</p>')
        sections += _list(details(verdict))
        sections += _html_table(table(verdict))
        sections += _list(unfinished(verdict.family.configurations, verdict.kind))
    return PAGE.substitute(
        title=escape(title(made.source)),
        folder=escape(str(made.source.folder)),
        sections="\n".join(sections),
        picture=base64.b64encode(picture).decode(),
        notes="\n".join(f"<li>{escape(one)}</li>" for one in made.notes),
    )


def _list(lines: Sequence[str]) -> list[str]:
    return ["<ul>", *(f"<li>{escape(one)}</li>" for one in lines), "</ul>"] if lines else []


def _html_table(made: Table) -> list[str]:
    kinds = [' class="text"' if one else "" for one in made.is_text]
    judged = next((index for index, one in enumerate(made.headings) if one.startswith("against ")), -1)
    head = "".join(f"<th{kind}>{escape(one)}</th>" for one, kind in zip(made.headings, kinds, strict=True))
    lines = ['<div class="scroll"><table>', f"<tr>{head}</tr>"]
    for cells, judgement in made.rows:
        marks = [' class="text judged"' if index == judged else kind for index, kind in enumerate(kinds)]
        row = "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(cells, marks, strict=True))
        lines.append(f'<tr class="{escape(judgement)}">{row}</tr>')
    return [*lines, "</table></div>"]
