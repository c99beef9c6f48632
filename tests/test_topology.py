"""Topologies: the model, every reader, and what each refuses."""

import json

import pytest

from commhooks.core.topology import Resource, Route, Topology, payload_bytes_per_s
from commhooks.core.topology_readers import from_file_text, parse_topology
from commhooks.errors import TopologyError


def mbit(rate):
    return pytest.approx(rate * 1e6 / 8 * 1448 / 1514)


def test_nic_forms():
    topology = parse_topology("nic:200/50,800*2,200+800")
    assert topology.world_size == 4 and topology.channels == 2
    assert topology.capacity["rank0.up"] == mbit(200) and topology.capacity["rank0.down"] == mbit(50)
    assert topology.capacity["rank1.up"] == topology.capacity["rank2.down"] == mbit(800)
    assert topology.capacity["rank3.up.1"] == mbit(800)
    assert topology.route_of[0, 1, 0].resources == ("rank0.up", "rank1.down")
    assert topology.route_of[3, 0, 1].resources == ("rank3.up.1", "rank0.down")
    assert (0, 1, 1) not in topology.route_of


def test_sites_deal_ranks_in_turn_or_in_blocks():
    dealt, block = parse_topology("sites:2+2@200/1000"), parse_topology("sites:2+2@200/1000;block")
    assert dealt.route_of[0, 1, 0].resources == ("rank0.up", "site0->site1", "rank1.down")
    assert dealt.route_of[0, 2, 0].resources == ("rank0.up", "rank2.down")
    assert block.route_of[0, 2, 0].resources == ("rank0.up", "site0->site1", "rank2.down")
    assert dealt.capacity["site1->site0"] == mbit(200)
    three = parse_topology("sites:2+1+3@150/600")
    assert three.world_size == 6
    assert {n for n in three.capacity if n.startswith("site")} == {
        f"site{a}->site{b}" for a in range(3) for b in range(3) if a != b
    }
    assert three.route_of[4, 5, 0].resources == (
        "rank4.up",
        "rank5.down",
    )  # site 0 is full: both are of site 2


def test_uniform_takes_the_groups_size():
    assert parse_topology("uniform", 3).world_size == 3
    with pytest.raises(TopologyError, match="no number of ranks"):
        parse_topology("uniform")


def test_boxes():
    v, p, two = parse_topology("dgx-1v"), parse_topology("dgx-1p"), parse_topology("dgx-2")
    assert sum(v.capacity.values()) == pytest.approx(2 * 24 * 23e9)
    assert sum(p.capacity.values()) == pytest.approx(2 * 16 * 19e9)
    assert two.world_size == 16 and len(two.routes) == 16 * 15 and two.lossless
    hybrid = parse_topology("dgx-1v+pcie")
    assert hybrid.route_of[0, 7, 1].resources == (
        "gpu0.pcie.up", "pcie0.up", "socket0->socket1", "pcie3.down", "gpu7.pcie.down"
    )  # fmt: skip
    assert hybrid.route_of[0, 1, 1].resources == ("gpu0.pcie.up", "gpu1.pcie.down")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring", "not known; expected uniform, nic"),
        ("nic:200,,800", "rate ''"),
        ("nic:-5,800", "rate '-5'"),
        ("nic:nan,800", "rate 'nan'"),
        ("nic:0,800", "above 0"),
        ("nic:800*0", r"after \* comes how many"),
        ("nic:800*x", r"after \* comes how many"),
        ("sites:4+4@200", "expected sites:SIZE"),
        ("sites:0+4@200/1000", "above 0"),
    ],
)
def test_bad_strings_are_refused_with_the_form(text, message):
    with pytest.raises(TopologyError, match=message):
        parse_topology(text)


def test_other_number_of_ranks_is_refused():
    with pytest.raises(TopologyError, match="has 4 ranks, the group 8"):
        parse_topology("nic:800*4", 8)


def test_subset_renumbers_and_drops():
    sub = parse_topology("dgx-1v").subset([1, 4, 5, 7])
    assert sub.world_size == 4 and sub.name == "dgx-1v[1,4,5,7]"
    assert sub.route_of[0, 2, 0].resources == ("nvlink.1->5",)
    assert set(sub.capacity) == {f"nvlink.{a}->{b}" for a, b in
                                 [(1, 5), (5, 1), (4, 5), (5, 4), (4, 7), (7, 4), (5, 7), (7, 5)]}  # fmt: skip
    with pytest.raises(TopologyError, match="no rank 9"):
        parse_topology("dgx-1v").subset([0, 9])
    with pytest.raises(TopologyError, match="different ranks"):
        parse_topology("dgx-1v").subset([0, 0])


