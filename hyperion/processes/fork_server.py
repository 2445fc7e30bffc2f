"""A fork server: one process that has imported what all workers import, and forks them. Run as a file by `starting`.

Importing PyTorch takes two to five seconds a process, and a book starts a hundred. It keeps nothing of hyperion, so that
each child reads the library as it is then, never computes, and never touches a GPU: a forked child is as fresh as one that
was started and then imported the same, but for the pages of libraries, which count as resident once it has touched them.

Slow libraries that few children use (a compiler, transformers) are imported for the first child that wants them.

Asked over a Unix socket, one connection a child. A request is JSON, with the child's stdin, stdout and stderr beside it:
{"python", "module", "arguments", "environment", "folder", "new_session"}. The answers are lines: {"pid": the child's process
number}, then its exit code as subprocess has it; or {"pid": 0} for a child that wants another interpreter, or libraries
loaded under other variables. A caller that closes its end early asks, with SIGTERM, the child to end. One that was told an
exit code closes its end when it has read it: until then the child's process number is not given to another process, as
with a child of one's own.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

# torch._dynamo: the first optimizer of a process imports it, which takes as long as half of torch.
PRELOADED = (
    "numpy",
    "pandas",
    "psutil",
    "pyarrow.parquet",
    "scipy.optimize",
    "scipy.stats",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.nn.parallel",
    "torch.utils.flop_counter",
)
# In a child's environment: more modules to import before it is forked, which then serve all children after it.
WANTED = "HYPERION_PRELOAD"
# Set for a child: the process number of the server that forked it, which stands for its launcher.
FORKED_BY = "HYPERION_FORKED_BY"
# Read by C libraries and by PyTorch once, when they are loaded: a child that wants them otherwise must load them itself.
_READ_ONCE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "TORCH", "PYTORCH", "LD_", "MALLOC_", "ATEN_", "PYTHON")
# PyTorch's number of threads is set in the child; those of NumPy and Arrow stay the server's.
_THREADS = "OMP_NUM_THREADS"
_READ_LATER = (
    _THREADS,
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_SYMM_",
    "TORCH_NCCL_",
    "TORCHELASTIC_",
)
_FOR_MAKE = "PYTHON"  # `make PYTHON=…` chooses an interpreter with it; none reads it itself
_MOST_BYTES = 1 << 20
_repairs: list = []  # declarations live as long as the module that made them


def read_once(environment: dict[str, str]) -> dict[str, str]:
    """The variables that act when a library is loaded, and never again."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_ONCE) and not name.startswith(_READ_LATER) and name != _FOR_MAKE
    }


def _as_loaded(environment: dict[str, str]) -> bool:
    """Whether libraries loaded under this server's variables serve a child that asks for these."""
    threads, own = environment.get(_THREADS), os.environ.get(_THREADS)
    settable = threads == own or (threads or "").isdecimal() and int(threads) > 0
    return settable and read_once(environment) == read_once(dict(os.environ))


