"""``commhooks plan``: every format, the explanation, and what it refuses."""

import json
import xml.etree.ElementTree as ET

import pytest

from commhooks.cli import main
from commhooks.core.plan import Plan
from commhooks.core.topology_readers import parse_topology


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    return code, *capsys.readouterr()


def test_text_shows_the_trees(capsys):
    code, out, _ = run(capsys, "--topology", "nic:200,800,800,800")
    assert code == 0
    assert "one mirrored tree" in out and "0-1 2-1 3-2" in out and "23.91 MB/s" in out


def test_explanation_names_bottleneck_ring_and_gain(capsys):
    _, out, _ = run(capsys, "--topology", "sites:4+4@200/1000", "--explain")
    assert "100.00 % of the bound" in out
    assert "7.00x" in out  # the limit of N2
    assert out.index("site0->site1", out.index("resource")) < out.index("rank0")


def test_some_ranks_of_a_box(capsys):
    _, out, _ = run(capsys, "--topology", "dgx-1v", "--ranks", "1,4,5,7", "--explain")
    assert (
        "ranks 0-3 here are 1, 4, 5, 7 there" in out
        and "46 GB/s" in out
        and "there is none in rank order" in out
    )


def test_json_holds_the_plan(capsys):
    code, out, _ = run(capsys, "--topology", "uniform", "--ranks", "4", "--json")
    fields = json.loads(out)
    assert code == 0 and len(fields["trees"]) == 4 and fields["gain_over_ring"] == pytest.approx(1)
    plan = Plan.from_json(fields["plan"])
    plan.prove()
    assert plan.digest() == fields["digest"]


def test_other_collectives_and_drivers(capsys):
    for arguments in (
        ["--collective", "broadcast", "--root", "2"],
        ["--collective", "all_gather"],
        ["--driver", "paper"],
    ):
        code, out, _ = run(capsys, "--topology", "dgx-1p", "--ranks", "0-3", *arguments)
        assert code == 0 and "hops" in out


def test_dot(capsys):
    _, out, _ = run(capsys, "--topology", "nic:200,800,800", "--format", "dot")
    assert out.startswith("digraph plan {") and "dir=both" in out and "23.91 MB/s" in out
    _, out, _ = run(capsys, "--topology", "nic:800*3", "--format", "dot")
    assert "style=dashed" in out


def test_png(capsys, tmp_path):
    path = tmp_path / "plan.png"
    code, out, err = run(
        capsys, "--topology", "dgx-1v", "--ranks", "0-2", "--format", "png", "--output", str(path)
    )
    assert code == 0 and out == "" and path.read_bytes().startswith(b"\x89PNG") and str(path) in err


def test_msccl_xml_into_a_file(capsys, tmp_path):
    path = tmp_path / "plan.xml"
    code, _, _ = run(capsys, "--topology", "dgx-1v", "--format", "msccl-xml", "--output", str(path))
    assert code == 0 and ET.parse(path).getroot().get("coll") == "allreduce"


def test_files_of_every_kind(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(parse_topology("nic:200,800,800").to_json()))
    code, out, _ = run(capsys, "--topology", str(path))
    assert code == 0 and "23.91 MB/s" in out


def test_one_rank(capsys):
    code, out, _ = run(capsys, "--topology", "nic:100", "--explain", "--json")
    assert code == 0 and json.loads(out)["bytes_per_s"] is None
    code, out, _ = run(capsys, "--topology", "nic:100", "--explain")
    assert code == 0 and "nothing moves" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "ring"], "expected uniform, nic:"),
        (["--topology", "missing.json"], "isn't there"),
        (["--topology", "uniform"], "say --ranks 8"),
        (["--topology", "dgx-1v", "--ranks", "0,x"], "expected numbers and ranges"),
        (["--topology", "dgx-1v", "--ranks", "0,9"], "no rank 9"),
        (["--topology", "dgx-1v", "--ranks", "0,1,6,7"], "from ranks {0, 1} to ranks {2, 3}"),
        (["--topology", "nic:1,1", "--root", "1"], "has no root"),
        (["--topology", "nic:1,1", "--mb", "0"], "--mb 0"),
        (["--topology", "nic:1,1", "--mb", "nan"], "--mb nan"),
    ],
)
def test_refusals(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and message in err
