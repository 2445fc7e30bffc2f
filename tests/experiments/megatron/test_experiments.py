"""The experiments with toy sizes: parity, resharding, the scaler, files of tokens, advice, and a machine without the package."""

import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from hyperion.chapter import Context, experiment_named
from hyperion.data.text.indexed_tokens import IndexedTokensWriter, index_bytes, read_index
from hyperion.errors import HyperionError
from hyperion.experiments.megatron import adaptation_advice
from hyperion.experiments.megatron.adaptation_advice import (
    EXITS,
    HOLDS,
    REQUIRED,
    UNKNOWN,
    advice,
    files_with,
    parser,
    rocm_readers,
    verdict_on,
)
from hyperion.experiments.megatron.bytes_of_text import VOCABULARY, batches, unigram_entropy
from hyperion.experiments.megatron.indexed_tokens import read_indexed, write_indexed
from hyperion.experiments.megatron.layout_speed import OURS, LayoutSpeedOptions, speed_rows
from hyperion.experiments.megatron.loss_scale_states import expected_scale
from hyperion.experiments.megatron.pipeline_bubble import ideal_bubble, waits
from hyperion.hardware import detect
from hyperion.models.llama import llama_flops_per_token, random_llama_shape
from hyperion.parallel.megatron import release
from hyperion.processes.isolated import IsolatedProcess
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

installed = pytest.mark.skipif(bool(release.why_unavailable()), reason="megatron-core is not installed")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="these ranks compute on the CPU")
TOY = {"model": "random_llama_d64_l2", "sequence_length": 8, "batch_size": 4, "learning_rate": 1e-3, "timeout_s": 300}
SIZES: dict[str, dict] = {
    "megatron_adaptation": {},
    "megatron_parity": TOY
    | {
        "steps": 3,
        "layouts": [{"distributed_optimizer": True}, {"tensor": 2, "sequence": True}, {"pipeline": 2, "micro_batches": 2}],
    },
    "pipeline_bubble": TOY | {"micro_batches": [1, 2, 3], "rounds": 6},
    "layout_speed": TOY | {"rounds": 1, "steps": 1, "layouts": [{}, {"tensor": 2}, {"pipeline": 2, "micro_batches": 2}]},
    "megatron_resharding": TOY | {"steps": 1, "cpu_ranks": 2, "saved": {"tensor": 2}},
    "documented_shapes": {
        "divisor": 48,
        "shapes": [
            {
                "name": "toy",
                "layers": 2,
                "width": 768,
                "heads": 4,
                "sequence_length": 768,
                "micro_batch_size": 1,
                "layout": {"pipeline": 2, "micro_batches": 2},
            }
        ],
    },
    "loss_scale_states": {"hysteresis": [2]},
    "indexed_tokens": {"lines": 21, "lines_of_a_document": 4},
    "megatron_pretraining": TOY | {"steps": 2, "lines": 50, "held_out_windows": 4},
}


@installed
@on_cpu
@pytest.mark.slow
@pytest.mark.process
def test_every_layout_trains_like_the_plain_loop(ranks_stay, tmp_path):
    rows = perform(toy_context("megatron_parity", SIZES["megatron_parity"], tmp_path), tmp_path).rows
    errors = [row for row in rows if row.metric == "relative_difference"]
    assert {row.variant for row in errors} == {"DP 2 + distributed optimizer", "TP 2 + SP", "PP 2"}
    assert len(errors) == 6 and all(0 <= row.value < 1e-5 for row in errors)
    shares = {row.rank: row.value for row in rows if row.metric == "share" and row.variant.startswith("DP")}
    assert shares == pytest.approx({0: 0.5, 1: 0.5}, rel=0.02)


@installed
@on_cpu
@pytest.mark.slow
@pytest.mark.process
def test_a_checkpoint_of_two_ranks_is_loaded_by_one(ranks_stay, tmp_path):
    rows = perform(toy_context("megatron_resharding", SIZES["megatron_resharding"], tmp_path), tmp_path).rows
    loaded, before = rows
    assert loaded.variant == "TP 2 to one rank" and loaded.value < 1e-5
    assert before.variant == "before loading" and before.value > 0.1


@installed
@on_cpu
@pytest.mark.slow
@pytest.mark.process
def test_ranks_store_the_bytes_of_the_formula(ranks_stay, tmp_path):
    rows = perform(toy_context("documented_shapes", SIZES["documented_shapes"], tmp_path), tmp_path).rows
    assert [(row.variant, row.rank, row.params["stage"]) for row in rows] == [("toy", 0, 0), ("toy", 1, 1)]
    # Per layer: 4 x 16^2 for attention, 3 x 16 x 48 for the MLP, two norms. The last stage has the last norm too.
    layer, end = 4 * 16**2 + 3 * 16 * 48 + 32, 256 * 16
    assert [row.value for row in rows] == [16 * (layer + end), 16 * (layer + end + 16)]


