"""One call for a model: its parameters in groups, by the layers that own them.

The kind of a parameter comes from the types of the modules that hold it and from shapes, so it
does not matter how a model calls its layers, on which device it lies, or whether it is sharded.
"""

from __future__ import annotations

from collections import Counter
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from maxfactor.maxfactor import MaxFactor
from maxfactor.recipes import COMMON, KINDS, find_recipe
from maxfactor.settings import Execution, MaxFactorSettings, check_lr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maxfactor.recipes import Recipe, RecipeName

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)

# Where a layer type keeps the width of the activations that it takes in, or puts out.
INPUT_WIDTHS = (
    (nn.Linear, "in_features"),
    (_ConvNd, "in_channels"),
    (nn.MultiheadAttention, "embed_dim"),
    (nn.RNNBase, "input_size"),
    (EMBEDDINGS, "embedding_dim"),
)

# A tied weight has several owners; the first of these that one of them gives is its kind.
PRECEDENCE = ("embedding", "head", "conv", "hidden", "vector")


def for_model(
    model: nn.Module,
    recipe: RecipeName = "quality",
    lr: float | Tensor | None = None,
    **overrides: Any,
) -> MaxFactor:
    r"""Return a MaxFactor for a model, with one parameter group for each kind of layer in it.

    .. code-block:: text

        hidden     matrices of linear layers, attention and recurrent layers
        conv       convolutions, and other tensors of three and more dimensions
        embedding  embeddings, positional tables, and heads tied to an embedding
        head       the output projection to the vocabulary, if it is not tied
        vector     norms, biases, scalars: without weight decay

    A head is what the model itself names (`get_output_embeddings()` of transformers), and any
    linear layer that is the model's last, or as wide as an embedding's vocabulary, if no other
    layer takes that width in. A parameter that no known layer owns goes by its shape: a matrix
    beside other layers is a table (`embedding`), a matrix in a module of its own is `hidden`.

    Each group has its kind under the key `kind`; `optimizer.describe()` shows them. Frozen
    parameters are left out, tied ones are taken once. The model may be on the meta device, sharded
    by `fully_shard`, compiled, or wrapped for data-parallel training.

    Args:
        model: The model itself, not its parameters.
        recipe: "quality" (best quality), "fast" (frequency-adaptive momentum in int8), "lean" (no
            momentum), or a published version: "published-0.1", "-0.2", "-0.3", "-1.0".
        lr: The learning rate; None takes the recipe's. Recipes may give a kind a share of it. A
            tensor stays yours, to be changed from outside, so a recipe with shares refuses it; a
            scheduler that goes group by group (ReduceLROnPlateau, a LambdaLR for each group) needs
            a number.
        **overrides: Arguments of `MaxFactor` that replace the recipe's in every group. A
            `weight_decay` leaves the group of vectors without decay.

    Example:
        >>> import torch, maxfactor
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 50)
        ... )
        >>> optimizer = maxfactor.for_model(model, lr=0.02)
        >>> [(group["kind"], group["param_names"]) for group in optimizer.param_groups]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('hidden', ['1.weight']), ('embedding', ['0.weight']), ('head', ['2.weight']),
         ('vector', ['1.bias', '2.bias'])]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "for_model sorts a model's parameters itself, MaxFactor takes parameters"
        )
    chosen = find_recipe(recipe)
    _check_names(overrides)
    rate = None if lr is None else check_lr(lr)  # before a kind's share is taken of it
    _check_shares(recipe, chosen, rate)
    return MaxFactor(
        [
            {"params": params, "kind": kind, **_group_settings(chosen, kind, rate, overrides)}
            for kind, params in _named_by_kind(model).items()
            if params
        ],
        **_group_settings(chosen, None, rate, overrides),
    )


def _check_names(overrides: dict[str, Any]) -> None:
    known = sorted({*MaxFactorSettings.names(), *Execution.names()} - {"lr"})
    for name in overrides:
        if name not in known:
            raise TypeError(
                f"for_model() has no setting {name!r}; known settings: {', '.join(known)}"
            )


def _check_shares(name: str, recipe: Recipe, lr: float | Tensor | None) -> None:
    """Refuse a tensor that some groups would not follow when it is changed from outside."""
    shares = {kind: share for kind in KINDS if (share := recipe.share(kind)) != 1.0}
    if shares and isinstance(lr, Tensor):
        told = ", ".join(f"{kind} {share:g}" for kind, share in shares.items())
        raise ValueError(
            f"lr is a tensor, but recipe {name!r} takes shares of it ({told}), which would not "
            "follow it; give a number, and then each group a tensor of its own if you need one"
        )


def _group_settings(
    recipe: Recipe, kind: str | None, lr: float | Tensor | None, overrides: dict[str, Any]
) -> dict[str, Any]:
    """The recipe's settings of a kind, with what the caller wants instead."""
    settings = recipe.settings(kind, lr)
    replaced = dict(overrides)
    if kind == "vector":
        replaced.pop("weight_decay", None)
    if not isinstance(replaced.get("momentum", 0.0), Real):
        replaced.setdefault("nesterov", False)  # the recipe's look-ahead is for its own momentum
    if replaced.get("momentum", 0.0) is None:
        replaced.setdefault("momentum_dtype", None)
        replaced.setdefault("d", COMMON["d"])  # without a filter, whose input is bounded, (9) clips
    return {**settings, **replaced}


