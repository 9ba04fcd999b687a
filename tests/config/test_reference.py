"""The reference is current, every key is explained, and a default stands once."""

import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from launcher.config.compose import conf_dir
from launcher.config.decays import DECAYS
from launcher.config.messages import GROUPS, schema_keys
from launcher.config.reference import default, documented, render
from launcher.config.schema import SECTIONS, Config, GroupConfig

CHECKOUT = Path(__file__).parents[2]
DOCS = [CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")]


def test_the_reference_is_current():
    written = (CHECKOUT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == render(), "python -m launcher.config.reference > docs/configuration.md"


def test_the_reference_holds_every_key_and_every_choice():
    text = render()
    missing = [key for key in schema_keys() if f"`{key}`" not in text]
    assert missing == ["schedule.decay.name"]  # the choice itself says it
    assert [group for group in GROUPS if f"`{group}`" not in text] == []


def _dataclasses():
    found = [*SECTIONS.values(), *DECAYS, GroupConfig]
    for kind in found:
        found += [value.__class__ for one in fields(kind) if is_dataclass(value := default(one))]
    return found


@pytest.mark.parametrize("kind", _dataclasses())
def test_every_key_has_its_meaning_under_it(kind):
    texts = documented(kind)
    assert [one.name for one in fields(kind) if not texts.get(one.name)] == []


def test_every_section_is_a_field_of_the_configuration():
    names = {one.name for one in fields(Config)}
    assert names == {*SECTIONS, "model", "task", "optimizer", "model_weights"}


def test_every_folder_of_conf_is_a_known_group():
    folders = {str(path.parent.relative_to(conf_dir())) for path in conf_dir().rglob("*.yaml")} - {"."}
    assert folders == set(GROUPS)


def test_a_file_that_names_a_schema_has_another_name_than_it():
    stems = {path.stem for path in conf_dir().rglob("*.yaml")}
    assert not [stem for stem in stems if stem.endswith("_schema")]
    for decay in DECAYS:
        file = conf_dir() / "schedule" / "decay" / f"{decay().name}.yaml"
        assert OmegaConf.load(file)["defaults"][0] == f"{decay().name}_schema"


def test_every_list_that_is_shown_is_taken_as_a_shell_hands_it_on():
    shown = [span for path in DOCS for span in re.findall(r"`([^`\n]*=\[[^`\n]*)`", path.read_text(encoding="utf-8"))]
    assert len(shown) > 10
    for span in shown:
        OverridesParser.create().parse_overrides(shlex.split(span))
    texts = " ".join(text for kind in _dataclasses() for text in documented(kind).values())
    assert re.findall(r"`\[[^\]`]+\]`", texts) == []  # with its key, so that a shell's quotes can be shown


def _schema_at(key: str):
    section, *names = key.split(".")
    value = SECTIONS.get(section)
    if value is None:
        return None
    value = value()
    for name in names:
        value = getattr(value, name, None)
    return value


def _leaves(node, prefix):
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: str(path.relative_to(conf_dir())))
def test_no_file_repeats_a_default_of_the_schema(path):
    package = "" if path.parent == conf_dir() else str(path.parent.relative_to(conf_dir())).replace("/", ".") + "."
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    values.pop("defaults", None)
    known = set(schema_keys())
    repeated = [key for key, value in _leaves(values, package) if key in known and _schema_at(key) == value]
    assert repeated == []
