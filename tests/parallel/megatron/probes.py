"""For each change of the adaptation: code that works only with this change. It runs in a process without CUDA."""

import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from hyperion.errors import not_none


def device() -> None:
    from megatron.core.device import current_device

    assert torch.empty(1, device=current_device()).device.type == "cpu"


def random_states() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(7)
    tracker.add("one", 1)
    with mock.patch("logging.Logger.warning") as warning:
        with tracker.fork("one"):
            inside = torch.rand(3)
        assert not warning.called
    outside = torch.rand(3)
    for drawn, seed in ((inside, 1), (outside, 7)):
        torch.manual_seed(seed)
        assert torch.equal(drawn, torch.rand(3))


def linear_layers() -> None:
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    inputs, weight = torch.ones(2, 1, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    _parallel()
    output = linear_with_grad_accumulation_and_async_allreduce(inputs, weight, None, False, False, True, tp_group=_group())
    output.sum().backward()
    assert inputs.grad is not None and inputs.grad.shape == inputs.shape


def mappings() -> None:
    from megatron.core.tensor_parallel import mappings

    class TwoRanks:
        """A group that only tells its size: with one rank, the functions return at once."""

        def size(self) -> int:
            return 2

    mappings.dist_all_gather_func = lambda *arguments, **options: None
    assert mappings._gather_along_first_dim(torch.ones(2, 1), TwoRanks()).shape == (4, 1)


def memory_buffer() -> None:
    from megatron.core.utils import GlobalMemoryBuffer, local_multi_tensor_l2_norm

    norm, _ = local_multi_tensor_l2_norm(0, None, [[torch.tensor([3.0]), torch.tensor([4.0])]], False)
    assert norm.item() == 5
    assert GlobalMemoryBuffer().get_tensor((2, 3), torch.float32, "one").shape == (2, 3)


def transfers() -> None:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import p2p_communication

    p2p_communication._batched_p2p_ops = lambda **options: []
    config = ModelParallelConfig(pipeline_dtype=torch.float32, batch_p2p_sync=False)
    communicator = p2p_communication.P2PCommunicator(_group(), config)
    options = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": True, "recv_next": True}
    communicator._communicate(**options, tensor_shape=(2, 3))


def schedules() -> None:
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Model(torch.nn.Linear):
        config, model_type = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2), "decoder"

        def set_input_tensor(self, tensor) -> None:
            pass

    def forward(data, model):
        return model(next(data)), lambda output: (output.sum(), {"loss": output.sum().detach()})

    _parallel()
    options = {"num_microbatches": 2, "seq_length": 1, "micro_batch_size": 1}
    data = iter([torch.ones(1, 2)] * 2)
    assert len(forward_backward_no_pipelining(forward_step_func=forward, data_iterator=data, model=[Model(2, 1)], **options)) == 2


def gradient_buffers() -> None:
    assert _wrapped_linear().buffers[0].grad_data.device.type == "cpu"


def loss_scale() -> None:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 1, 1)
    scaler.update(True)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.scale.item() == 2


def optimizer() -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    single, half = (torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float, torch.bfloat16))
    assert FP32Optimizer(torch.optim.SGD([single]), OptimizerConfig(), None).get_loss_scale() == 1
    assert ChainedOptimizer([]).get_loss_scale() == 1
    mixed = Float16OptimizerWithFloat16Params(torch.optim.SGD([single, half]), OptimizerConfig(bf16=True), None, lambda *_: None)
    assert mixed.fp32_from_fp32_groups == [[single]] and mixed.float16_groups == [[half]]


def distributed_optimizer() -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    for dtype in (torch.float, torch.bfloat16):
        options = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, bf16=dtype is torch.bfloat16)
        get_megatron_optimizer(options, [_wrapped_linear(dtype, use_distributed_optimizer=True)])


def clipping() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    norm = get_grad_norm_fp32([parameter.grad], grad_stats_parallel_group=_group())
    clip_grad_by_total_norm_fp32([parameter], 1.0, norm)
    assert abs(norm - 5) < 1e-5 and abs(parameter.grad.norm().item() - 1) < 1e-4


def rotary() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=_group())(4).shape == (4, 1, 1, 8)


def causal_mask() -> None:
    from megatron.core.transformer.utils import get_default_causal_mask

    assert get_default_causal_mask(2).tolist() == [[False, True], [False, False]]


def norms() -> None:
    from types import SimpleNamespace

    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        sequence_parallel=True,
        memory_efficient_layer_norm=False,
        normalization="RMSNorm",
    )
    assert all(parameter.sequence_parallel for parameter in WrappedTorchNorm(config, 8).parameters())


