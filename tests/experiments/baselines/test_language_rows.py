"""Published perplexities against a computation of their own, on a text whose words, tokens and bytes differ in number."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest

from hyperion.chapter import Context, experiment_named
from hyperion.chapter.profiles import load_profile
from hyperion.data import TextCorpus, prepare_text
from hyperion.data.text.tokenizer import train_tokenizer
from hyperion.experiments.baselines.language_model import seed_rows
from hyperion.experiments.baselines.perplexity import HeldOut, Scored
from hyperion.training.evaluate import LanguageEvaluation
from hyperion.workloads import datasets

TEXT = {
    "train": ["the quick brown fox jumps over the lazy dog near the riverbank\n", " \n", "dogs sleep\n"] * 40,
    "valid": ["a fox sleeps near the dog\n", "\n", "quick quick brown dogs jump\n"],
    "test": ["über the lazy riverbank\n", "foxes\n"],
}


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Corpus, tokenizer of few merges (several tokens a word), and the prepared streams, as `datasets.text` gives them."""
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    corpus = TextCorpus("small", "files", "", TEXT)
    tokenizer = train_tokenizer(corpus, vocab_size=280)
    return corpus, tokenizer, prepare_text(corpus, tokenizer, sequence_length=8)


def counted(split: str) -> dict[str, int]:
    """Words with one <eos> a line and bytes, counted here."""
    return {
        "words": sum(len(line.split(" ")) for line in "".join(TEXT[split]).replace(" \n", "\n").split("\n")[:-1] if line)
        + len(TEXT[split]),
        "bytes": len("".join(TEXT[split]).encode("utf-8")),
    }


@pytest.fixture
def context(tmp_path):
    return Context(notebook="toy", experiment="ngram_baselines", sizes={}, workspace=tmp_path)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_unigram_rows_are_the_likelihood_over_tokens_words_and_bytes(prepared, context, monkeypatch, split):
    """The probabilities are counted here, with the weight of the mixture taken from the published token perplexity."""
    _, tokenizer, streams = prepared
    monkeypatch.setattr(datasets, "text", lambda context: prepared)
    rows = {
        r.metric: r
        for r in experiment_named("ngram_baselines").run(context, lambda *_: None).rows
        if r.variant == "unigram" and r.params["split"] == split
    }
    train, scored = streams.tokens["train"].tolist(), streams.tokens[split].tolist()
    assert tokenizer.decode(scored) == "".join(TEXT[split])
    seen = Counter(train)

    def total(weight: float) -> float:
        shares = [weight * seen[token] / len(train) + (1 - weight) / tokenizer.vocab_size for token in scored]
        return -math.fsum(map(math.log, shares))

    units = counted(split) | {"tokens": len(scored)}
    assert len(set(units.values())) == 3, "the three denominators must differ, or the test proves nothing"
    assert units["words"] == {"valid": 11 + 3, "test": 5 + 2}[split]
    goal = rows["perplexity_token"].value
    candidates = [1 - 10 ** (-step / 500) for step in range(50, 3001)]  # 0.2 to 1 - 1e-6
    weight = min(candidates, key=lambda w: abs(math.exp(total(w) / units["tokens"]) - goal))
    nats = total(weight)
    assert math.exp(nats / units["tokens"]) == pytest.approx(goal, rel=1e-3)
    assert rows["perplexity_word"].value == pytest.approx(math.exp(nats / units["words"]), rel=1e-2)
    assert rows["bits_per_byte"].value == pytest.approx(nats / units["bytes"] / math.log(2), rel=1e-2)
    of_words = math.log(rows["perplexity_word"].value) * units["words"]
    assert of_words == pytest.approx(math.log(goal) * units["tokens"]), "the same likelihood, divided otherwise"


def test_rows_of_trained_models_divide_by_tokens_words_and_bytes(prepared, context):
    """A model that gives every token the probability 1/8, so that each value is known without a computer."""
    corpus, _, streams = prepared
    tokens = len(streams.tokens["valid"])
    nats = tokens * math.log(8)
    scored = Scored.of(HeldOut.of(corpus, streams, "valid", None), nats, tokens, 0.0)
    run = SimpleNamespace(seed=0, name="lm", dtype="fp32", score_params={}, scored={"valid": scored})
    rows = seed_rows(context, [run, SimpleNamespace(**vars(run) | {"seed": 1})], corpus.source)
    units = counted("valid")
    expected = {
        "perplexity_token": 8.0,
        "perplexity_word": 8.0 ** (tokens / units["words"]),
        "bits_per_byte": 3 * tokens / units["bytes"],
    }
    assert tokens != units["words"] and scored.floor.total_nll_nats is None
    for metric, value in expected.items():
        found = [row for row in rows if row.metric == metric]
        assert len(found) == 3, "two seeds and their mean"
        assert [row.value for row in found] == pytest.approx([value] * 3)
    evaluation = LanguageEvaluation(nats, tokens, 0.0, 1, 0.0)
    assert evaluation.perplexity_word(units["words"]) == pytest.approx(expected["perplexity_word"])
    assert evaluation.perplexity_token == pytest.approx(8.0)


def test_the_first_lines_of_a_split_are_counted_with_the_blank_lines_between_them(prepared):
    corpus, tokenizer, streams = prepared
    for samples, lines in ((1, 1), (2, 3), (3, 4)):  # every second line of three is blank
        held_out, text = HeldOut.of(corpus, streams, "train", samples), "".join(TEXT["train"][:lines])
        assert tokenizer.decode(held_out.tokens.tolist()) == text
        assert (held_out.words, held_out.utf8_bytes) == (len(text.split()) + lines, len(text))
    whole = HeldOut.of(corpus, streams, "valid", 2)  # as many as there are
    assert (whole.words, whole.utf8_bytes) == (counted("valid")["words"], counted("valid")["bytes"])


def test_both_experiments_score_the_same_text_in_every_profile():
    """Their perplexities are compared in the notebook."""
    for profile in ("smoke", "full", "study"):
        sizes = load_profile(profile).sizes
        assert sizes("ngram_baselines").get("scored_samples") == sizes("language_model").get("scored_samples")
