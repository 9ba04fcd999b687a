"""The reference of every key, made of the schema and conf/.

``python -m launcher.config.reference > docs/configuration.md``
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import MISSING, OmegaConf

from launcher.config.compose import conf_dir
from launcher.config.decays import DECAYS
from launcher.config.messages import GROUPS, words
from launcher.config.schema import SECTIONS, Config, GroupConfig, RampConfig

_INTRO = """\
# Configuration

Made of `launcher/config/schema.py` and `conf/` by `python -m launcher.config.reference`; a test holds it current.

A key is set on the command line as `key=value`: `batch.global_batch_size=256`. A group is chosen by the name of a file:
`data=text`; the keys below it are set like any other. A key that isn't there yet is added with `+key=value`, one that
is open is taken out with `~key`. `--config-dir FOLDER` adds groups and files of your own.

A **duration** is `90 epochs`, `2000 updates`, `1e9 tokens`, `1e6 samples` or `10%` (of the training duration); a bare
integer is updates. A **time** is `90 seconds`, `10 minutes`, `2 hours`, `1 days` or `1:30:00`; a bare number is
seconds.

`${oc.env:NAME}` stands for an environment variable. It stays a reference in every file of a run and is resolved on each
rank, so that a secret is never written; a number takes `${oc.decode:${oc.env:NAME}}`, on
the command line in quotes of its own (`'run.seed="${oc.decode:${oc.env:NAME}}"'`). Everything else is settled once,
where the command is given. Relative paths (keys that end in path, root, file, folder, dir or directory) are those of
the folder where the command is given.
"""


def render() -> str:
    """The whole reference as Markdown."""
    parts = [_INTRO, _groups(), _open_sections(), *(_section(name, kind) for name, kind in SECTIONS.items())]
    return "\n".join(parts)


def documented(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass of the schema, in one line; of a parent's fields the parent's."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if is_dataclass(one):
            found |= _docstrings(one)
    return found


def _docstrings(kind: type) -> dict[str, str]:
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            text = after.value.value if isinstance(after.value, ast.Constant) else None
            found[node.target.id] = " ".join(str(text).split()) if text else ""
    return found


def default(field: "Field[Any]") -> Any:
    """The default of a field; MISSING where a value must be given."""
    if field.default_factory is not NO_DEFAULT:
        return field.default_factory()
    return MISSING if field.default is NO_DEFAULT else field.default


def _section(name: str, kind: type) -> str:
    text = f"## {name}\n\n{_table(list(_rows(name, kind)))}"
    if name == "batch":
        text += "\n" + _table(list(_rows("batch.ramp[i]", RampConfig)))
    if name != "schedule":
        return text
    for decay in DECAYS:
        rows = [row for row in _rows("schedule.decay", decay) if not row.startswith("| `schedule.decay.name`")]
        text += f"\n### schedule/decay={decay().name}\n\n" + (_table(rows) if rows else "No keys of its own.\n")
    return text


def _rows(prefix: str, kind: type) -> Iterator[str]:
    hints, texts = get_type_hints(kind), documented(kind)
    for field in fields(kind):
        key, hint, value = f"{prefix}.{field.name}", hints[field.name], default(field)
        is_section = isinstance(hint, type) and is_dataclass(hint)
        given = "" if is_section or value == MISSING else f"`{_spelt(value)}`"
        kinds = "a section" if is_section else words(hint) or "see the meaning"
        yield f"| `{key}` | {kinds} | {given} | {texts.get(field.name, '')} |"
        if is_dataclass(value):
            yield from _rows(key, hint)


def _table(rows: list[str]) -> str:
    return "\n".join(["| key | a value is | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _spelt(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Enum):
        return str(value.name)
    if isinstance(value, list):
        return "[" + ",".join(map(_spelt, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _groups() -> str:
    chosen: dict[str, str] = {}
    changes: Any = OmegaConf.load(conf_dir() / "config.yaml")
    for one in changes.pop("defaults"):
        chosen |= one if not isinstance(one, str) else {}
    changes.pop("hydra")
    rows = ["## Groups", "", "| group | choice | what it is |", "|---|---|---|"]
    for group in GROUPS:
        for path in sorted((conf_dir() / group).glob("*.yaml")):
            name = f"**`{path.stem}`** (default)" if chosen.get(group) == path.stem else f"`{path.stem}`"
            rows.append(f"| `{group}` | {name} | {_choice(group, path)} |")
    rows += [
        "",
        "Without any override, `conf/config.yaml` also sets:",
        "",
        "```yaml",
        OmegaConf.to_yaml(changes) + "```",
        "",
    ]
    return "\n".join(rows)


def _choice(group: str, path: Path) -> str:
    """The comment at the head of a file of a group, else its target."""
    text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
    lines = text.splitlines()
    count = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if count:
        return " ".join(line.removeprefix("#").strip() for line in lines[:count])
    content: Any = OmegaConf.load(path)
    target = content.get("_target_")
    return f"`{target}`" if target else f"see [{group.split('/')[0]}](#{group.split('/')[0]})"


def _open_sections() -> str:
    texts = documented(Config)
    rows = list(_rows("optimizer.groups[i]", GroupConfig))
    return "\n".join(
        [
            "## model, task, optimizer and data sets",
            "",
            "Each has a `_target_`, the dotted path of a class or function, and its arguments as further keys, checked",
            "against its signature before anything starts. An argument that isn't in the chosen file is added with",
            "`+key=value`.",
            "",
            f"- `optimizer`: {texts['optimizer']}",
            f"- `model_weights`: {texts['model_weights']}",
            "",
            _table(rows),
        ]
    )


if __name__ == "__main__":
    print(render(), end="")
