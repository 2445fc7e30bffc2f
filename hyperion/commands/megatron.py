"""The commands `hyperion megatron`: let megatron-core run without CUDA, and write token files for it."""

from pathlib import Path
from typing import Annotated

import typer

from hyperion.errors import HyperionError
from hyperion.paths import expanded
from hyperion.terminal import say

app = typer.Typer(help="Adapt megatron-core to devices without CUDA, and write token files for it.", no_args_is_help=True)


@app.command("adapt")
def adapt_command(
    revert: Annotated[bool, typer.Option("--revert", help="Restore the published files, byte for byte.")] = False,
    path: Annotated[
        str | None,
        typer.Option(help="A folder `megatron/core`. The folder is changed in place.", show_default="the installed package"),
    ] = None,
) -> None:
    """Change megatron-core so that it runs without CUDA. A second call changes nothing. The chapter uses its own copy instead.

    Each changed file is printed with the reason for the change. If a file is neither in its published nor in its changed form,
    the command changes no file, and the exit code is 2.
    """
    # Imported here, because this module imports torch, which the other commands must not need.
    from hyperion.parallel.megatron.release import VERSION, adapt, changes, find_release

    core = find_release() if path is None else Path(expanded(path))
    reasons = {change.file: change.reason for change in changes()}
    for name in (written := adapt(core, revert=revert)):
        say(f"{name}: {'reverted' if revert else reasons[name]}")
    state = "as published" if revert else "adapted"
    say(f"megatron-core {VERSION} in {core}: {len(written)} files changed, all {len(reasons)} are {state}")


@app.command("tokens")
def tokens_command(
    prefix: Annotated[str, typer.Argument(help="Start of the paths of the files, such as data/tokens/wikitext2.")],
    text: Annotated[
        str | None,
        typer.Option(
            "--input", help='A file with a JSON object with "text" in each line, or its .gz.', show_default="WikiText-2"
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing. Compare the files with their fingerprint.")] = False,
) -> None:
    """Write the token files PREFIX_<split>.bin and .idx that Megatron reads, and their fingerprint, PREFIX.json.

    The tokens are those of GPT-2, and <|endoftext|> ends each document. WikiText-2 has the splits train, validation and test. An
    article is a document, and each of its lines that is not empty is a sequence.

    In a file of JSON lines, each text is a document with one sequence, as in the files that Megatron's own tool writes. The hash
    of the text determines its split: about one of 20 documents is in test, and the others are in train. A line without a text is
    an error, whose message names the line number.

    Existing files are never written over. The files are read back, and get their names only if all of them are complete. The exit
    code is 2 after an error, such as a damaged file in --check.
    """
    from hyperion.data import check_token_files, load_tokenizer, load_wikitext2, write_corpus_tokens, write_jsonl_tokens

    start = expanded(prefix)
    if check and text is not None:
        raise HyperionError("--check reads only the token files", where=f"--input {text}", next_step="leave out --input")
    if check:
        made = check_token_files(start)
    elif text is not None:
        made = write_jsonl_tokens(start, expanded(text), load_tokenizer())
    else:
        made = write_corpus_tokens(start, load_wikitext2(allow_synthetic=False), load_tokenizer())
    for split, found in made.splits.items():
        counts = f"{found.documents:,} documents, {found.sequences:,} sequences, {found.tokens:,} tokens"
        say(f"{start}_{split}: {counts} as {made.dtype}, sha256 {found.sha256[:12]}")
    say(f"{start}.json: {'the files are unchanged' if check else f'written from {made.data.name} with {made.tokenizer.name}'}")
