"""``commhooks bench all``: verdicts, what is asked of each call, and that what can't run is a row."""

import argparse
import json

import pytest

from commhooks import cli
from commhooks.bench import suite
from commhooks.bench.suite_calls import CALLS, Call, Goal, figure
from commhooks.errors import ConfigError
from commhooks.shell import Finished

PLAIN = Call("A", ("bench", "one"), (Goal("speedup", figure("speedup"), 1.5),), quick=("--few", "2"))
IN_LAB = Call("B", ("bench", "two"), (Goal("share", figure("share"), 0.2, at_least=False),), "nic:1*2")
LONG = Call("C", ("bench", "three"), (Goal("x", figure("x"), 1.0),), quick=None)


def test_a_verdict_says_by_how_much():
    most = Goal("speedup", figure("speedup"), 2.0)
    least = Goal("share", figure("share"), 0.2, at_least=False)
    assert (most.verdict(2.0), least.verdict(0.2)) == ("reached", "reached")
    assert most.verdict(1.5) == "short by 0.5 (25.0 %)"
    assert least.verdict(0.25) == "short by 0.05 (25.0 %)"
    assert Goal("x", figure("x"), 1.0, lacks="no Horovod").verdict(None) == "no Horovod"


def test_a_figure_is_found_in_its_row():
    rows = [{"policy": "bsp", "of_bsp": 1.0}, {"policy": "adsp", "of_bsp": 0.2, "none": None}]
    assert figure("of_bsp", policy="adsp")(rows) == 0.2
    assert figure("of_bsp", policy="ssp")(rows) is None and figure("none", policy="adsp")(rows) is None


def test_every_call_is_a_command_that_exists():
    for call in CALLS:
        path, command, rest = cli._find(list(call.arguments(quick=True)))
        module = cli._imported(command, " ".join(path))
        cli._parser(path, command, module).parse_args(rest)
        assert call.goals, call


def test_the_promised_numbers_are_all_there():
    numbers = {call.number for call in CALLS}
    assert numbers == {"N1", "N2", "N3", "N4", "N5", "N6", "N7", "N8", "N9", "N11", "faults"}
    first = CALLS[0].command(quick=False)
    assert first == "commhooks lab nic:200,800,800,800 -- commhooks bench allreduce --mb 25 --json"


def test_quick_replaces_an_option_that_is_there():
    call = Call("D", ("bench", "x", "--seeds", "3"), (), quick=("--seeds", "1", "--rounds", "2"))
    assert call.arguments(True) == ("bench", "x", "--seeds", "1", "--rounds", "2", "--json")
    assert call.arguments(False) == ("bench", "x", "--seeds", "3", "--json")


def conduct(monkeypatch, tmp_path, capsys, answer, calls=(PLAIN, IN_LAB, LONG), **options):
    """`main` with commands that only pretend to run."""
    ran = []

    def finished(command, limit_s):
        ran.append(" ".join(command[3:]))
        return answer(ran[-1])

    monkeypatch.setattr(suite, "_finished", finished)
    monkeypatch.setattr(suite, "CALLS", calls)
    given = {"quick": True, "json": True, "only": None, "output": str(tmp_path / "out"), **options}
    code = suite.main(argparse.Namespace(**given))
    return code, capsys.readouterr().out, ran


def good(command):
    if "echo" in command:
        return Finished(0, "eth0\n", "")
    return Finished(0, json.dumps([{"speedup": 1.6, "share": 0.1, "x": 2.0}]), "")


def test_all_in_order_and_everything_is_written_down(monkeypatch, tmp_path, capsys):
    code, out, ran = conduct(monkeypatch, tmp_path, capsys, good)
    assert code == 0
    assert [(row["number"], row["reached"], row["verdict"]) for row in json.loads(out)] == [
        ("A", 1.6, "reached"),
        ("B", 0.1, "reached"),
    ]
    assert ran[1] == "bench one --few 2 --json" and ran[2].startswith("lab nic:1*2 -- ")
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["quick"] and written["calls"][0]["figures"] == [{"speedup": 1.6, "share": 0.1, "x": 2.0}]


def test_quick_names_what_it_leaves_out(monkeypatch, tmp_path, capsys):
    code, out, _ = conduct(monkeypatch, tmp_path, capsys, good, json=False)
    assert code == 0 and "* C: `commhooks bench three --json`" in out
    code, out, ran = conduct(monkeypatch, tmp_path, capsys, good, json=False, quick=False)
    assert "Left out" not in out and "bench three --json" in ran and "bench one --json" in ran


def test_what_falls_short_fails_or_is_silent_makes_the_exit_code_1(monkeypatch, tmp_path, capsys):
    short = Finished(0, json.dumps([{"speedup": 1.2}]), "")
    code, out, _ = conduct(monkeypatch, tmp_path, capsys, lambda _: short, calls=(PLAIN,))
    assert code == 1 and json.loads(out)[0]["verdict"] == "short by 0.3 (20.0 %)"
    broken = Finished(3, "", "line\ncommhooks: error: no luck\n")
    code, out, _ = conduct(monkeypatch, tmp_path, capsys, lambda _: broken, calls=(PLAIN,))
    assert code == 1
    assert json.loads(out)[0]["verdict"] == "failed: exit code 3: commhooks: error: no luck"
    late = Finished(124, "", "")
    code, out, _ = conduct(monkeypatch, tmp_path, capsys, lambda _: late, calls=(PLAIN,))
    assert code == 1 and "not done after 300 s" in out


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Finished(2, "", "commhooks: error: apt-get install iproute2\n"), "apt-get install iproute2"),
        (Finished(0, "lo\n", ""), "needs root"),
    ],
)
def test_without_an_emulated_network_its_calls_are_rows_that_say_so(
    monkeypatch, tmp_path, capsys, answer, reason
):
    def no_network(command):
        return answer if "echo" in command else good(command)

    code, out, _ = conduct(monkeypatch, tmp_path, capsys, no_network)
    rows = json.loads(out)
    assert code == 0 and [row["number"] for row in rows] == ["A", "B"]
    assert rows[1]["verdict"].startswith("can't run: ") and reason in rows[1]["verdict"]


def test_an_unknown_number_is_an_error():
    with pytest.raises(ConfigError, match="unknown N99; there are N1, N2"):
        suite._chosen("N1,N99")