def test_json_round_trip_and_digest():
    topology = parse_topology("sites:2+2@200/1000")
    text = json.dumps(topology.to_json(), indent=1)
    assert from_file_text(text, "x.json") == topology
    assert topology.digest() == from_file_text(text, "x.json").digest()
    assert topology.digest() == parse_topology("sites:2+2@200/1000 ").digest()
    assert topology.digest() != parse_topology("sites:2+2@201/1000").digest()


SMALL = {
    "world_size": 2,
    "resources": [{"name": "a", "bytes_per_s": 5}, {"name": "b", "bytes_per_s": 7.5}],
    "routes": [{"src": 0, "dst": 1, "resources": ["a"]}, {"src": 1, "dst": 0, "resources": ["b"]}],
}


def test_a_files_text_is_a_topology_too():
    assert parse_topology(json.dumps(SMALL), 2) == from_file_text(json.dumps(SMALL), "x")
    assert parse_topology(SMI).world_size == 4


def test_short_file_takes_the_defaults():
    topology = from_file_text(json.dumps(SMALL), "small.json")
    assert topology.hosts == ("host0", "host1") and topology.routes[0].channel == 0 and not topology.lossless


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("resources", 1, "bytes_per_s"), -1, r"line 10: resources\[1\].bytes_per_s: -1"),
        (("resources", 1, "bytes_per_s"), float("nan"), r"line 10: resources\[1\].bytes_per_s: nan"),
        (
            ("resources", 1, "bytes_per_s"),
            "fast",
            r"line 10: resources\[1\].bytes_per_s: 'fast'; expected a number",
        ),
        (("resources", 1, "name"), "a", r"line 9: resources\[1\].name: 'a' is there twice"),
        (("routes", 0, "src"), 5, r"line 15: routes\[0\].src: rank 5; expected 0..1"),
        (("routes", 0, "src"), True, r"routes\[0\].src: True; expected a whole number"),
        (("routes", 0, "dst"), 0, "to itself"),
        (("routes", 0, "resources"), ["c"], "no resource is called 'c'"),
        (("routes", 0, "resources"), [], "at least one resource"),
        (("routes", 0, "color"), "red", r"line \d+: routes\[0\].color: unknown field"),
        (("world_size",), 0, r"line 2: world_size: 0"),
        (("version",), 9, "version 9; expected 'commhooks-topology' version 1"),
        (("hosts",), ["a"], "1 names for 2 ranks"),
    ],
)
def test_bad_files_name_line_and_field(place, value, message):
    fields = json.loads(json.dumps(SMALL))
    at = fields
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    with pytest.raises(TopologyError, match=message):
        from_file_text(json.dumps(fields, indent=1), "bad.json")


def test_missing_field_and_broken_json():
    with pytest.raises(TopologyError, match="line 1: world_size: missing"):
        from_file_text('{"resources": [], "routes": []}', "x.json")
    with pytest.raises(TopologyError, match="x.json: line 2 column 15"):
        from_file_text('{\n "world_size" 3}', "x.json")
    with pytest.raises(TopologyError, match="neither a topology"):
        from_file_text("hello", "x.json")


def test_objects_are_checked_too():
    with pytest.raises(TopologyError, match="expected a finite rate"):
        Topology("x", 1, (Resource("a", float("inf")),), (), ("h",))
    twice = (Route(0, 1, 0, ("a",)), Route(0, 1, 0, ("a",)))
    with pytest.raises(TopologyError, match="needs its own channel"):
        Topology("x", 2, (Resource("a", 1.0),), twice, ("h", "h"))