class Server:
    """The loop that forks, and tells how children ended. It ends with its owner: when stdin is closed.

    Args:
        listener: a listening Unix socket.
    """

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.callers: dict[int, socket.socket] = {}  # by process number of the child
        self.ended: set[int] = set()  # children whose exit code was told, and whose caller has not closed its end
        self.selector = selectors.DefaultSelector()
        self.woken, self.waker = socket.socketpair()
        for end in (self.woken, self.waker, listener):
            end.setblocking(False)

    def serve(self) -> dict | None:
        """Returns in each child the request that it is to do, and in the server None when its owner is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's matter, and the children's
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        for source in (self.listener, self.woken, sys.stdin):
            self.selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is sys.stdin:
                    signal.set_wakeup_fd(-1)  # children end now too, and its socket goes before the handler does
                    return None
                if key.fileobj is self.woken:
                    self._reap()
                elif key.fileobj is self.listener:
                    if (request := self._accept()) is not None:
                        return request
                else:
                    self._lost(key.fileobj)

    def _accept(self) -> dict | None:
        try:
            caller, _ = self.listener.accept()
        except BlockingIOError:
            return None
        caller.setblocking(True)
        files: list[int] = []
        try:
            message, files, _, _ = socket.recv_fds(caller, _MOST_BYTES, 3)
            while not message.endswith(b"\n"):
                if not (more := caller.recv(_MOST_BYTES)):
                    raise OSError("the caller left")
                message += more
            return self._fork(caller, json.loads(message), files)
        except (OSError, ValueError):  # a caller that left, or is none of ours; or no process can be made
            caller.close()
        finally:
            for file in files:
                os.close(file)
        return None

    def _fork(self, caller: socket.socket, request: dict, files: list[int]) -> dict | None:
        if request["python"] != sys.executable or not _as_loaded(request["environment"]):
            _tell(caller, {"pid": 0})
            caller.close()
            return None
        _import_wanted(request["environment"].get(WANTED, ""))
        if child := _quiet_fork():
            self.callers[child] = caller
            self.selector.register(caller, selectors.EVENT_READ)
        else:
            try:
                _become(request, files)
                _tell(caller, {"pid": os.getpid()})
                self._close_all(caller)
            except BaseException:  # in no case a second server
                traceback.print_exc()
                os._exit(1)
            return request
        return None

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.woken.recv(_MOST_BYTES):
                pass
        for child, caller in list(self.callers.items()):
            if child not in self.ended and (end := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                self.ended.add(child)
                _tell(caller, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
                if caller.fileno() < 0:
                    self._forget(child)

    def _lost(self, caller: socket.socket) -> None:
        """The caller has read how its child ended, or is gone before that: then the child is asked to end, as Linux would ask
        if the caller were its parent."""
        self.selector.unregister(caller)
        caller.close()
        child = next(child for child, own in self.callers.items() if own is caller)
        if child in self.ended:
            self._forget(child)
        else:
            os.kill(child, signal.SIGTERM)

    def _forget(self, child: int) -> None:
        os.waitpid(child, 0)
        self.ended.discard(child)
        del self.callers[child]

    def _close_all(self, caller: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        self.selector.close()
        for end in (self.listener, self.woken, self.waker, caller, *self.callers.values()):
            end.close()


def _import_wanted(names: str) -> None:
    """What cannot be imported here is left to the child, and to what it will say of it."""
    missing = [name for name in names.split(",") if name and name not in sys.modules]
    if not missing:
        return
    with _repaired_torchvision(), _driver_not_asked():
        for name in missing:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    _share_memory()


@contextlib.contextmanager
def _driver_not_asked():
    """Libraries ask for devices while they are imported. They are told by the vendor's management library: a process that
    has called the driver cannot be forked, so an import that goes on to ask that fails.
    """
    compiled = sys.modules["torch"]._C
    ask = getattr(compiled, "_cuda_getDeviceCount", None)
    by_management = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(by_management)

    def refuse():
        raise RuntimeError("the fork server must not touch a GPU")

    os.environ[by_management], compiled._cuda_getDeviceCount = "1", refuse
    try:
        yield
    finally:
        if ask is None:
            del compiled._cuda_getDeviceCount
        else:
            compiled._cuda_getDeviceCount = ask
        if before is None:
            del os.environ[by_management]
        else:
            os.environ[by_management] = before


@contextlib.contextmanager
def _repaired_torchvision():
    """transformers and peft import torchvision: under hyperion's repair, whose modules then go, for children to read anew."""
    path = sys.path[:]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    try:
        _repairs.append(importlib.import_module("hyperion.compat"))
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] == "hyperion"]:
            del sys.modules[name]


def _share_memory() -> None:
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, pages that all children share


def _quiet_fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads. Those here are NumPy's, idle, and its library starts them anew in a child.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _tell(caller: socket.socket, answer) -> None:
    with contextlib.suppress(OSError):
        caller.sendall(json.dumps(answer).encode() + b"\n")


def _become(request: dict, files: list[int]) -> None:
    """Make this forked child what the request describes: as if its interpreter had just been started."""
    if request["new_session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        setattr(sys, name, open(number, "w", buffering=1, errors=errors, closefd=False))  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    mine = _entries(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"] | {FORKED_BY: str(os.getppid())})
    os.chdir(request["folder"])
    base = [entry for entry in sys.path if entry not in mine and entry != os.path.dirname(__file__)]
    sys.path[:] = dict.fromkeys([request["folder"], *_entries(os.environ), *base])
    importlib.invalidate_caches()
    sys.argv[1:] = request["arguments"]
    if _THREADS in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ[_THREADS]))


def _entries(environment) -> list[str]:
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def main() -> None:
    """Serve on the listening socket whose file number is the argument. Imports wait for the first caller."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    with selectors.DefaultSelector() as first:
        for source in (listener, sys.stdin):
            first.register(source, selectors.EVENT_READ)
        first.select()
    for module in PRELOADED:
        importlib.import_module(module)
    _share_memory()
    request = Server(listener).serve()
    if request is not None:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
