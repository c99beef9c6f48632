"""The command line: finding commands, one-line errors, exit codes, and ``commhooks env``."""

import json
import sys
import types

import pytest

from commhooks import cli
from commhooks.config import KNOBS
from commhooks.errors import TopologyError


@pytest.fixture
def command(monkeypatch):
    """A command of this test's own, registered in the table: set its ``main``."""
    module = types.ModuleType("commhooks_test_command")
    module.add_arguments = lambda parser: parser.add_argument("word", nargs="?")
    module.main = lambda namespace: 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, cli.Command("try", module.__name__, "tries")))
    return module


def test_a_command_gets_its_arguments_and_json(command):
    seen = []
    command.main = lambda namespace: seen.append((namespace.word, namespace.json)) or 5
    assert cli.main(["try", "this", "--json"]) == 5
    assert seen == [("this", True)]


def test_a_command_can_hand_arguments_on(command):
    command.split_arguments = lambda arguments: (arguments[:1], arguments[1:])
    command.main = lambda namespace: 0 if namespace.rest == ["--json", "x"] and not namespace.json else 1
    assert cli.main(["try", "this", "--json", "x"]) == 0


def test_a_command_may_declare_json_itself(command):
    command.add_arguments = lambda parser: parser.add_argument("--json", action="store_true", help="mine")
    assert cli.main(["try", "--json"]) == 0


def test_our_errors_are_one_line_and_exit_code_two(command, capsys):
    def fail(namespace):
        raise TopologyError("rank 7 of a topology for 4")

    command.main = fail
    assert cli.main(["try"]) == 2
    assert capsys.readouterr().err == "commhooks: error: rank 7 of a topology for 4\n"


def test_an_interrupted_command_says_nothing(command, capsys):
    def interrupted(namespace):
        raise KeyboardInterrupt

    command.main = interrupted
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == ""


def test_errors_that_are_not_ours_keep_their_traceback(command):
    command.main = lambda namespace: 1 / 0
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_a_part_that_is_not_there_does_not_break_the_others(monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("gone", "commhooks.gone", "-"), *cli.COMMANDS))
    assert cli.main(["gone"]) == 2
    assert "`commhooks gone` isn't part of this installation" in capsys.readouterr().err
    assert cli.main(["env"]) == 0


def test_a_package_that_is_not_there_is_named(command, monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("needy", "needy.part", "-"),))

    def missing(name):
        raise ModuleNotFoundError(name="matplotlib")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert cli.main(["needy"]) == 2
    assert "needs the package matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["bench"], ["bench", "nonsense"]])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: commhooks" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    for arguments, level in (["--help"], cli.COMMANDS), (["bench", "--help"], cli.BENCH.commands):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert all(f"  {entry.name} " in out and entry.does in out for entry in level)


def test_env_shows_value_and_source(monkeypatch, capsys):
    monkeypatch.setenv("COMMHOOKS_SLICE_NUMEL", "50000")
    assert cli.main(["env", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {row.name for row in KNOBS}
    assert (rows["slice_numel"]["value"], rows["slice_numel"]["source"]) == (50_000, "environment")
    assert (rows["priority"]["value"], rows["priority"]["source"]) == ("layer", "default")
    assert cli.main(["env"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("COMMHOOKS_SLICE_NUMEL")
    )
    assert "50000 elements" in line and "environment" in line


def test_env_refuses_what_training_would_refuse(monkeypatch, capsys):
    monkeypatch.setenv("COMMHOOKS_SLICES", "1")
    assert cli.main(["env"]) == 2
    assert "COMMHOOKS_SLICE_NUMEL" in capsys.readouterr().err
