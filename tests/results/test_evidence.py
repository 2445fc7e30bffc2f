"""What `hyperion verify` proves of the committed references, and that it says what it does not prove."""

import pytest

from hyperion.paths import reference_folder
from hyperion.results import Run, verify_run

# Rows that must be recomputed from their samples: fewer would mean that samples or rows changed their form.
RECOMPUTED = {"cpu-2cores": 46, "cpu-2cores-comparison": 0, "h200": 90, "h200-study": 100, "h200x2": 868, "h200x4": 370}


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(path.parent for path in reference_folder().rglob("run.json")), ids=str)
def test_every_committed_reference_is_proven(folder):
    run = Run.open(folder)
    statements = verify_run(run)
    about = [statement.partition(":")[0] for statement in statements[:4]]
    assert about == ["unchanged since written", "rules", "counts", "samples"]
    recomputations = [statement for statement in statements if statement.startswith("recomputed from samples: ")]
    recomputed = sum(int(statement.split(": ")[1].split()[0]) for statement in recomputations)
    [left] = [statement for statement in statements if statement.startswith("not recomputed: ")]
    assert recomputed >= RECOMPUTED.get(folder.name, 0)
    assert recomputed + sum(int(part.split()[0]) for part in left.partition(": ")[2].split(", ")) == len(run.rows())
