"""The worker's side of `encoding`: a tokenizer, then chunks of lines on stdin; what each gave on stdout."""

import contextlib
import os
import pickle
import sys

import tokenizers

from hyperion.data.text.encoder import Encoder


def serve() -> None:
    """Encode until stdin ends, which it also does when the process that feeds it is gone."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not get between the answers
    questions = sys.stdin.buffer
    encoder = Encoder(tokenizers.Tokenizer.from_str(pickle.load(questions)))
    # What feeds it may be gone at any moment: then there is nobody to answer.
    with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        while True:
            pickle.dump(encoder.encode(pickle.load(questions)), answers)
            answers.flush()


if __name__ == "__main__":
    serve()
