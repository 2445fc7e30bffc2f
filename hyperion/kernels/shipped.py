"""All kernels of this package as they run on an architecture, for the table of compiled kernels and the tests.

A configuration that runs on a GPU is in this list, with the same tile, types and constants.
"""

from dataclasses import replace
from typing import Any

from hyperion.kernels import attention_triton, block_gradients_triton, matmul_triton, rows_triton, token_loss_triton
from hyperion.kernels.builds import Architecture, Build

# Widths of rows in the list: a Transformer's width, a power of two, and a vocabulary's part.
WIDTHS = (768, 4096)
_DTYPE = "bf16"


def shipped_builds(architecture: Architecture) -> list[Build]:
    """Return the build of each kernel for this architecture, with bfloat16 tensors."""
    rows = [build for width in WIDTHS for build in row_builds(width)]
    add = {"x": "*bf16", "y": "*bf16", "total": "*bf16", "elements": "i32"}
    add_build = Build("vector_add", rows_triton.vector_add, add, {"BLOCK": rows_triton.ADD_BLOCK}, rows_triton.ADD_WARPS)
    products = [matmul_build(tile, architecture) for tile in matmul_triton.tiles_for(architecture.backend, architecture.target)]
    attention = [
        build
        for features in attention_triton.HEAD_DIMS
        for build in attention_builds(features, attention_triton.tiles_for(architecture.backend, architecture.target, features))
    ]
    return [add_build, *rows, *products, *attention, *training_builds(architecture)]


def row_builds(width: int) -> list[Build]:
    """Return the builds of softmax and layer norm for rows of this width."""
    import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it

    block, warps = {"BLOCK": triton.next_power_of_2(width)}, rows_triton.row_warps(width)
    softmax = {"x": "*bf16", "y": "*bf16", "columns": "i32"}
    norm = dict.fromkeys(("x", "weight", "bias", "y"), "*bf16") | {"means": "*fp32", "inverses": "*fp32"}
    norm |= {"columns": "i32", "eps": "fp32"}
    gradient = dict.fromkeys(("x", "grad_y", "weight", "grad_x"), "*bf16")
    gradient |= dict.fromkeys(("means", "inverses", "sums"), "*fp32") | {"rows": "i32", "columns": "i32"}
    gradient_constants = block | {"PROGRAMS": 416, "STAGES": 2}
    return [
        Build(f"softmax, {width} columns", rows_triton.softmax_row, softmax, block, warps),
        Build(f"layer norm, {width} columns", rows_triton.layer_norm_row, norm, block, warps),
        Build(f"layer norm backward, {width} columns", rows_triton.layer_norm_gradient, gradient, gradient_constants, warps),
    ]


def training_builds(architecture: Architecture) -> list[Build]:
    """Return the builds of the kernels of a training step, for the width and the vocabulary of GPT-2."""
    width, hidden = 768, 3072
    norm = block_gradients_triton.norm_tile(width)
    norm_build = _strip_build("layer norm and residual backward", block_gradients_triton.norm_strip, norm, width)
    if architecture.name == "sm_90":
        norm_build = replace(norm_build, spill_limit=512)  # the fastest of about twenty tiles on an H200
    return [
        _strip_build("GELU backward", block_gradients_triton.gelu_strip, block_gradients_triton.GELU, hidden),
        _strip_build("joined gradients", block_gradients_triton.joined_strip, block_gradients_triton.JOINED, width),
        norm_build,
        _strip_build("gradient of the positions", block_gradients_triton.position_sum, block_gradients_triton.POSITIONS, width),
        Build(
            "loss of the tokens",
            token_loss_triton.nll_and_slope,
            {"logits": "*bf16", "targets": "*i64", "nll": "*fp32", "ignored": "i32"},
            {
                "columns": 50304,
                "classes": 50257,
                "slope": 1.0,
                "BLOCK": token_loss_triton.BLOCK,
                "STAGES": token_loss_triton.STAGES,
            },
            token_loss_triton.WARPS,
        ),
    ]


