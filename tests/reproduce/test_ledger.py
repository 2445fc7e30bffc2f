import pytest

from hyperion.reproduce.runs import Entry, Ledger, peek
from hyperion.results import Run, StoreError
from hyperion.results.execution import unexpected_in


def test_entries_survive_and_answer_what_is_done(tmp_path):
    ledger = Ledger.new(Run.create(tmp_path, {}), {"profile": "smoke"})
    ledger.keep("01_x", Entry("done", "abc", 1.5, 3), {"notebooks/01_x.html": b"page"})
    ledger.keep("02_y", Entry("failed", "abc", 1.5, 0, "why"))
    assert unexpected_in(ledger.run) == {}
    ledger.keep("04_w", Entry("unexpected", "abc", 1.5, 2, "1 unexpected", remeasure=True, unexpected=("loss 7, above 4",)))
    ledger.keep_exported("rows and code")
    again = Ledger.of(Run.open(tmp_path))
    assert again.entries == ledger.entries and again.setting == {"profile": "smoke"} and again.exported == "rows and code"
    assert again.is_done("01_x", "abc") and not again.is_done("01_x", "other")
    assert unexpected_in(again.run) == {"04_w": ["loss 7, above 4"]} and not again.is_done("04_w", "abc")
    assert not again.is_done("02_y", "abc") and not again.is_done("03_z", "abc")
    assert Run.open(tmp_path).read("notebooks/01_x.html") == b"page"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"setting": {}}'])
def test_a_damaged_ledger_is_named(tmp_path, damage):
    (tmp_path / "reproduce.json").write_text(damage)
    with pytest.raises(StoreError) as caught:
        peek(tmp_path)
    assert caught.value.where == tmp_path / "reproduce.json" and "RUN=new" in caught.value.next_step