@installed
@on_cpu
@pytest.mark.slow
@pytest.mark.process
def test_bubbles_have_an_interval(ranks_stay, tmp_path):
    result = perform(toy_context("pipeline_bubble", SIZES["pipeline_bubble"], tmp_path), tmp_path)
    assert [row.params["micro_batches"] for row in result.rows] == [1, 2, 3]
    assert all(row.value is not None and row.value < 1 and row.ci_low <= row.value <= row.ci_high for row in result.rows)
    assert len(result.samples) == 2 * 3 * 6
    # A stage cannot be busy for longer than the step.
    assert (result.samples.busy_s < result.samples.step_s).all() and all(row.value > 0 for row in result.rows)


@installed
@on_cpu
@pytest.mark.slow
@pytest.mark.process
def test_timed_layouts_have_the_losses_of_this_library(ranks_stay, tmp_path):
    result = perform(toy_context("layout_speed", SIZES["layout_speed"], tmp_path), tmp_path)
    times = {row.variant: row for row in result.rows if row.metric == "step_time_s"}
    theirs = [f"megatron-core, {name}" for name in ("DP 2", "TP 2", "PP 2")]
    assert list(times) == ["this library, DDP", "this library, FSDP2", *theirs]
    assert all(row.value > 0 and row.check_error < 1e-6 for row in times.values())
    ratios = {row.variant: row.value for row in result.rows if row.metric == "speedup"}
    assert ratios["megatron-core, TP 2"] == pytest.approx(times[theirs[0]].value / times[theirs[1]].value)
    assert theirs[0] not in ratios


def timed_steps(ranks: int, trainings: dict[str, tuple[float, float]]) -> pd.DataFrame:
    """Return samples of a step of the warm-up and of two timed steps, which take one and three times a training's seconds.

    Each rank takes a second more than the rank before it. The trainings are given as (seconds, loss).
    """
    lines = [
        {"training": name, "round": 0, "step": step, "rank": rank, "time_s": factor * seconds + rank, "loss": loss}
        for name, (seconds, loss) in trainings.items()
        for step, factor in ((0, math.nan), (1, 1.0), (2, 3.0))
        for rank in range(ranks)
    ]
    return pd.DataFrame(lines)


def test_a_timed_step_ends_with_its_slowest_rank_and_other_losses_fail_the_check(tmp_path):
    context = toy_context("layout_speed", SIZES["layout_speed"], tmp_path)
    trainings = {OURS["ddp"]: (0.5, 5.0), "megatron-core, DP 2": (1.0, 5.0), "megatron-core, TP 2": (2.5, 5.1)}
    rows = speed_rows(context, LayoutSpeedOptions.of(context), 2, timed_steps(2, trainings))
    found = {(row.variant, row.metric): row for row in rows}
    # The medians of 2 s and 4 s, of 1.5 s and 2.5 s, and of 3.5 s and 8.5 s, without the warm-up.
    assert {name: row.value for (name, metric), row in found.items() if metric == "step_time_s"} == {
        "megatron-core, DP 2": 3,
        OURS["ddp"]: 2,
        "megatron-core, TP 2": 6,
    }
    ratios = {name: row.value for (name, metric), row in found.items() if metric == "speedup"}
    assert ratios == {OURS["ddp"]: 1.5, "megatron-core, TP 2": 0.5}
    wrong = found["megatron-core, TP 2", "step_time_s"]
    assert wrong.check_error == pytest.approx(0.02) and wrong.check_error > wrong.check_tolerance


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_least_time_of_a_step_is_that_of_the_share_of_a_rank(tmp_path, monkeypatch, ranks):
    gpu = detect(facts("H100 SXM"))
    monkeypatch.setattr(Context, "device", property(lambda of_context: gpu))
    context = toy_context("layout_speed", SIZES["layout_speed"], tmp_path)
    trainings = {OURS["ddp"]: (1.0, 5.0), f"megatron-core, DP {ranks}": (1.0, 5.0)}
    rows = speed_rows(context, LayoutSpeedOptions.of(context), ranks, timed_steps(ranks, trainings))
    # 4 sequences of 8 tokens. At 1,980 MHz, 132 multiprocessors compute 256 FLOPs per cycle each.
    flops = llama_flops_per_token(random_llama_shape(TOY["model"], VOCABULARY), 8).forward_backward * 4 * 8
    limits = [row.limit for row in rows if row.metric == "step_time_s"]
    assert limits == pytest.approx([flops / ranks / (132 * 256 * 1.98e9)] * 2)


