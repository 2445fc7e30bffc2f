"""The log of a kernel that shuts down: only the error of a socket that it has closed itself is left out."""

import errno
import logging

import pytest

from hyperion.processes.worker import _socket_was_open


@pytest.mark.parametrize(("number", "shown"), [(errno.ENOTSOCK, False), (errno.ECONNRESET, True), (None, True)])
def test_only_the_error_of_a_closed_socket_is_left_out(number, shown, caplog):
    zmq = pytest.importorskip("zmq")
    log = logging.getLogger("test_kernel_log")
    log.addFilter(_socket_was_open)
    try:
        raise zmq.ZMQError(number) if number else ValueError("another error")
    except (zmq.ZMQError, ValueError):
        log.exception("Uncaught exception in ZMQStream callback")
    assert bool(caplog.records) == shown
    log.error("an error without an exception")
    assert caplog.messages[-1] == "an error without an exception"
