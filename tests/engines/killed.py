"""An adapter whose process is killed."""

import os
import signal

from hyperion.engines.observer import Observer
from hyperion.engines.work import Work


def train(work: Work, observer: Observer) -> dict:
    observer.start(observer, None, {})
    observer.step(1.0, 1.0, 1)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}
