"""Finds the heads in the attention layers of a model: how their matrices are cut into blocks.

A layer counts only if its heads are certain: it has query, key and value projections of known
names, and the sizes of all matrices agree with the number of heads of the layer or of its config.
All others stay whole, such as a fused projection whose layout its name does not tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from maxfactor.checks import check_count

if TYPE_CHECKING:
    from maxfactor.settings import Blocks, BlockSide

# Names of the projections in torch, transformers, ESPnet, NeMo and OpenAI's Whisper.
QUERY = ("q_proj", "query", "q", "linear_q")
KEY = ("k_proj", "key", "k", "linear_k")
VALUE = ("v_proj", "value", "v", "linear_v")
OUTPUT = ("out_proj", "o_proj", "out", "o", "linear_out")
# Names of the number of heads, and of the size of one, in a layer or in its config.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "h")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
HEAD_SIZE = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_k")


class Projection(NamedTuple):
    """A matrix of an attention layer, and the side along which its heads lie."""

    weight: Tensor
    side: BlockSide
    heads: int  # of q, k, v or the output; a fused matrix has more
    head_size: int


def head_blocks(model: nn.Module, heads_per_block: int) -> dict[Tensor, Blocks]:
    """The blocks of each attention matrix that is cut.

    A block has `heads_per_block` heads, or the next smaller number that divides those of the
    matrix. A matrix that would be one block is not cut.
    """
    most = check_count("heads_per_block", heads_per_block, 1)
    known = [each for module in model.modules() for each in projections(module)]
    if not known:
        raise ValueError(
            f"heads_per_block={most} needs attention layers whose heads are known, and "
            f"{type(model).__name__} has none; leave it out, or give `blocks` to groups of your own"
        )
    found: dict[Tensor, Blocks] = {}
    for weight, side, heads, head_size in known:
        size = head_size * max(n for n in range(1, min(most, heads) + 1) if heads % n == 0)
        if size < weight.shape[0 if side == "rows" else 1]:
            found[weight] = side, size
    return found


def projections(module: nn.Module) -> list[Projection]:
    """The matrices of an attention layer whose heads are known; none of other modules."""
    if isinstance(module, nn.MultiheadAttention):
        return _of_torch(module)
    return _of_linears(module) or _of_sibling(module) or _of_gpt2(module)


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is a Conv1D of transformers: a Linear with a transposed weight."""
    return is_named(module, "Conv1D") and hasattr(module, "nf") and hasattr(module, "nx")


def is_named(module: nn.Module, name: str) -> bool:
    """Whether a class of the module has this name, to avoid importing the package it is from.

    A base class, too, as `fully_shard` makes a subclass.
    """
    return any(cls.__name__ == name for cls in type(module).__mro__)


def _of_torch(module: nn.MultiheadAttention) -> list[Projection]:
    """The rows of q, k and v are one below the other in `in_proj_weight`."""
    heads, size = module.num_heads, module.head_dim
    own = dict(module.named_parameters(recurse=False))
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    found = [Projection(own[name], "rows", heads, size) for name in names if name in own]
    if (weight := _weight(module.out_proj)) is not None:
        found.append(Projection(weight, "columns", heads, size))
    return found


def _of_linears(module: nn.Module) -> list[Projection]:
    """Rows of q, k and v, of which k and v may have fewer heads; columns of the output."""
    if (found := _query_key_value(module)) and (output := _child(module, OUTPUT)) is not None:
        *_, heads, size = found[0]
        if output.shape[1] != heads * size:
            return []
        found.append(Projection(output, "columns", heads, size))
    return found


def _query_key_value(module: nn.Module) -> list[Projection]:
    """The projections to q, k and v, if all of them have as many heads as they should."""
    heads = _number(module, HEADS)
    weights = [_child(module, names) for names in (QUERY, KEY, VALUE)]
    if not heads or weights[0] is None:
        return []
    size = _number(module, HEAD_SIZE) or weights[0].shape[0] // heads
    counts = [(heads,), *[(heads, _number(module, KEY_VALUE_HEADS))] * 2]
    found = []
    for weight, known in zip(weights, counts, strict=True):
        if weight is None or weight.shape[0] not in [each * size for each in known if each]:
            return []
        found.append(Projection(weight, "rows", weight.shape[0] // size, size))
    return found


def _of_sibling(module: nn.Module) -> list[Projection]:
    """BERT's output projection, which is in a module beside the one of q, k and v."""
    children = dict(module.named_children())
    if not {"self", "output"} <= children.keys():
        return []
    found, output = _query_key_value(children["self"]), _child(children["output"], ("dense",))
    if not found or output is None:
        return []
    *_, heads, size = found[0]
    return [Projection(output, "columns", heads, size)] if output.shape[1] == heads * size else []


def _of_gpt2(module: nn.Module) -> list[Projection]:
    """GPT-2's Conv1D stores weights transposed, with the columns of q, k and v side by side."""
    heads = _number(module, HEADS)
    fused, query, output = (
        _child(module, (name,), is_transposed=True) for name in ("c_attn", "q_attn", "c_proj")
    )
    if not heads or fused is None or output is None or output.shape[0] % heads:
        return []
    width, size = output.shape[0], output.shape[0] // heads
    inputs = [weight for weight in (fused, query) if weight is not None]
    # Cross-attention has k and v in `c_attn`, and q in `q_attn`.
    if sum(weight.shape[1] for weight in inputs) != 3 * width:
        return []
    found = [Projection(weight, "columns", heads, size) for weight in inputs]
    return [*found, Projection(output, "rows", heads, size)]


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is a number, of the module or of its config."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _child(
    module: nn.Module, names: tuple[str, ...], *, is_transposed: bool = False
) -> Tensor | None:
    """The matrix of the first child of these names; of a layer that PEFT adapts, the model's."""
    children = dict(module.named_children())
    layer = next((children[name] for name in names if name in children), None)
    layer = getattr(layer, "base_layer", layer)
    is_wanted = (
        is_transposed_linear if is_transposed else (lambda each: isinstance(each, nn.Linear))
    )
    return _weight(layer) if layer is not None and is_wanted(layer) else None


def _weight(layer: nn.Module) -> Tensor | None:
    """The weight of a layer, unless it is made of other parameters."""
    return dict(layer.named_parameters(recurse=False)).get("weight")
