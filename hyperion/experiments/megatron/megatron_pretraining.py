"""Does megatron-core learn? Train a small Llama on WikiText-2 until its loss is below the entropy of single tokens.

A model that ignores the context cannot reach such a loss, so the model has learned something about the context.
"""

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.variants import run_on_ranks
from hyperion.errors import not_none
from hyperion.experiments.megatron.bytes_of_text import DATA, VOCABULARY, batches, documents, unigram_entropy
from hyperion.experiments.megatron.indexed_tokens import read_indexed, write_indexed
from hyperion.experiments.megatron.megatron_parity import ToyOptions, initial_llama
from hyperion.models.llama import random_llama_shape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import adapted_copy, use_adapted, why_unavailable
from hyperion.results.statistics import mean_estimate

TRAINED, UNIGRAM = "megatron-core", "unigram"
_DOCUMENT = 8  # lines of a document in the file of tokens
_NO_LIMIT = "no limit: the entropy of the text is unknown"


class MegatronPretrainingOptions(ToyOptions):
    """Options of `megatron_pretraining`.

    Args:
        lines: number of lines of the train split that are written to the file of tokens.
        held_out_windows: number of windows of the test split on which the loss is measured.
    """

    lines: int
    held_out_windows: int


def forecast(context: Context) -> list[Forecast]:
    """Return a forecast without a value, because the loss depends on the text. It should be below the entropy of single bytes."""
    basis = "no estimate: the text decides; it should be below the entropy of single tokens"
    return [Forecast(TRAINED, "validation_loss", None, basis, params=_params(MegatronPretrainingOptions.of(context)))]


def run(context: Context, report: Report) -> Result:
    """Write the tokens, train on one rank, and measure the loss on the test split."""
    options = MegatronPretrainingOptions.of(context)
    if reason := why_unavailable():
        return Result([context.absent_row(TRAINED, "validation_loss", reason, params=_params(options))], pd.DataFrame())
    adapted_copy()
    return run_on_ranks(context, report, pretrain, ranks=1)[0]


EXPERIMENT = Experiment(forecast, run, data=DATA, options=MegatronPretrainingOptions)


def pretrain(context: Context, report: Report) -> Result:
    """Train on this rank. Return the loss on the test split, and the losses of the steps as samples."""
    options = MegatronPretrainingOptions.of(context)
    use_adapted()
    from hyperion.parallel.megatron import gpt

    lines, source = documents(context)
    write_indexed(context.workspace / "train", lines[: options.lines], _DOCUMENT)
    stream = read_indexed(context.workspace / "train")
    test = np.concatenate(documents(context, "test")[0])
    device, length = context.device.torch_device, options.sequence_length
    tokens = batches(stream, options.steps, options.batch_size, length, context.seed)
    held_out = batches(test, 1, options.held_out_windows, length, context.seed)[0].to(device)
    layout, losses = MegatronLayout(), []
    with gpt.model_parallel(layout):
        shape = random_llama_shape(options.model, VOCABULARY)
        model = gpt.build_gpt(shape, layout, length)
        gpt.load_llama_weights(model, initial_llama(context, options.model).state_dict(), shape, layout)
        trainer = gpt.MegatronTrainer(model.to(device), layout, gpt.Adam(options.learning_rate))
        for step, tokens_BT in enumerate(tokens):
            loss, _ = trainer.step(tokens_BT.to(device))
            losses.append(loss)
            report(step + 1, options.steps, f"loss {loss:.3f}")
        scores = []
        for tokens_BT in held_out.split(options.batch_size):
            logits_BTV = not_none(gpt.full_logits(model, tokens_BT[:, :-1].contiguous())).float()
            nll_BT = torch.nn.functional.cross_entropy(logits_BTV.mT, tokens_BT[:, 1:], reduction="none")
            scores += nll_BT.mean(1).tolist()
    columns = {"params": _params(options), "data_source": source, "limit_source": _NO_LIMIT}
    rows = [
        context.row(TRAINED, "validation_loss", mean_estimate(scores), **columns),
        context.row(UNIGRAM, "validation_loss", unigram_entropy(test), **columns),
    ]
    return Result(rows, pd.DataFrame({"step": range(1, len(losses) + 1), "loss": losses}), source)


def _params(options: MegatronPretrainingOptions) -> dict:
    names = ("model", "steps", "batch_size", "sequence_length", "learning_rate")
    return {"what": "test split"} | {name: getattr(options, name) for name in names}
