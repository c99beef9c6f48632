"""The doctor: what it finds, what it advises, and when it fails."""

import json
import os

import pytest

from commhooks import cli, doctor
from commhooks.errors import ConfigError


def test_this_machine_is_well_enough(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    findings = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert findings["torch"]["status"] == findings["ports"]["status"] == "ok"
    assert {"horovod", "network namespaces", "process_vm_readv", "congestion control", "tc"} <= set(findings)
    assert cli.main(["doctor"]) == 0
    assert "torch.distributed" in capsys.readouterr().out


def test_something_needed_that_is_missing_is_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "NEEDED_PACKAGES", ("numpy>=99.0", "no_such_package_here>=1"))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "numpy: pip install 'numpy>=99.0'" in out and "no_such_package_here: pip install" in out


def test_a_bad_setting_is_found(monkeypatch):
    monkeypatch.setenv("COMMHOOKS_LINK", "tcp")
    assert doctor.settings().status == doctor.MISSING and "COMMHOOKS_LINKS" in doctor.settings().advice


def test_settings_that_are_set_are_shown(monkeypatch):
    monkeypatch.setenv("COMMHOOKS_LINKS", "tcp")
    assert doctor.settings() == doctor.Finding("settings", "ok", "links")
    monkeypatch.setenv("COMMHOOKS", "off")
    assert "switched off" in doctor.settings().seen


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [
        ("10.0.0.5", "ok", ""),
        ("127.0.1.1", "optional", "GLOO_SOCKET_IFNAME"),
        (None, "optional", "/etc/hosts"),
    ],
)
def test_a_host_name_that_others_cannot_reach(address, status, words):
    finding = doctor.host_name("node7", lambda name: address)
    assert finding.status == status and words in finding.advice and "node7" in finding.seen


def test_a_tool_that_is_not_there_names_its_package():
    finding = doctor.tool("no-such-tool")
    assert finding.status == doctor.OPTIONAL and "iproute2" in finding.advice


def test_a_failing_trial_stays_in_its_child():
    def fail():
        os.environ["LEAK"] = "1"
        raise OSError

    assert not doctor.in_child(fail)
    assert doctor.in_child(lambda: None)
    assert "LEAK" not in os.environ


def test_horovod_is_built_from_a_source_tree_only(tmp_path):
    with pytest.raises(ConfigError, match="source tree"):
        doctor.build_horovod(tmp_path / "build-horovod")


def test_every_advice_comes_with_a_lack():
    for finding in doctor.examine():
        assert finding.status in (doctor.OK, doctor.MISSING, doctor.OPTIONAL) and finding.seen
        assert not finding.advice or finding.status != doctor.OK
