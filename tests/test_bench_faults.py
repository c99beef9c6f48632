"""``commhooks bench faults``: what counts as ok, real ranks of which one misbehaves, and that nobody is left behind."""

import json
import os
import sys
from dataclasses import replace

import pytest

from commhooks import shell
from commhooks.bench import faults
from commhooks.bench.faults import CASES, Observed, Report, judge

FIELDS = {"case", "ranks", "limit_s", "first_error_s", "last_error_s", "error", "names_culprit", "ok"}
BY_ACT = {case.act: case for case in CASES}


def report(rank, after_s, error="PeerLost", message="rank 1 has gone"):
    return Report(rank, 100.0 + after_s, error, message, 0.1, 3)


def test_all_survivors_must_raise_the_same_name_the_culprit_and_be_in_time():
    kill = BY_ACT["kill"]
    good = Observed(100.0, tuple(report(rank, 0.1 * rank + 0.1) for rank in (0, 2, 3)))
    row = judge(kill, 4, 5.0, good)
    assert row["ok"] and row["names_culprit"] and set(row) >= FIELDS
    assert (row["first_error_s"], row["last_error_s"]) == (0.1, 0.4)
    others = good.reports[:2]
    for bad in (
        report(3, 5.1),
        report(3, 0.1, error="CommTimeout"),
        report(3, 0.1, message="rank 11 has gone"),
        report(3, 0.1, error="", message=""),
    ):
        assert not judge(kill, 4, 5.0, replace(good, reports=(*others, bad)))["ok"], bad
    silent = judge(kill, 4, 5.0, replace(good, reports=others))
    assert not silent["ok"] and silent["silent"] == [3]
    assert not judge(kill, 4, 5.0, Observed(None, ()))["ok"]


def test_strangers_must_change_nothing_and_be_counted():
    case = BY_ACT["strangers"]
    calm = tuple(report(rank, 0.0, error="", message="") for rank in range(3))
    assert judge(case, 3, 5.0, Observed(None, calm))["ok"]
    for bad in (
        report(2, 0.0),
        replace(calm[2], strangers=2),
        replace(calm[2], longest_step_s=6.0),
    ):
        assert not judge(case, 3, 5.0, Observed(None, (*calm[:2], bad)))["ok"], bad


def bench(*words, **environ):
    """The command in its own process, with its ranks."""
    command = [sys.executable, "-m", "commhooks", "bench", "faults", *words]
    child = shell.start(command, {**os.environ, **environ}, stdout=shell.PIPE, stderr=shell.PIPE)
    out, err = child.communicate(timeout=200)
    return child.returncode, out.decode(), err.decode()


def test_real_ranks():
    code, out, err = bench("--ranks", "3", "--cases", "kill,skip,settings,strangers", "--wait", "1", "--json")
    rows = json.loads(out)
    assert [row["error"] for row in rows] == ["PeerLost", "CommTimeout", "Mismatch", "none"], (rows, err)
    assert code == 0 and all(row["ok"] for row in rows), (rows, err)


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (["--cases", "kil"], {}, "unknown 'kil'; there are kill"),
        (["--ranks", "1"], {}, "at least 2 ranks"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "without a launcher"),
        ([], {"COMMHOOKS": "0"}, "COMMHOOKS=0"),
    ],
)
def test_it_says_what_is_wrong_with_its_arguments(words, environ, said):
    code, out, err = bench(*words, **environ)
    assert (code, out) == (2, "") and said in err


def test_the_table_has_the_fields_that_are_promised():
    row = judge(BY_ACT["kill"], 3, 5.0, Observed(100.0, (report(0, 0.1), report(2, 0.1))))
    assert list(faults._short(row)) == [
        "case", "ranks", "limit_s", "first_error_s", "last_error_s", "error", "names_culprit", "ok",
    ]  # fmt: skip