def _strip_build(name: str, kernel: Any, tile: block_gradients_triton.Tile, columns: int) -> Build:
    """Return the build of a kernel of `block_gradients_triton`. Its arguments are bfloat16 tensors, except for a few names."""
    constants = {"columns": columns, "SUMS": 4, "STRIP": block_gradients_triton.STRIP}
    constants |= {"ROWS": tile.rows, "BLOCK": tile.columns, "STAGES": tile.stages}
    constants = {one: value for one, value in constants.items() if one in kernel.arg_names}
    types = dict.fromkeys(("sums", "means", "inverses"), "*fp32") | dict.fromkeys(("rows", "sequences"), "i32")
    signature = {one: types.get(one, f"*{_DTYPE}") for one in kernel.arg_names if one not in constants}
    return Build(f"{name}, {columns} columns", kernel, signature, constants, tile.warps)


def matmul_build(tile: matmul_triton.MatmulTile, architecture: Architecture) -> Build:
    """Return the build of the matrix product with a tile."""
    name = f"matmul {tile.rows}x{tile.columns}x{tile.depth}, {tile.stages} stages, bands of {tile.group}"
    constants: dict[str, Any] = tile.constants | {"STAGES": tile.stages}
    sizes: dict[str, str] = {"M": "i32", "N": "i32", "K": "i32"}
    options = {"num_stages": tile.stages}
    if matmul_triton.tiles_for(architecture.backend, architecture.target) != matmul_triton.HOPPER:
        matrices = dict.fromkeys(("a", "b", "c"), f"*{_DTYPE}")
        constants |= {"EVEN": True}
        return Build(name, matmul_triton.matmul_blocks, matrices | sizes, constants, tile.warps, options, matrix=True)
    shapes = {"a": (tile.rows, tile.depth), "b": (tile.depth, tile.columns), "c": (tile.rows, tile.columns // 2)}
    matrices = {name: f"tensordesc<{_DTYPE}[{rows}, {columns}]>" for name, (rows, columns) in shapes.items()}
    constants |= {"PROGRAMS": 132}
    return Build(name, matmul_triton.matmul_persistent, matrices | sizes, constants, tile.warps, options, matrix=True)


def attention_builds(features: int, tiles: attention_triton.Tiles) -> list[Build]:
    """Return the builds of the kernels of causal attention for heads of this many features."""
    numbers = {"scale": "fp32", "rows": "i32"}
    backward = {"log_sums": "*fp32", "delta": "*fp32", "natural_scale": "fp32"} | numbers
    held, read = ("held",), ("read",)
    kernels = (
        ("forward", attention_triton.attention_forward, tiles.forward, {"log_sums": "*fp32"} | numbers,
         dict.fromkeys(("queries", "output"), held) | dict.fromkeys(("keys", "values"), read)),
        ("backward, keys", attention_triton.attention_key_gradient, tiles.keys, backward,
         dict.fromkeys(("queries", "grad_output"), read) | dict.fromkeys(("keys", "values", "grad_keys", "grad_values"), held)),
        ("backward, queries", attention_triton.attention_query_gradient, tiles.queries, backward,
         dict.fromkeys(("queries", "grad_output", "grad_queries"), held) | dict.fromkeys(("keys", "values"), read)),
    )  # fmt: skip
    builds = [
        Build(
            f"attention {name}, {features} features",
            kernel,
            {one: _tensor(tile, features, kind == held) for one, kind in tensors.items()} | others,
            attention_triton.constants_of(tile, 1, features, True),
            tile.warps,
            matrix=True,
        )
        for name, kernel, tile, others, tensors in kernels
    ]
    delta = {"output": f"*{_DTYPE}", "gradient": f"*{_DTYPE}", "delta": "*fp32", "rows": "i32"}
    sizes = {"D": features, "ROWS": attention_triton.DELTA_ROWS}
    return [*builds, Build(f"attention delta, {features} features", attention_triton.attention_delta, delta, sizes, 4)]


def _tensor(tile: attention_triton.Tile, features: int, held: bool) -> str:
    """Return the type of an argument that is read in blocks."""
    if not tile.descriptors:
        return f"*{_DTYPE}"
    return f"tensordesc<{_DTYPE}[1, {tile.held if held else tile.read}, {features}]>"
