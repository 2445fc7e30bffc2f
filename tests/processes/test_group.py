"""Process groups: rank and device of a process, and that no group outlives its use or its peers."""

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from hyperion import processes
from hyperion.hardware import HardwareError
from hyperion.processes import process_group, world
from hyperion.processes.group import StoreBarrier
from hyperion.processes.this_rank import GroupError, RankInfo, choose_device, rank_info
from tests.hardware.machines import facts, gpu

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture
def free_port():
    """A port nobody listens on, as text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(autouse=True)
def plain_process(monkeypatch):
    """No variables of torchrun."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_a_single_process_has_no_group():
    here = world()
    assert (here.rank, here.size, here.local_rank, here.backend) == (0, 1, 0, "")


def test_a_plain_process_enters_its_own_group_repeatedly():
    for _ in range(2):
        with process_group() as here:
            assert world() == here and (here.rank, here.size) == (0, 1)
            model = DistributedDataParallel(torch.nn.Linear(2, 1).to(here.device.torch_device))
            model(torch.ones(1, 2, device=here.device.torch_device)).sum().backward()
    assert not dist.is_initialized()


# Each model is freed just after its last all-reduce, while gloo's thread frees that.
OUTLIVING = """
import torch
from torch.nn.parallel import DistributedDataParallel
from hyperion.processes import process_group

def once():
    with process_group(backend="gloo"):
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()

torch.set_num_threads(1)
for _ in range(300):
    once()
print("through")
"""


@pytest.mark.process
def test_a_model_that_outlives_its_group_does_not_stop_the_process():
    done = subprocess.run([sys.executable, "-c", OUTLIVING], capture_output=True, text=True, timeout=240)
    assert done.stdout == "through\n", done.stderr


def test_an_error_inside_passes_and_takes_the_group_down():
    with pytest.raises(ZeroDivisionError), process_group():
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with process_group() as here:
        assert here.size == 1


def test_a_second_group_inside_the_first_is_refused():
    with process_group(), pytest.raises(GroupError, match="already a process group"), process_group():
        pass


def test_torchruns_variables_give_the_rank():
    assert rank_info(TORCHRUN) == RankInfo(rank=5, size=8, local_rank=1, local_size=4)
    assert rank_info({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    assert rank_info({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) == RankInfo(0, 1, 0, 1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_variables_are_named(missing):
    with pytest.raises(GroupError, match=f"^{missing} not set") as error:
        rank_info({name: value for name, value in TORCHRUN.items() if name != missing})
    assert "torchrun" in error.value.next_step


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"RANK": "abc"}, "RANK is 'abc', not a whole number from 0"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "1e3"}, "RANK is '1e3'"),
        ({"RANK": "9" * 5000}, "RANK is '999"),
        ({"WORLD_SIZE": "0"}, "rank 5 of 0 ranks"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"LOCAL_RANK": "\u0661"}, "LOCAL_RANK is "),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000, above 65535"),
    ],
)
def test_variables_that_are_no_numbers_are_named_with_a_next_step(changes, reason):
    with pytest.raises(GroupError, match=reason) as error:
        rank_info(TORCHRUN | changes)
    assert "unset RANK and WORLD_SIZE" in error.value.next_step


@pytest.mark.parametrize("changes", [{"RANK": "abc"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "x"}, {"LOCAL_RANK": ""}])
def test_a_process_with_such_variables_raises_and_makes_no_group(changes, monkeypatch):
    for name, value in (TORCHRUN | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match="|".join([*changes, "rank 5 of 0"])), process_group():
        pass


@pytest.mark.parametrize("changes", [{"MASTER_PORT": "x"}, {"MASTER_PORT": ""}, {"MASTER_ADDR": ""}])
def test_a_barrier_without_an_address_raises(changes, monkeypatch):
    for name, value in (TORCHRUN | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=next(iter(changes))):
        StoreBarrier()


@given(st.fixed_dictionaries({name: st.integers(-1, 9).map(str) | st.just("x") for name in list(TORCHRUN)[:4]}))
def test_variables_fit_together_or_are_refused(numbers):
    try:
        info = rank_info(TORCHRUN | numbers)
    except GroupError:
        return
    assert 0 <= info.rank < info.size and 0 <= info.local_rank < info.local_size <= info.size


@pytest.mark.parametrize(("machine", "kind"), [("H200", "cuda"), ("MI250X", "rocm")])
def test_each_rank_has_a_gpu_to_itself(machine, kind):
    node = facts(gpus=(gpu(machine),) * 4)
    backend, device = choose_device(RankInfo(rank=6, size=8, local_rank=2, local_size=4), None, node)
    assert (backend, device.kind, device.torch_device) == ("nccl", kind, "cuda:2")


def test_more_ranks_than_gpus_are_refused():
    node = facts(gpus=(gpu("H200"),) * 4)
    with pytest.raises(GroupError, match="5 ranks on a node where PyTorch sees 4 GPUs") as error:
        choose_device(RankInfo(rank=0, size=5, local_rank=0, local_size=5), None, node)
    assert "at most 4 ranks" in error.value.next_step


def test_the_backend_suits_the_device():
    info = RankInfo(rank=0, size=2, local_rank=0, local_size=2)
    assert choose_device(info, None, facts())[0] == "gloo"
    backend, device = choose_device(info, "gloo", facts("H200"))
    assert (backend, device.kind) == ("gloo", "cpu")
    with pytest.raises(GroupError, match="nccl needs GPUs"):
        choose_device(info, "nccl", facts())
    with pytest.raises(GroupError, match="no backend 'mpi'"):
        choose_device(info, "mpi", facts())


def test_a_gpu_that_cannot_be_opened_is_no_cpu():
    with pytest.raises(HardwareError, match="cannot open it"):
        choose_device(None, None, facts(gpu_error="no device"))


@pytest.mark.slow
def test_a_rank_whose_peers_do_not_join_raises(free_port, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match="rank 0 of 2 did not reach the other ranks within 1 s"), process_group(timeout_s=1.0):
        pass
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_rank_whose_peers_do_not_come_to_the_file_raises(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    meeting = (tmp_path / "meeting").as_uri()
    with pytest.raises(GroupError, match="rank 0 of 2 did not reach") as error, process_group(1.0, init_method=meeting):
        pass
    assert meeting in str(error.value) and not dist.is_initialized()


def test_a_file_needs_the_rank_and_the_number_of_ranks(tmp_path):
    with pytest.raises(GroupError, match="RANK and WORLD_SIZE are not set"), process_group(init_method=tmp_path.as_uri()):
        pass
    with pytest.raises(GroupError, match="unknown init method 'tcp://a:1'"), process_group(init_method="tcp://a:1"):
        pass


@pytest.mark.process
@pytest.mark.parametrize("init_method", ["env://", "file://"])
def test_two_ranks_join_leave_and_time_out(init_method, free_port, tmp_path):
    common = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    if init_method == "env://":
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    else:
        init_method = (tmp_path / "meeting").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.processes.group_checks", init_method],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        for rank, line in ((0, "timed out\n"), (1, "raising\n")):
            assert ranks[rank].stdout.readline() == line, ranks[rank].communicate(timeout=60)
        _, errors = ranks[1].communicate(timeout=60)
        assert "ArithmeticError: on purpose" in errors and ranks[1].returncode != 0
        assert ranks[0].poll() is None  # rank 1 ended while its peer was there
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_names_that_are_imported_late_are_listed():
    assert set(processes.__all__) <= set(dir(processes))
