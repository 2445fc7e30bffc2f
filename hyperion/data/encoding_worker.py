"""The worker's side of `encoding`: a tokenizer, then chunks of lines on stdin; what each gave on stdout."""

import os
import pickle
import sys

import tokenizers

from hyperion.data.encoder import Encoder


def serve() -> None:
    """Encode until stdin ends, which it also does when the process that feeds it is gone."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not get between the answers
    questions = sys.stdin.buffer
    encoder = Encoder(tokenizers.Tokenizer.from_str(pickle.load(questions)))
    while True:
        try:
            lines = pickle.load(questions)
        except EOFError:
            return
        pickle.dump(encoder.encode(lines), answers)
        answers.flush()


if __name__ == "__main__":
    serve()
