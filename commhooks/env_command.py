"""``commhooks env``: every knob, its value and where the value came from; also the README's table of them.

Where in the flow: a command; reads the table in ``config`` and the environment.
"""

from __future__ import annotations

import argparse
import json
import os

from commhooks.config import KNOBS, Config, Knob
from commhooks.tables import aligned, markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of the README instead of the values"
    )


def main(namespace: argparse.Namespace) -> int:
    """Print the knobs; a bad or unknown variable is an error, as it would be in training."""
    if namespace.markdown:
        print(markdown_table())
        return 0
    config = Config.load({}, os.environ)
    if namespace.json:
        print(json.dumps([_as_json(row, config) for row in KNOBS], indent=2))
    else:
        print(aligned(("variable", "value", "from", "valid"), [_as_line(row, config) for row in KNOBS]))
    return 0


def markdown_table() -> str:
    """The README's table, exactly."""
    header = ("Setting", "Variable", "Valid", "Default", "Equal on all ranks", "Meaning")
    return markdown(header, [_as_markdown(row) for row in KNOBS])


def _source(row: Knob, config: Config) -> str:
    source = config.sources[row.name]
    return "environment" if source == row.env else source


def _as_json(row: Knob, config: Config) -> dict[str, object]:
    return {
        "name": row.name,
        "env": row.env,
        "value": getattr(config, row.name),
        "source": _source(row, config),
        "default": row.default,
        "unit": row.unit,
        "valid": row.kind.form,
        "must_agree": row.agree,
        "meaning": row.meaning,
    }


def _as_line(row: Knob, config: Config) -> tuple[str, str, str, str]:
    value = getattr(config, row.name)
    unit = row.unit if value is not None else ""
    return row.env, f"{row.kind.show(value)} {unit}".strip(), _source(row, config), row.kind.form


def _as_markdown(row: Knob) -> tuple[str, ...]:
    form = row.kind.form + (f" ({row.unit})" if row.unit else "")
    default = row.kind.show(row.default)
    return (
        f"`{row.name}`",
        f"`{row.env}`",
        form.replace(" | ", ", "),
        "unset" if default == "-" else f"`{default}`",
        "yes" if row.agree else "",
        row.meaning,
    )
