"""A backend without a model: `python -m tests.experiments.serving.toy_backend <port> <script as JSON>`."""

import json
import sys
import threading

from tests.experiments.serving.scripted import Script, scripted_server

if __name__ == "__main__":
    with scripted_server(Script(**json.loads(sys.argv[2])), int(sys.argv[1])):
        print("CB: toy", flush=True)
        threading.Event().wait()
