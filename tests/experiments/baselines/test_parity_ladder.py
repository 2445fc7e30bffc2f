"""The rungs of the ladder: exact is exact on a CPU, what rounds stays within its tolerance, and a broken rung is refused."""

import pytest

from hyperion.experiments.baselines.parity_ladder import rungs
from hyperion.results import RowError
from hyperion.training import LanguageEngine
from tests.chapter.toy import perform, toy_context

SIZES = {
    "tokens": 4000,
    "sequence_length": 8,
    "batch_size": 6,
    "micro_batches": 4,
    "width": 16,
    "heads": 2,
    "layers": 1,
    "steps": 4,
    "learning_rate": 3e-3,
    "compiler": "eager",
}


def climbed(folder):
    rows = perform(toy_context("parity_ladder", SIZES, folder), folder).rows
    return {row.variant: row for row in rows if row.params["beside"] == "the rung before"}


@pytest.mark.slow
def test_what_changes_nothing_changes_no_bit_and_what_rounds_little(tmp_path):
    rows = climbed(tmp_path)
    assert list(rows) == [rung.name for rung in rungs(SIZES["micro_batches"])][1:]
    assert [name for name, row in rows.items() if row.value == 0] == ["again", "checkpointed", "resumed"]
    assert 0 < rows["accumulated"].value < 1e-5 < rows["bf16"].value < 1e-2
    assert rows["compiled"].value < 1e-3  # GELU is another formula there


@pytest.mark.slow
def test_parts_that_weigh_the_same_whatever_their_size_are_refused(tmp_path, monkeypatch):
    plain = LanguageEngine.summed_loss
    monkeypatch.setattr(LanguageEngine, "summed_loss", lambda self, batch: plain(self, batch) * 6 / 4 / len(batch[0]))
    with pytest.raises(RowError, match="accumulated"):
        climbed(tmp_path)
