"""`transformers serve` without cuDNN's attention.

On an H100, PyTorch 2.11 prefers cuDNN for scaled dot product attention. cuDNN builds a plan for each new pair of a query length
and a key length, and PyTorch keeps all plans. With continuous batching, these lengths differ from step to step. The server then
spends much of its time on building plans, and its memory grows. The experiment `server_soak` measures both.

This program changes the setting and then runs `transformers`, which stays unmodified.
"""

import runpy

import torch

if __name__ == "__main__":
    torch.backends.cuda.enable_cudnn_sdp(False)
    runpy.run_module("transformers.cli.transformers", run_name="__main__", alter_sys=True)
