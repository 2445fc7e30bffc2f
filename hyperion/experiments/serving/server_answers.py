"""Does a server return the same answers as the model itself?

A server batches unrelated requests and stores their keys and values in blocks. Neither batching nor blocks may change an answer.
The experiment compares greedy answers with those of `generate`. In fp32, every token must be equal. In bf16, two correct programs
may choose different tokens at a position where the two largest logits differ by less than the rounding errors. All later tokens
may then differ too, so the comparison ends at the first such position. The experiment also checks that answers overlap in time.

A server sends texts and not tokens, so the texts of the tokens are compared. The rows count the tokens of these texts.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.experiments.serving.backends import BACKENDS, Backend, ServerSizes
from hyperion.experiments.serving.client import closed_loop, complete, in_event_loop, why_invalid
from hyperion.experiments.serving.served_models import DATA, ServedModel, pieces_of, prompts_of, served_model
from hyperion.experiments.serving.server import Server, ServerError, running_server
from hyperion.results import Row

COMPARED = "tokens equal to generate"
OVERLAPPED = "short answers that ended before a longer answer that began before them"
SHARE = "share of tokens before the first undecided one"
_LONGER = (4, 8, 16, 32)  # number of tokens of the long answer in each attempt, relative to `output_tokens`
_HEAD_START_S = 0.02


class ServerAnswersOptions(Options):
    """Options for the `server_answers` experiment.

    Args:
        model: name of a trained model.
        dtypes: number formats, in the order in which they are tested.
        backends: names of the backends.
        server: capacity limits of the server.
        prompts: number of prompts. They are sent at the same time.
        prompt_tokens: number of tokens in a prompt.
        output_tokens: number of tokens in an answer.
    """

    model: str
    dtypes: tuple[str, ...]
    backends: tuple[str, ...]
    server: ServerSizes
    prompts: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Reference:
    """The answer of `generate` to one prompt.

    Args:
        pieces: texts of the answer, one for each token that completes a character.
        decided: number of pieces before the first position at which the two largest logits are too close.
        tokens: number of tokens in the answer.
        decided_tokens: number of tokens before this position.
        error: largest difference, over all prompts, between the logits and the fp32 logits for the same tokens. 0 for fp32.
    """

    pieces: tuple[str, ...]
    decided: int
    tokens: int
    decided_tokens: int
    error: float


def forecast(context: Context) -> list[Forecast]:
    """Predict the number of compared tokens in fp32: all tokens of all answers."""
    options = ServerAnswersOptions.of(context)
    if "fp32" not in options.dtypes:
        return []
    basis = "in fp32, every token of every answer is compared, and no answer ends early"
    tokens = float(options.prompts * options.output_tokens)
    return [
        Forecast(name, "count", tokens, basis, "fp32", _params(options, COMPARED))
        for name in options.backends
        if not BACKENDS[name].why_absent()
    ]


def run(context: Context, report: Report) -> Result:
    """Compare each server's answers with `generate` in each number format. Prompts are sent together, so they are batched."""
    options = ServerAnswersOptions.of(context)
    present = [BACKENDS[name] for name in options.backends if not BACKENDS[name].why_absent()]
    rows = [
        context.absent_row(name, "count", reason, dtype=dtype, params=_params(options, COMPARED))
        for name in options.backends
        for dtype in options.dtypes
        if (reason := BACKENDS[name].why_absent())
    ]
    if not present:
        return Result(rows, pd.DataFrame())
    model = served_model(context, options.model)
    prompts = prompts_of(context, model.folder, options.prompts, options.prompt_tokens, context.seed)
    steps = len(options.dtypes) * (1 + len(present))
    for number, dtype in enumerate(options.dtypes):
        report(number * (1 + len(present)), steps, f"generate in {dtype}")
        references = reference_answers(model, prompts, options.output_tokens, dtype, context.device.torch_device)
        if dtype != "fp32":
            rows.append(
                context.row("generate", "logit_error", references[0].error, dtype=dtype, params=_params(options, "logits"))
            )
        for place, backend in enumerate(present, 1):
            report(number * (1 + len(present)) + place, steps, f"{backend.name} in {dtype}")
            rows += _compare(context, options, backend, model, prompts, dtype, references)
    report(steps, steps, "done")
    return Result(rows, pd.DataFrame(), model.source)


EXPERIMENT = Experiment(forecast, run, options=ServerAnswersOptions, data=DATA)


