"""An adapter whose process is killed after three steps."""

import os
import signal

from hyperion.engines import plain
from hyperion.engines.observer import Observer
from hyperion.engines.work import Work


def train(work: Work, observer: Observer) -> dict:
    step = observer.step

    def killed_after_three(loss, norm, tokens: int) -> None:
        step(loss, norm, tokens)
        if len(observer._losses) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    observer.step = killed_after_three
    return plain.train(work, observer)