def _named_by_kind(model: nn.Module) -> dict[str, list[tuple[str, Tensor]]]:
    """The trainable parameters with their names, by kind; each once."""
    inner = _unwrapped(model)
    _check_shapes(inner)
    kinds = _kinds(inner)
    named: dict[str, list[tuple[str, Tensor]]] = {kind: [] for kind in KINDS}
    for name, param in inner.named_parameters():
        if param.requires_grad:
            named[kinds[param]].append((name.replace("_orig_mod.", ""), param))
    if not any(named.values()):
        raise ValueError(
            f"{type(inner).__name__} has no trainable parameters; call requires_grad_(True) on "
            "the layers to train before building the optimizer"
        )
    return named


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of data-parallel and compiled wrappers, with the user's own names."""
    while True:
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, WRAPPERS):
            model = model.module
        else:
            return model


def _check_shapes(model: nn.Module) -> None:
    """Refuse what hides its shapes (FSDP1), and what has none yet (lazy layers)."""
    for name, module in model.named_modules():
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
            raise ValueError(
                f"module {name!r} is wrapped by FullyShardedDataParallel, which flattens its "
                "parameters; shard with torch.distributed.fsdp.fully_shard instead"
            )
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"parameter {name!r} has no shape yet; run one batch through the model before "
                "building the optimizer"
            )


def _kinds(model: nn.Module) -> dict[Tensor, str]:
    """The kind of every parameter."""
    heads = _heads(model)
    kinds: dict[Tensor, str] = {}
    for module, key, param in _owned(model):
        kind = _kind(module, key, param, is_head=module in heads)
        kinds[param] = min(kinds.get(param, kind), kind, key=PRECEDENCE.index)
    return kinds


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter with each module that holds it and its name there."""
    for module in model.modules():
        if is_parametrized(module):  # the weight's parts belong to the layer whose weight it is
            parametrizations = cast("nn.ModuleDict", module.parametrizations)
            for name, parts in parametrizations.items():
                for key, param in parts.named_parameters(recurse=False):
                    yield module, f"{name}.{key}", param
        if not isinstance(module, ParametrizationList):
            for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
                yield module, key, param


def _kind(module: nn.Module, key: str, param: Tensor, *, is_head: bool) -> str:
    if param.ndim < 2 or isinstance(module, NORMS):
        return "vector"
    if key != "weight" and _ndim_without_ones(param) < 2:  # weight_norm's magnitudes, bias_k
        return "vector"
    if isinstance(module, EMBEDDINGS):
        return "embedding"
    if is_head:
        return "head"
    if isinstance(module, _ConvNd):
        return "conv"
    if _is_linear(module) or isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return "hidden"
    return _bare_kind(module, param)


def _bare_kind(module: nn.Module, param: Tensor) -> str:
    """The kind of a parameter in a module of the user's own, by its shape."""
    ndim = _ndim_without_ones(param)
    if ndim < 2:
        return "vector"
    if ndim > 2:
        return "conv"
    holds_layers = any(True for child in module.children() for _ in child.parameters())
    is_table = param.ndim > 2 or holds_layers  # (1, n, d) is made to be added to activations
    return "embedding" if is_table else "hidden"


def _ndim_without_ones(param: Tensor) -> int:
    return sum(size != 1 for size in param.shape)


def _heads(model: nn.Module) -> set[nn.Module]:
    """The layers that project to the outputs."""
    modules = list(model.modules())
    linears = [module for module in modules if _is_linear(module)]
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, EMBEDDINGS)}
    taken = Counter(_input_width(module) for module in modules)

    def is_last_in_line(linear: nn.Module) -> bool:
        width = _output_width(linear)
        return taken[width] == (_input_width(linear) == width)  # by no layer but itself

    heads = {
        linear
        for linear in linears
        if (linear is linears[-1] or _output_width(linear) in vocabularies)
        and is_last_in_line(linear)
    }
    for module in modules:
        named = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(named, nn.Module):
            heads.update(named.modules())
    return heads


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a Linear, or transformers' Conv1D, a Linear with its weight transposed."""
    return isinstance(module, nn.Linear) or _is_transposed_linear(module)


def _is_transposed_linear(module: nn.Module) -> bool:
    # By its name, as transformers is not needed here; fully_shard puts a subclass in its place.
    is_named_so = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    return is_named_so and hasattr(module, "nf") and hasattr(module, "nx")


def _output_width(linear: nn.Module) -> int:
    width: int = getattr(linear, "nf" if _is_transposed_linear(linear) else "out_features")
    return width


def _input_width(module: nn.Module) -> int | None:
    """The width of the activations that a layer takes in, or that an embedding starts."""
    width: int | None = None
    if _is_transposed_linear(module):
        width = getattr(module, "nx", None)
    elif known := [name for types, name in INPUT_WIDTHS if isinstance(module, types)]:
        width = getattr(module, known[0])
    elif isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim == 1:
        width = weight.shape[0]  # a norm, torch's or a model's own
    return width