@installed
@on_cpu
@pytest.mark.slow
@pytest.mark.process
def test_training_lowers_the_loss(tmp_path):
    result = perform(toy_context("megatron_pretraining", SIZES["megatron_pretraining"] | {"steps": 12}, tmp_path), tmp_path)
    losses = {row.variant: row for row in result.rows}
    assert losses["megatron-core"].n == 4 and 2 < losses["unigram"].value < np.log(256)
    trained = list(result.samples["loss"])
    assert len(trained) == 12 and trained[-1] < trained[0] - 0.5


@installed
@pytest.mark.slow
@pytest.mark.process
def test_counts_and_tokens_of_the_files(tmp_path):
    rows = perform(toy_context("indexed_tokens", SIZES["indexed_tokens"], tmp_path), tmp_path).rows
    found = {row.params["what"]: row.value for row in rows}
    assert (found["sequences"], found["documents"], found["tokens that differ from the text"]) == (21, 6, 0)
    assert found["bytes of .idx"] == 34 + 12 * 21 + 8 * 7 and found["bytes of .bin"] == found["tokens"]


def compare_with_megatron(folder: Path) -> tuple[bool, bool]:
    """Write documents with both writers. Return whether the files are equal, and whether megatron-core reads the tokens."""
    release.use_adapted()
    sequences = [np.arange(length, dtype=np.uint8) for length in (3, 1, 200, 7, 2)]
    write_indexed(folder / "theirs", sequences, lines_of_a_document=2)
    with IndexedTokensWriter(folder / "ours", np.uint8) as writer:
        for number, sequence in enumerate(sequences, 1):
            writer.add_sequence(sequence)
            if number in (2, 4, 5):
                writer.end_document()
        writer.close()
    pairs = [[(folder / f"{name}{suffix}").read_bytes() for name in ("ours", "theirs")] for suffix in (".bin", ".idx")]
    return all(ours == theirs for ours, theirs in pairs), bool((read_indexed(folder / "ours") == np.concatenate(sequences)).all())


@installed
@pytest.mark.slow
@pytest.mark.process
def test_the_writer_makes_the_files_of_megatron_core(tmp_path):
    with IsolatedProcess(timeout_s=120) as process:
        assert process.run(partial(compare_with_megatron, tmp_path)) == (True, True)


def written_index(folder: Path, sequences: int, entries: int) -> Path:
    path = folder / "text.idx"
    lengths = np.arange(sequences, dtype=np.int32)
    starts = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, sequences, entries)
    path.write_bytes(header + lengths.tobytes() + starts.tobytes() + np.array([0, 2, sequences]).tobytes())
    return path


def test_an_index_with_wrong_counts_is_refused(tmp_path):
    index = read_index(written_index(tmp_path, 5, 3))
    assert index.lengths.tolist() == [0, 1, 2, 3, 4] and index.documents.tolist() == [0, 2, 5] and index.dtype == np.uint16
    assert index_bytes(5, 2) == (tmp_path / "text.idx").stat().st_size
    with pytest.raises(HyperionError, match="5 sequences and 4 entries"):
        read_index(written_index(tmp_path, 5, 4))
    (tmp_path / "text.idx").write_bytes(b"text")
    with pytest.raises(HyperionError, match="no index of tokens"):
        read_index(tmp_path / "text.idx")


def test_the_rules_of_the_scale():
    assert expected_scale(((True, 1),), 1) == 2048 and expected_scale(((True, 1),), 2) == 4096
    assert expected_scale(((True, 2),), 2) == 2048 and expected_scale(((False, 1000),), 2) == 8192
    assert expected_scale(((False, 999), (True, 1), (False, 1)), 1) == 2048 and expected_scale(((True, 99),), 1) == 1


@installed
@pytest.mark.slow
@pytest.mark.process
def test_the_scaler_of_the_release_follows_the_rules(tmp_path):
    rows = perform(toy_context("loss_scale_states", SIZES["loss_scale_states"], tmp_path), tmp_path).rows
    found = {row.variant: row.value for row in rows}
    assert found["one overflow"] == 4096 and found["three overflows"] == 1024 and found["100 overflows"] == 1


def _steps(step_s: Callable[[int], float], busy_s: Callable[[int, int], float]) -> pd.DataFrame:
    """Return samples of two stages, whose busy time is a function of the number of micro-batches and of the rank."""
    places = [(count, number, rank) for count in (1, 2, 4, 8) for number in range(3) for rank in range(2)]
    samples = pd.DataFrame(places, columns=["micro_batches", "round", "rank"])
    return samples.assign(
        step_s=[step_s(count) - 0.01 * rank for count, _, rank in places],
        busy_s=[busy_s(count, rank) for count, _, rank in places],
    )


