"""List the kernels of this package in all configurations that must compile for a GPU architecture.

The table of compiled kernels and the tests use this list. It contains every tile, with bfloat16 tensors:

- Attention with and without a causal mask, and with one and with four query heads per key-value head.
- Matrix products of even and of odd sizes.
- Softmax and layer norm for rows of several widths, including the largest width.
"""

from typing import Any

from hyperion.kernels import attention_triton, block_gradients_triton, matmul_triton, rows_triton, token_loss_triton
from hyperion.kernels.builds import Architecture, Build

# Row widths in the list: the width of a Transformer (GPT-2), and a power of two.
WIDTHS = (768, 4096)
_DTYPE = "bf16"


def shipped_builds(architecture: Architecture) -> list[Build]:
    """Return the builds of all kernels for this architecture, with bfloat16 tensors. A build is one configuration to compile."""
    rows = [build for width in WIDTHS for build in row_builds(width)]
    rows += row_builds(rows_triton.WIDEST)[:2] + row_builds(rows_triton.WIDEST_GRADIENT)[2:]
    add = {"x": "*bf16", "y": "*bf16", "total": "*bf16", "elements": "i32"}
    add_build = Build("vector_add", rows_triton.vector_add, add, {"BLOCK": rows_triton.ADD_BLOCK}, rows_triton.ADD_WARPS)
    products = matmul_builds(architecture)
    attention = [
        build
        for features in attention_triton.HEAD_DIMS
        for build in attention_builds(features, attention_triton.tiles_for(architecture.backend, architecture.target, features))
    ]
    return [add_build, *rows, *products, *attention, *training_builds()]


def row_builds(width: int) -> list[Build]:
    """Return the builds of softmax and layer norm for rows of this width."""
    import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it

    block, warps = {"BLOCK": triton.next_power_of_2(width)}, rows_triton.row_warps(width)
    softmax = {"x": "*bf16", "y": "*bf16", "columns": "i32"}
    norm = dict.fromkeys(("x", "weight", "bias", "y"), "*bf16") | {"means": "*fp32", "inverses": "*fp32"}
    norm |= {"columns": "i32", "eps": "fp32"}
    gradient = dict.fromkeys(("x", "grad_y", "weight", "grad_x"), "*bf16")
    gradient |= dict.fromkeys(("means", "inverses", "sums"), "*fp32") | {"rows": "i32", "columns": "i32"}
    gradient_constants = block | {"PROGRAMS": 416, "STAGES": rows_triton.GRADIENT_STAGES}
    return [
        Build(f"softmax, {width} columns", rows_triton.softmax_row, softmax, block, warps),
        Build(f"layer norm, {width} columns", rows_triton.layer_norm_row, norm, block, warps),
        Build(
            f"layer norm backward, {width} columns",
            rows_triton.layer_norm_gradient,
            gradient,
            gradient_constants,
            rows_triton.gradient_warps(width),
        ),
    ]