@torch.no_grad()
def reference_answers(model: ServedModel, prompts: list[str], tokens: int, dtype: str, device: str) -> list[Reference]:
    """Return the answer of `generate` to each prompt on its own.

    In bf16, the largest logit error E against fp32 is measured for the same tokens, over all positions and the whole vocabulary.
    Two programs with errors of at most E choose the same token if the two largest fp32 logits differ by more than 2 E. So a
    position is undecided if they differ by 2 E or less.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    lm = model.load(dtype, device)
    exact = None if dtype == "fp32" else model.load("fp32", device)
    answers, errors, gaps = [], [], []
    for prompt in prompts:
        ids_BT = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        length = ids_BT.shape[1]
        whole_BT = lm.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=tokens)
        answers.append(whole_BT[0, length:].tolist())
        if exact is not None:
            # The logits at a position determine the next token.
            exact_TV = exact(whole_BT).logits[0, length - 1 : -1]
            errors.append((lm(whole_BT).logits[0, length - 1 : -1].float() - exact_TV).abs().max().item())
            gaps.append((-exact_TV.topk(2).values.diff(dim=-1)).squeeze(-1).tolist())
    error = max(errors, default=0.0)
    decided = [first_undecided(some, 2 * error) for some in gaps] or [len(answer) for answer in answers]
    return [
        Reference(pieces_of(model.folder, answer), len(pieces_of(model.folder, answer[:most])), len(answer), most, error)
        for answer, most in zip(answers, decided, strict=True)
    ]


def first_undecided(gaps: list[float], bound: float) -> int:
    """Return the first position whose gap is at most the bound, or the number of positions if there is none."""
    return next((position for position, gap in enumerate(gaps) if gap <= bound), len(gaps))


def differing_pieces(answer: tuple[str, ...], reference: Reference) -> int:
    """Return how many of the decided pieces differ from the reference. Missing and extra pieces count as differences."""
    decided = reference.decided
    differing = sum(left != right for left, right in zip(answer[:decided], reference.pieces[:decided], strict=False))
    differing += abs(decided - len(answer[:decided]))
    # If all pieces are decided, the answer must end where the reference ends.
    return differing + (max(0, len(answer) - decided) if decided == len(reference.pieces) else 0)


def _compare(
    context: Context,
    options: ServerAnswersOptions,
    backend: Backend,
    model: ServedModel,
    prompts: list[str],
    dtype: str,
    references: list[Reference],
) -> list[Row]:
    params = _params(options, COMPARED)
    try:
        server = running_server(backend, model.folder, dtype, context.device.torch_device, options.server)
    except ServerError as error:
        return [context.absent_row(backend.name, "count", f"{error.what}", dtype=dtype, params=params)]
    # Use one user for each prompt, so that all requests are in one batch.
    replies = in_event_loop(lambda: closed_loop(server.endpoint, prompts, options.output_tokens, len(prompts)))
    reason = why_invalid(replies, len(prompts)) or why_not_batched(server, backend)
    if reason:
        return [context.absent_row(backend.name, "count", reason, dtype=dtype, params=params)]
    most_tokens = options.server.max_tokens - options.prompt_tokens
    lengths = [min(longer * options.output_tokens, most_tokens) for longer in _LONGER]
    overlap = overlap_row(context, server, backend.name, prompts, lengths, dtype)
    by_prompt = dict(zip((reply.prompt for reply in replies), replies, strict=True))
    pairs = [(by_prompt[prompt].pieces, reference) for prompt, reference in zip(prompts, references, strict=True)]
    differing = sum(differing_pieces(*pair) for pair in pairs)
    decided, whole = sum(reference.decided_tokens for reference in references), sum(reference.tokens for reference in references)
    identity = {"dtype": dtype, "data_source": model.source}
    rows = [
        replace(overlap, data_source=model.source),
        context.row(backend.name, "count", decided, params=params, **identity, **checked("texts that differ", differing, 0)),
        context.row(backend.name, "start_time_s", server.start_s, params={"model": options.model}, **identity),
    ]
    if dtype != "fp32":
        rows.append(context.row(backend.name, "share", decided / whole, params=_params(options, SHARE), **identity))
    return rows


def why_not_batched(server: Server, backend: Backend) -> str:
    """Return why the log does not prove that the backend batches requests, or "" if it does."""
    if backend.log_mark in server.log_text():
        return ""
    return f"refused: the log of {backend.name} does not contain {backend.log_mark!r}, so it does not batch continuously"


def overlap_row(context: Context, server: Server, name: str, prompts: list[str], lengths: Sequence[int], dtype: str) -> Row:
    """Check that a server works on several answers at the same time. Return the row with the number of overlapping answers.

    A long answer is requested, and shortly afterwards several short ones. A server that answers one request after another would
    end the long answer first, however fast the machine is. A server that works on all of them can also end the long answer first:
    it is so fast that the long answer is almost complete when the short requests arrive, or the model ends the answer early, or
    another process takes the cores. So a longer answer to another prompt is tried next.

    Args:
        context: context of the experiment.
        server: the server.
        name: name of the backend.
        prompts: prompt of the long answer, and prompts of the short ones.
        lengths: number of tokens in the long answer of each attempt. The short answers have one token.
        dtype: number format.
    """

    async def overlapping(prompts: list[str], tokens: int) -> int:
        async with server.endpoint.session() as session:
            long = asyncio.create_task(complete(session, server.endpoint, prompts[0], tokens))
            await asyncio.sleep(_HEAD_START_S)
            short = await asyncio.gather(*(complete(session, server.endpoint, prompt, 1) for prompt in prompts[1:]))
            last_s = (await long).end_s
            return 0 if long.result().error else sum(not reply.error and reply.end_s < last_s for reply in short)

    most = 0
    for tokens in lengths:
        most = max(most, in_event_loop(partial(overlapping, prompts, tokens)))
        if most == len(prompts) - 1:
            break
        prompts = [*prompts[1:], prompts[0]]
    check = checked("short answers that waited for the longer one", len(prompts) - 1 - most, 0)
    return context.row(name, "count", most, dtype=dtype, params={"what": OVERLAPPED, "tokens_at_least": lengths[0]}, **check)


def _params(options: ServerAnswersOptions, what: str) -> dict:
    return {
        "what": what,
        "model": options.model,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
    }