SMI = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU Affinity\x1b[0m
GPU0\t X \tNV1\tPHB\tSYS\tPIX\t0-19
GPU1\tNV1\t X \tNV2\tSYS\tPHB\t0-19
GPU2\tPHB\tNV2\t X \tNV1\tSYS\t0-19
GPU3\tSYS\tSYS\tNV1\t X \tSYS\t20-39
mlx5_0\tPIX\tPHB\tSYS\tSYS\t X

Legend:
  X = Self
"""


def test_nvidia_smi():
    topology = from_file_text(SMI, "smi.txt")
    assert topology.world_size == 4
    assert topology.capacity["nvlink.2->1"] == 2 * topology.capacity["nvlink.0->1"] == pytest.approx(46e9)
    assert topology.route_of[0, 3, 1].resources == (
        "gpu0.pcie.up", "pcie0.up", "socket0->socket2", "pcie3.down", "gpu3.pcie.down"
    )  # fmt: skip


def test_nvidia_smi_behind_a_switch():
    rows = "\n".join(f"GPU{i} " + " ".join("X" if i == j else "NV12" for j in range(8)) for i in range(8))
    topology = from_file_text(" ".join(f"GPU{j}" for j in range(8)) + "\n" + rows, "smi.txt")
    assert topology.route_of[0, 7, 0].resources == ("gpu0.up", "gpu7.down")
    assert topology.channels == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("NV2\tSYS\tPHB", "NVX\tSYS\tPHB", "line 3: column GPU2 holds 'NVX'"),
        ("GPU3\tSYS\tSYS\tNV1\t X \tSYS\t20-39\n", "", "line 5: .*expected GPU3"),
    ],
)
def test_nvidia_smi_refusals(old, new, message):
    with pytest.raises(TopologyError, match=message):
        from_file_text(SMI.replace(old, new), "smi.txt")


XML = """<system version="1">
 <cpu numaid="0" arch="x86_64">
  <pci busid="0000:05:00.0" class="0x060400" link_speed="8 GT/s" link_width="16">
   <pci busid="0000:06:00.0" class="0x030200" link_speed="8 GT/s" link_width="16">
    <gpu dev="0" sm="70" rank="0"><nvlink target="0000:07:00.0" count="2" tclass="0x030200"/></gpu>
   </pci>
   <pci busid="0000:07:00.0" class="0x030200" link_speed="8 GT/s" link_width="16">
    <gpu dev="1" sm="70" rank="1"><nvlink target="0000:06:00.0" count="2" tclass="0x030200"/></gpu>
   </pci>
  </pci>
 </cpu>
 <cpu numaid="1" arch="x86_64">
  <pci busid="0000:85:00.0" class="0x030200" link_speed="8 GT/s" link_width="8"><gpu dev="2" sm="70" rank="2"/></pci>
 </cpu>
</system>
"""


def test_nccl_xml():
    topology = from_file_text(XML, "topo.xml")
    assert topology.route_of[0, 1, 0].resources == ("nvlink.0->1",)
    assert topology.capacity["nvlink.0->1"] == pytest.approx(40e9)
    assert topology.route_of[0, 1, 1].resources == ("pci.0000:06:00.0.up", "pci.0000:07:00.0.down")
    assert topology.route_of[1, 2, 1].resources == (
        "pci.0000:07:00.0.up", "pci.0000:05:00.0.up", "socket0->socket1", "pci.0000:85:00.0.down"
    )  # fmt: skip
    assert topology.capacity["pci.0000:85:00.0.down"] == pytest.approx(7.877e9, rel=1e-3)


def test_nccl_xml_behind_a_switch():
    text = XML.replace(
        'target="0000:07:00.0" count="2" tclass="0x030200"', 'target="sw" count="6" tclass="0x068000"'
    )
    text = text.replace(
        'target="0000:06:00.0" count="2" tclass="0x030200"', 'target="sw" count="6" tclass="0x068000"'
    )
    assert from_file_text(text, "topo.xml").route_of[1, 0, 0].resources == ("gpu1.up", "gpu0.down")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("</system>", "", "line 1[0-9]: .*not XML"),
        ('sm="70" rank="1"', 'rank="1"', "lacks the attribute 'sm'"),
        ('rank="1"', 'rank="x"', "rank='x'; expected a whole number"),
        ('rank="1"', 'rank="5"', r"ranks \[0, 2, 5\]"),
        ("system", "graphs", "expected NCCL's <system>"),
    ],
)
def test_nccl_xml_refusals(old, new, message):
    with pytest.raises(TopologyError, match=message):
        from_file_text(XML.replace(old, new), "topo.xml")


def test_payload_rate():
    assert payload_bytes_per_s(800) == pytest.approx(95.64e6, rel=1e-4)