def training_builds() -> list[Build]:
    """Return the builds of the kernels of a training step, for GPT-2's width and vocabulary."""
    width, hidden = 768, 3072
    norm = block_gradients_triton.norm_tile(width)
    return [
        _strip_build("GELU backward", block_gradients_triton.gelu_strip, block_gradients_triton.GELU, hidden),
        _strip_build("joined gradients", block_gradients_triton.joined_strip, block_gradients_triton.JOINED, width),
        _strip_build("layer norm and residual backward", block_gradients_triton.norm_strip, norm, width),
        _strip_build("gradient of the positions", block_gradients_triton.position_sum, block_gradients_triton.POSITIONS, width),
        Build(
            "loss of the tokens",
            token_loss_triton.nll_and_slope,
            # The vocabulary of GPT-2 and its size after `padded_classes`.
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
    """Return the build of a kernel of `block_gradients_triton`.

    The arguments of the kernel are bfloat16 tensors, except the arguments in the variable `types`.
    """
    constants = {"columns": columns, "SUMS": 4, "STRIP": block_gradients_triton.STRIP}
    constants |= {"ROWS": tile.rows, "BLOCK": tile.columns, "STAGES": tile.stages}
    constants = {one: value for one, value in constants.items() if one in kernel.arg_names}
    types = dict.fromkeys(("sums", "means", "inverses"), "*fp32") | dict.fromkeys(("rows", "sequences"), "i32")
    signature = {one: types.get(one, f"*{_DTYPE}") for one in kernel.arg_names if one not in constants}
    return Build(f"{name}, {columns} columns", kernel, signature, constants, tile.warps)


def matmul_builds(architecture: Architecture) -> list[Build]:
    """Return the builds of the matrix product, for even sizes (multiples of all block sizes) and for odd sizes."""
    tiles = matmul_triton.tiles_for(architecture.backend, architecture.target)
    if tiles != matmul_triton.HOPPER:
        return [_blocks_build(tile, even) for tile in tiles for even in (True, False)]
    # If the rows do not start at multiples of 16 bytes, `matmul_blocks` runs.
    return [*(_persistent_build(tile) for tile in tiles), *(_blocks_build(tile, False) for tile in matmul_triton.SMALL)]


def _blocks_build(tile: matmul_triton.MatmulTile, even: bool) -> Build:
    name = f"matmul {tile.rows}x{tile.columns}x{tile.depth}, {tile.stages} stages, {'even' if even else 'odd'} sizes"
    signature: dict[str, str] = dict.fromkeys(("a", "b", "c"), f"*{_DTYPE}")
    signature |= dict.fromkeys(("M", "N", "K"), "i32")
    constants = tile.constants | {"STAGES": tile.stages, "EVEN": even}
    options = {"num_stages": tile.stages}
    return Build(name, matmul_triton.matmul_blocks, signature, constants, tile.warps, options, matrix=True, aligned=even)


def _persistent_build(tile: matmul_triton.MatmulTile) -> Build:
    name = f"matmul {tile.rows}x{tile.columns}x{tile.depth}, {tile.stages} stages, bands of {tile.group}"
    shapes = {"a": (tile.rows, tile.depth), "b": (tile.depth, tile.columns), "c": (tile.rows, tile.columns // 2)}
    signature = {one: f"tensordesc<{_DTYPE}[{rows}, {columns}]>" for one, (rows, columns) in shapes.items()}
    signature |= dict.fromkeys(("M", "N", "K"), "i32")
    # An H100 or H200 (SXM) has 132 multiprocessors.
    constants = tile.constants | {"STAGES": tile.stages, "PROGRAMS": 132}
    options = {"num_stages": tile.stages}
    return Build(name, matmul_triton.matmul_persistent, signature, constants, tile.warps, options, matrix=True)


def attention_builds(features: int, tiles: attention_triton.Tiles) -> list[Build]:
    """Return the builds of the attention kernels for heads with this number of features."""
    kernels = (
        ("forward", attention_triton.attention_forward, tiles.forward, ("queries", "output")),
        ("backward, keys", attention_triton.attention_key_gradient, tiles.keys, ("keys", "values", "grad_keys", "grad_values")),
        (
            "backward, queries",
            attention_triton.attention_query_gradient,
            tiles.queries,
            ("queries", "grad_output", "grad_queries"),
        ),
    )
    builds = [_attention_build(*kernel, features) for kernel in kernels]
    builds += [_attention_build(*kernel, features, causal=False) for kernel in kernels]
    # Only this kernel loops over the heads of a group. The others use the group size only to divide the number of a head.
    builds.append(_attention_build(*kernels[1], features, group=4))
    delta = {"output": f"*{_DTYPE}", "gradient": f"*{_DTYPE}", "delta": "*fp32", "rows": "i32"}
    sizes = {"D": features, "ROWS": attention_triton.DELTA_ROWS}
    return [*builds, Build(f"attention delta, {features} features", attention_triton.attention_delta, delta, sizes, 4)]


def _attention_build(
    name: str, kernel: Any, tile: attention_triton.Tile, held: tuple[str, ...], features: int, group: int = 1, causal: bool = True
) -> Build:
    """Return the build of an attention kernel.

    For causal attention without groups, the sequence length is even (a multiple of 16). Otherwise, it is odd.

    Args:
        held: names of the tensors of which a program holds one block. A program reads the other tensors block by block.
        group: number of query heads that share one key-value head.
    """
    types = dict.fromkeys(("log_sums", "delta"), "*fp32") | dict.fromkeys(("scale", "natural_scale"), "fp32") | {"rows": "i32"}
    constants, plain = attention_triton.constants_of(tile, group, features, causal), causal and group == 1
    names = [one for one in kernel.arg_names if one not in constants]
    signature = {one: types.get(one) or _block_type(tile, features, one in held) for one in names}
    kind = "" if plain else f", {'causal' if causal else 'not causal'}, groups of {group}, odd length"
    return Build(
        f"attention {name}, {features} features{kind}", kernel, signature, constants, tile.warps, matrix=True, aligned=plain
    )


def _block_type(tile: attention_triton.Tile, features: int, held: bool) -> str:
    """Return the type of a tensor that is read or written in blocks."""
    if not tile.descriptors:
        return f"*{_DTYPE}"
    return f"tensordesc<{_DTYPE}[1, {tile.held if held else tile.read}, {features}]>"
