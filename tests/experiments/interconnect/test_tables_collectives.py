"""The table of rates holds every cell once, and a missing one is empty."""

from hyperion.experiments.interconnect.tables_collectives import kernels_chosen, link_meanings, links_between, rates_by_size
from hyperion.figures.formats import number
from tests.book.made_up_collectives import FACTORS, SIZES


def test_a_line_a_size_and_a_column_a_collective(material):
    rows = material.of("collectives")
    table = rates_by_size(rows)
    assert list(table.columns) == ["dtype", "S", *FACTORS]
    assert len(table) == len(SIZES) + 1 and list(table["S"])[:2] == ["64 B", "512 B"]
    found = next(r for r in rows if r.metric == "busbw_gb_s" and (r.variant, r.params["bytes"]) == ("broadcast", SIZES[-1]))
    assert table[table["S"] == "1 GiB"]["broadcast"].item() == number(found.value, 3)


def test_what_was_not_measured_is_an_empty_cell(material):
    rows = [row for row in material.of("collectives") if (row.variant, row.dtype) != ("all_gather", "bf16")]
    table = rates_by_size(rows)
    assert table[table["dtype"] == "bf16"]["all_gather"].item() == ""


def test_links_are_a_matrix_of_senders_and_receivers_and_kernels_are_named(material, cpu_material):
    rows = material.of("collectives")
    links = links_between(rows)
    assert list(links.columns) == ["from", "to GPU0", "to GPU1", "to GPU2", "to GPU3", "NUMA node"] and len(links) == 4
    assert [links[f"to GPU{i}"][i] for i in range(4)] == ["X"] * 4 and links["to GPU0"][1] == "NV18"
    assert link_meanings(rows) == "NV18: 18 NVLinks; told by NVML"
    (kernel,) = kernels_chosen(rows).to_dict("records")
    assert (kernel["S"], kernel["backend"], kernel["algorithm"]) == ("64 B", "nccl", "ring")
    assert not len(links_between(cpu_material.of("collectives")))
    assert kernels_chosen(cpu_material.of("collectives"))["algorithm"].tolist() == ["gloo does not tell"]