@pytest.mark.parametrize(
    ("step_s", "busy_s", "expected"),
    [
        (lambda m: 0.5 * (m + 1), lambda m, rank: 0.5 * m, lambda m: ideal_bubble(2, m)),
        (lambda m: 0.5 * m + 0.5, lambda m, rank: 0.5 * m + 0.5, lambda m: 0),  # a fixed cost inside the passes is no bubble
        (lambda m: 2 * m, lambda m, rank: m, lambda m: 0.5),  # two stages that always wait for each other
        (lambda m: 4 * m, lambda m, rank: m * (1 + 2 * rank), lambda m: 0.5),  # unequal stages: one waits 3/4, the other 1/4
    ],
)
def test_the_bubble_is_the_time_without_passes(step_s, busy_s, expected):
    found = waits(_steps(step_s, busy_s))
    assert found == {m: pytest.approx([expected(m)] * 3) for m in (1, 2, 4, 8)}


def test_the_entropy_of_single_tokens():
    assert unigram_entropy(np.array([7, 7, 9, 9], np.uint8)) == pytest.approx(np.log(2))
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(np.log(256))


def test_batches_are_consecutive_tokens_and_depend_on_the_seed():
    tokens = batches(np.arange(100, dtype=np.uint8), 2, 3, 4, 0)
    assert tokens.shape == (2, 3, 5) and tokens.dtype == torch.int64
    assert (tokens.diff(dim=2) == 1).all()
    assert not torch.equal(tokens, batches(np.arange(100, dtype=np.uint8), 2, 3, 4, 1))


def test_the_parser_decides_options():
    assert verdict_on("--fp16")[0] == HOLDS and verdict_on("--overlap-comm")[0] == UNKNOWN
    assert verdict_on("--checkpoint-activations")[0] == EXITS and verdict_on("--max-position-embeddings")[0] == REQUIRED
    names = parser()["options"]["names"]
    assert len(names) == len(set(names)) == 681 and {*parser()["exits"], *parser()["required"]} <= set(names)
    assert parser()["commit"] == release.COMMIT
    assert all("remedy" in entry for entry in advice()["option"] if verdict_on(entry["name"])[0] != HOLDS)


def test_the_sources_of_rocm_decide_each_variable():
    readers = rocm_readers()
    assert set(readers) == {entry["name"] for entry in advice()["variable"]}
    unread = [name for name, places in readers.items() if not places]
    assert unread == ["PYTORCH_ROCM_DEVICE", "GPU_MAX_ALLOC_PERCENT", "RCCL_DEBUG"]
    assert all("remedy" in entry for entry in advice()["variable"] if entry["name"] in unread)


def test_a_variable_is_found_as_a_whole_word(tmp_path):
    texts = {"a.so": b"\0NCCL_DEBUG\0", "b.so": b"NCCL_DEBUG_FILE RCCL_DEBUG", "c.so": b"NCCL_DEBUG_FILE NCCL_DEBUG", "d.so": b""}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    found = files_with(["NCCL_DEBUG", "RCCL_DEBUG", "ABSENT"], sorted(tmp_path.iterdir()))
    assert {name: [path.name for path in paths] for name, paths in found.items()} == {
        "NCCL_DEBUG": ["a.so", "c.so"],
        "RCCL_DEBUG": ["b.so"],
        "ABSENT": [],
    }


def test_without_a_rocm_runtime_its_rows_have_a_reason(tmp_path, monkeypatch):
    (tmp_path / "lib.so").write_bytes(b"CUDA_VISIBLE_DEVICES")
    places = {"PyTorch": [tmp_path / "lib.so"], "ROCm runtime": []}
    monkeypatch.setattr(adaptation_advice, "libraries", lambda: places)
    rows = perform(toy_context("adaptation_advice", {}, tmp_path), tmp_path).rows
    visible = {row.params["where"]: row for row in rows if row.variant == "CUDA_VISIBLE_DEVICES"}
    assert visible["sources of ROCm"].value == 1 and "flags.hpp" in visible["sources of ROCm"].params["evidence"]
    assert visible["PyTorch"].value == 1 and visible["PyTorch"].params["example"] == "lib.so"
    assert visible["ROCm runtime"].value is None and "ROCm runtime is not on this machine" in visible["ROCm runtime"].value_reason


@pytest.mark.parametrize("name", SIZES)
def test_without_megatron_every_row_has_the_reason(tmp_path, monkeypatch, name):
    def missing():
        raise HyperionError("megatron-core is not installed", next_step=release.INSTALL)

    monkeypatch.setattr(release, "find_release", missing)
    context = toy_context(name, SIZES[name], tmp_path)
    rows = experiment_named(name).run(context, lambda done, total, note="": None).rows
    assert rows and all(row.value is None and "hyperion frameworks install megatron-core" in row.value_reason for row in rows)
    for row in rows:
        row.validate()