def checkpoint_copies() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    assert FileSystemWriterAsync.preload_tensors([("file", "key", ([], [("item", torch.ones(1))]))], True)


def checkpoint_votes() -> None:
    from megatron.core.dist_checkpointing.strategies import state_dict_saver
    from torch.distributed.checkpoint.utils import _DistWrapper

    class Writer:
        def retrieve_write_results(self) -> list:
            return []

        def finish(self, *arguments) -> None:
            pass

    state_dict_saver.save_state_dict_async_finalize(Writer(), object(), _DistWrapper(None, True, 0))


PROBES: dict[str, Callable[[], None]] = {
    "device.py": device,
    "tensor_parallel/random.py": random_states,
    "tensor_parallel/layers.py": linear_layers,
    "tensor_parallel/mappings.py": mappings,
    "utils.py": memory_buffer,
    "pipeline_parallel/p2p_communication.py": transfers,
    "pipeline_parallel/schedules.py": schedules,
    "distributed/param_and_grad_buffer.py": gradient_buffers,
    "optimizer/grad_scaler.py": loss_scale,
    "optimizer/optimizer.py": optimizer,
    "optimizer/distrib_optimizer.py": distributed_optimizer,
    "optimizer/clip_grads.py": clipping,
    "models/common/embeddings/rotary_pos_embedding.py": rotary,
    "transformer/utils.py": causal_mask,
    "transformer/torch_norm.py": norms,
    "dist_checkpointing/strategies/filesystem_async.py": checkpoint_copies,
    "dist_checkpointing/strategies/state_dict_saver.py": checkpoint_votes,
}


def probe_changes(folder: str) -> dict:
    """Run each probe with all changes, and with all replacements of its file but one. Return what failed.

    Each run is a fork that loads only one module again, because importing megatron-core takes seconds.

    Returns:
        {"with all changes": errors by file, "without": errors by "file, number of the replacement"}.
    """
    from hyperion.parallel.megatron.release import adapted_copy, changes

    tree = Path(folder) / "tree"
    shutil.copytree(adapted_copy(), tree)
    sys.path.insert(0, str(tree))
    for change in changes():
        importlib.import_module(_module(change.file))
    answer = {"with all changes": _failures(list(PROBES), ""), "without": {}}
    for change in changes():
        path = tree / "megatron" / "core" / change.file
        adapted = path.read_text()
        for number, part in enumerate(change.replace):
            if not change.sha256:
                path.unlink()
            else:
                others = tuple(other for other in change.replace if other is not part)
                path.write_text(replace(change, replace=others).apply(not_none(change.revert(adapted))))
            errors = _failures([change.file], _module(change.file))
            answer["without"] |= {f"{file}, {number}": error for file, error in errors.items()}
            path.write_text(adapted)
    return answer


def _module(file: str) -> str:
    return "megatron.core." + file.removesuffix(".py").replace("/", ".")


def _failures(names: list[str], changed: str) -> dict[str, str]:
    """Run probes in a fork. Return the error of each probe that failed, by its name.

    Args:
        names: names of the probes.
        changed: module whose file has changed since it was imported; "" for none.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        errors = {}
        try:
            if changed:
                _load_again(changed)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        except BaseException as error:
            errors = dict.fromkeys(names, f"{type(error).__name__}: {error}"[:500])
        for name in names:
            try:
                PROBES[name]()
            except BaseException as error:
                traceback.print_exc()
                errors[name] = f"{type(error).__name__}: {error}"[:500]
        with os.fdopen(writer, "w") as file:
            json.dump(errors, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else dict.fromkeys(names, "the process died")


def _load_again(name: str) -> None:
    """Load a module from its changed file, and give its new functions and classes to the modules that imported the old ones."""
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    module = sys.modules[name]
    old = {id(value): key for key, value in vars(module).items() if getattr(value, "__module__", "") == name}
    held = list(vars(module).values())  # so that no new object gets the identity of an old one
    for key in [key for key in vars(module) if not key.startswith("__")]:
        delattr(module, key)  # `reload` would keep a name that the file does not import any more
    importlib.reload(module)
    for other in [other for key, other in sys.modules.items() if key.startswith("megatron.") and other is not module]:
        for key, value in list(vars(other).items()):
            if id(value) in old:
                setattr(other, key, getattr(module, old[id(value)]))
    del held


def _group() -> dist.ProcessGroup:
    return dist.group.WORLD


def _parallel() -> None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def _wrapped_linear(dtype: torch.dtype = torch.float, **options):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    _parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), torch.nn.Linear(2, 2, dtype=dtype))
