"""What two ranks do in the launches of the collectives' tests: sound collectives, broken ones, and ranks that do not come."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hyperion.chapter import Context
from hyperion.commands.collective_check import Check, check_collectives, check_under_torchrun
from hyperion.errors import HyperionError
from hyperion.experiments.interconnect.collectives import measure_on_rank
from hyperion.measure import COLLECTIVES, measure_collective
from hyperion.measure.collectives.collectives import ALL_COLLECTIVES, DTYPES, Buffers, measure_overlap
from hyperion.processes import RollCall, world
from hyperion.results import rows_to_csv

SIZES = (1, 10_007)
TOO_LARGE = 1 << 60
EXPERIMENT = {
    "dtype": "fp32",
    "bytes": [1, 8, 4096, 65_536],
    "other_dtypes": ["bf16"],
    "other_bytes": [64],
    "all_reduce_bytes": [TOO_LARGE],
    "time_limit_s": 0.01,
    "overlap_bytes": [65_536],
    "overlap_time_limit_s": 0.02,
    "hang_timeout_s": 60.0,
}
ELEMENTS = 10_000
OVERLAPPED = 1 << 22


def _all_reduce_then(change):
    def call(output, _):
        dist.all_reduce(output)
        change(output)

    return call


def _on_rank_1(change):
    return lambda output: change(output) if dist.get_rank() == 1 else None


def _add_one(output):
    output[3] += 1


def _swapped_parts(output, given):
    COLLECTIVES["all_gather"].call(output, given)
    output.copy_(output.roll(given.numel()))


def _all_but_the_last(output, given):
    last = output[-1:].clone()
    COLLECTIVES["reduce_scatter"].call(output, given)
    output[-1:] = last


def _other_way_round(output, given):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 1:
        given = given.flip(0)
    sent = dist.isend(given, (rank + 1) % ranks)
    dist.recv(output, (rank - 1) % ranks)
    sent.wait()


# By name: (collective, dtype, the broken call, which ranks it leaves something wrong on).
FAULTS = {
    "one value on rank 1": ("all_reduce", "fp32", _all_reduce_then(_on_rank_1(_add_one)), (1,)),
    "the others left out": ("all_reduce", "fp32", lambda output, given: None, (0, 1)),
    "itself counted twice": ("all_reduce", "bf16", lambda o, i: _all_reduce_then(lambda o: o.add_(i))(o, i), (0, 1)),
    "moved by one element": ("all_reduce", "fp16", _all_reduce_then(lambda o: o.copy_(o.roll(1))), (0, 1)),
    "moved by a page": ("all_reduce", "fp32", _all_reduce_then(lambda o: o.copy_(o.roll(1024))), (0, 1)),
    "rounded on the way": ("all_reduce", "fp32", _all_reduce_then(lambda o: o.mul_(1 + 1e-6)), (0, 1)),
    "a NaN": ("all_reduce", "fp32", _all_reduce_then(_on_rank_1(lambda o: o[:1].fill_(float("nan")))), (1,)),
    "another root": ("broadcast", "fp32", lambda output, given: dist.broadcast(output, 0), (0, 1)),
    "parts of two ranks swapped": ("all_gather", "bf16", _swapped_parts, (0, 1)),
    "nothing received": ("all_gather", "int64", lambda output, given: None, (0, 1)),
    "the last element not written": ("reduce_scatter", "fp64", _all_but_the_last, (0, 1)),
    "the root's own part left out": ("reduce", "fp32", lambda output, given: output.zero_(), (1,)),
    "reduced to another root": ("reduce", "bf16", lambda output, given: dist.reduce(output, 0), (1,)),
    "a message in another order": ("send_recv", "fp16", _other_way_round, (0,)),
    "its own message": ("send_recv", "int64", lambda output, given: output.copy_(given), (0, 1)),
    "no exchange": ("all_to_all", "fp32", lambda output, given: output.copy_(given), (0, 1)),
}


def _message_of_a_wrong_value(name: str) -> str:
    """What this rank says of a collective that leaves rank 1 with one element that is off by one; "" if nothing."""

    def call(output, given):
        ALL_COLLECTIVES[name].call(output, given)
        _on_rank_1(_add_one)(output)

    buffers = Buffers(replace(ALL_COLLECTIVES[name], call=call), 4096, "bf16", world(), RollCall())
    buffers.prepare()
    buffers.call()
    try:
        buffers.require_exact("before it was timed")
    except HyperionError as error:
        return error.what
    return ""


def _overlaps() -> dict:
    """An all-reduce beside a sleep, and beside products of the library's choice; and whether the sleep was called both by
    itself and after an all-reduce had begun."""
    roll, begun = RollCall(), []

    def sleep() -> None:
        begun.append("overlapped with a computation" in roll.operation)
        time.sleep(0.01)

    beside = {"a sleep": sleep, "products": None}
    report = {}
    for name, compute in beside.items():
        measured = measure_overlap(OVERLAPPED, "fp32", world(), roll, compute=compute, minimum_samples=10, time_limit_s=0.05)
        report[name] = {
            "share": measured.share.value,
            "low": measured.share.ci_low,
            "high": measured.share.ci_high,
            "words": str(measured),
            "error": measured.verification.error,
            "samples": [t.samples_s.tolist() for t in (measured.compute, measured.both)],
        }
    return report | {"begun": [False in begun, True in begun]}


def checks(folder: str) -> dict:
    """Sound and broken collectives and the experiment, written to a file; then a wrong value on rank 1 ends the job."""
    torch.set_num_threads(1)
    report = {"sound": {}, "broken": {}}
    for name, collective in ALL_COLLECTIVES.items():
        for dtype in DTYPES:
            for size in SIZES:
                m = measure_collective(collective, size, dtype, world(), RollCall(), time_limit_s=0.01)
                report["sound"][f"{name} {dtype} {size}"] = {
                    "error": m.verification.error,
                    "bytes": m.bytes,
                    "samples": m.timing.samples_s.tolist(),
                    "busbw": m.busbw_gb_s(1.0),
                }
    for name, (collective, dtype, call, _) in FAULTS.items():
        size = ELEMENTS * DTYPES[dtype].itemsize
        buffers = Buffers(replace(ALL_COLLECTIVES[collective], call=call), size, dtype, world(), RollCall())
        buffers.prepare()
        buffers.call()
        report["broken"][name] = buffers.wrong()[0]
    report["wrong value"] = {name: _message_of_a_wrong_value(name) for name in ("reduce", "send_recv")}
    context = Context(notebook="toy", experiment="collectives", sizes=EXPERIMENT, workspace=Path(folder))
    report["rows"] = rows_to_csv(measure_on_rank(context, lambda *progress: None).rows)
    report["overlap"] = _overlaps()
    Path(folder, f"{world().rank}.json").write_text(json.dumps(report))
    collective, _, call, _ = FAULTS["one value on rank 1"]
    check_collectives(Check([4096], ["bf16"]), {collective: replace(COLLECTIVES[collective], call=call)})
    return {}


def _from_call(name: str, count: int, what):
    """A collective before whose call number `count` rank 1 does `what`."""
    calls, sound = iter(range(1, sys.maxsize)), ALL_COLLECTIVES[name]

    def call(output, given):
        if next(calls) == count and dist.get_rank() == 1:
            what()
        sound.call(output, given)

    return {name: replace(sound, call=call)}


def hangs(name: str) -> dict:
    """Rank 1 does not come to one of the calls."""
    broken = _from_call(name, 10, lambda: time.sleep(600))
    return {"checked": check_collectives(Check([4096], ["fp32"], timeout_s=3), broken)}


def _killed(name: str) -> dict:
    """The collective, before one of whose calls rank 1 is killed."""
    return _from_call(name, 10, lambda: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_under_torchrun(Check([4096], ["fp32"]), _killed(sys.argv[1]))
