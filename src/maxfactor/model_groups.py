"""`for_model`: sorts the parameters of a model into groups by the layers that own them.

The kind of a parameter depends on the types of the modules that own it and on shapes. It does not
depend on the names of layers, on the device, or on sharding. Parameters of modules of unknown types
are also told apart by their own names: a `weight` is a linear map, a `bias` a vector.
"""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from maxfactor.attention import head_blocks, is_named, is_transposed_linear
from maxfactor.distributed.placement import is_sharded
from maxfactor.maxfactor import MaxFactor
from maxfactor.recipes import COMMON, KINDS, find_recipe
from maxfactor.settings import (
    Execution,
    MaxFactorSettings,
    check_lr,
    warn_of_rate,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from maxfactor.recipes import Recipe, RecipeName
    from maxfactor.settings import Blocks

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
LISTS = (nn.ParameterList, nn.ParameterDict)
PARTS = (*LISTS, ParametrizationList)  # their parameters belong to the module that they are in

# The attribute of each layer type with the width of its input; of embeddings, the output.
INPUT_WIDTHS = (
    (nn.Linear, "in_features"),
    (_ConvNd, "in_channels"),
    (nn.MultiheadAttention, "embed_dim"),
    (nn.RNNBase, "input_size"),
    (EMBEDDINGS, "embedding_dim"),
)

# Words in the names of linear maps: `weight`, `in_proj_weight`, `W1`, `kernel`, `text_projection`;
# `Wq` and `Wqkv`, too.
WEIGHT_WORDS = {"weight", "weights", "kernel", "kernels", "w", "proj", "projection"}
WORD_ENDS = re.compile(r"[\W\d_]+|(?<=[a-z])(?=[A-Z])")

# A tied weight has several owners. Its kind is the first of these among those of its owners.
PRECEDENCE = ("adapter", "embedding", "head", "conv", "tensor", "hidden", "vector")


def for_model(
    model: nn.Module,
    recipe: RecipeName = "quality",
    lr: float | Tensor | None = None,
    *,
    heads_per_block: int | None = None,
    **overrides: Any,
) -> MaxFactor:
    r"""Return a MaxFactor for a model, with one parameter group for each kind of layer in it.

    .. code-block:: text

        hidden     matrices of linear layers, attention, recurrent layers, pointwise convolutions
        conv       other convolutions
        tensor     other tensors of three and more dimensions, such as the stacked experts of an MoE
        embedding  embeddings, positional tables, heads tied to an embedding, new tokens of PEFT
        head       the output projection to the vocabulary, if it is not tied
        adapter    matrices that PEFT adds to a layer, such as LoRA's
        vector     norms, biases, scalars: without weight decay

    A head is a layer that the model names as such (`get_output_embeddings()` of transformers), or a
    linear layer that is the model's last, or that projects to an embedding's vocabulary size
    outside of repeated blocks, if no other layer takes inputs of that width. Layers beside the last
    one in a ModuleList or ModuleDict, with the same input, count as last, too. If there is none of
    these, it is a linear layer that comes last, right after a module that holds other layers.

    A matrix outside of known layers is `hidden` if it looks like the weight of a linear layer: its
    module has no layers inside, and one of the words in its name is `weight`, `kernel`, `w`, `proj`
    or `projection`. Others are `embedding`: positional tables, codebooks, the `A_log` of Mamba. A
    name that ends in `bias` makes it a `vector`, such as the biases of stacked experts. Parameters
    in a ParameterList or ParameterDict belong to the module that holds the list.

    The key `kind` of each group has its kind; `optimizer.describe()` shows them. Tied parameters
    appear once. Frozen ones are left out, and so are the sinusoids of Whisper's encoder: a table
    that transformers makes trainable when it loads a model. Layers that are unfrozen later are
    added by `optimizer.add_module(layer)`. The model may be on the meta device, sharded by
    `fully_shard`, compiled, or wrapped for data-parallel training.

    With "quality", hidden matrices that begin smaller than 1 / sqrt(3 * fan_in) take steps as if
    they had that size, as they would learn too slowly otherwise. Those that are clearly smaller
    than the model's other hidden matrices, trained or frozen, keep their own size: they are small
    on purpose. The first step looks at the weights for that.

    Args:
        model: The model itself, not its parameters.
        recipe: "quality" (best quality), "fast" (frequency-adaptive momentum in int8), "lean"
            (momentum for convolutions alone), or a published version: "published-0.1", "-0.2",
            "-0.3", "-1.0".
        lr: The learning rate; None takes the recipe's. Recipes may scale it for some kinds. A rate
            of at most 1e-4, as for AdamW, or above 1 gets a UserWarning: it is a share of each
            weight's size, not an absolute step. All groups share a tensor, so a recipe that scales
            it refuses a tensor, and a scheduler that sets each group by itself (ReduceLROnPlateau,
            a LambdaLR per group) needs a number.
        heads_per_block: Cut attention matrices into blocks of as many heads, which are
            orthogonalised one by one: rows of the query, key and value projections, columns of the
            output projection. It makes a step of "quality" cheaper. They form groups of their own,
            of kind `hidden`. If it does not divide the number of heads, blocks have the next
            smaller number of heads that does. A matrix whose heads are not known stays whole.
            None: all of them stay whole.
        **overrides: Arguments of `MaxFactor` that replace the recipe's in every group. A
            `weight_decay` does not apply to the group of vectors.

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
    rate = None if lr is None else check_lr(lr)  # before it is scaled
    if rate is not None:
        warn_of_rate(rate, f"the recipe's own, {chosen.common['lr']:g}")
    sorter = ModelSorter(_unwrapped(model), chosen, rate, overrides, heads_per_block)
    groups = sorter.groups(sorter.named())
    _check_shares(recipe, chosen, rate, [group["kind"] for group in groups])
    if not groups:
        raise ValueError(
            f"{type(sorter.model).__name__} has no trainable parameters; call requires_grad_(True) "
            "on the layers to train before building the optimizer"
        )
    optimizer = MaxFactor(groups, **_group_settings(chosen, None, rate, overrides))
    optimizer.sorter, optimizer.left_out = sorter, sorter.left_out
    return optimizer


class ModelSorter:
    """Sorts the parameters of a model into groups: once for `for_model`, then for `add_module`.

    Args:
        model: The model without wrappers.
        recipe: The settings of each kind.
        lr: The learning rate; None is the recipe's.
        overrides: Settings that replace the recipe's.
        heads_per_block: How attention matrices are cut; None leaves them whole.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        lr: float | Tensor | None,
        overrides: dict[str, Any],
        heads_per_block: int | None = None,
    ) -> None:
        _check_shapes(model)
        self.model, self._recipe, self._lr, self._overrides = model, recipe, lr, overrides
        # By name, as FSDP2 replaces the parameters and must be able to free the old ones. A later
        # freeze, or a new layer, does not change them.
        self._kinds = _kinds_by_name(model)
        self._transposed = _transposed_names(model)
        self._heads_per_block = heads_per_block
        self._blocks = self._blocks_by_name()
        tables = _sinusoids(model)
        self.left_out = {
            name: "sinusoids of the encoder's positions, a table that is not trained"
            for name, param in self.named()
            if param in tables
        }

    def kind_of(self, name: str) -> str:
        """The kind of a parameter of the model."""
        return self._kinds[name]

    def named(self) -> list[tuple[str, Tensor]]:
        """The trainable parameters of the model with their names, without duplicates."""
        return [(name, param) for name, param in _named(self.model) if param.requires_grad]

    def groups(self, named: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
        """A group with the recipe's settings for each kind among these parameters."""
        alike: dict[tuple[str, bool, Blocks | None], list[tuple[str, Tensor]]] = {}
        for name, param in named:
            if name not in self.left_out:
                key = self._kinds[name], name in self._transposed, self._blocks.get(name)
                alike.setdefault(key, []).append((name, param))
        # Whole matrices first.
        order = sorted(alike, key=lambda key: (KINDS.index(key[0]), key[1], key[2] or ()))
        return [
            {
                "params": alike[kind, transposed, blocks],
                "kind": kind,
                "transposed": transposed,
                "blocks": blocks,
                **self._settings(kind),
            }
            for kind, transposed, blocks in order
        ]

    def _blocks_by_name(self) -> dict[str, Blocks]:
        """The blocks of each hidden matrix that is cut."""
        if self._heads_per_block is None:
            return {}
        settings = MaxFactorSettings.from_group(self._settings("hidden"))
        if not settings.rules.matrix.is_orthogonal:
            raise ValueError(
                f"heads_per_block={self._heads_per_block} is for an orthogonal direction, and this "
                f"recipe has direction={settings.direction!r} for hidden matrices; leave it out, "
                "or take the recipe 'quality'"
            )
        blocks = head_blocks(self.model, self._heads_per_block)
        return {
            name: blocks[param]
            for name, param in _named(self.model)
            if param in blocks and self._kinds[name] == "hidden"
        }

    def _settings(self, kind: str) -> dict[str, Any]:
        return _group_settings(self._recipe, kind, self._lr, self._overrides)

    def hidden(self) -> dict[Tensor, bool]:
        """The hidden matrices of the model, frozen ones, too; whether they are transposed."""
        return {
            param: name in self._transposed
            for name, param in _named(self.model)
            if self._kinds.get(name) == "hidden"
        }

    def new_groups(self, module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups for the parameters of a module that are trainable now and not in `groups`."""
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        inside = set(module.parameters())
        if outside := inside - set(self.model.parameters()):
            shapes = sorted(str(tuple(param.shape)) for param in outside)
            raise ValueError(
                f"{type(module).__name__} has {len(outside)} parameters that are not in the model "
                f"of this optimizer, of shapes {', '.join(shapes[:3])}; give a part of that model"
            )
        self._kinds = {**_kinds_by_name(self.model), **self._kinds}  # it may have new layers
        self._transposed |= _transposed_names(self.model)
        self._blocks = {**self._blocks_by_name(), **self._blocks}
        new = inside - {param for group in groups for param in group["params"]}
        added = self.groups((name, param) for name, param in self.named() if param in new)
        if not added:
            raise ValueError(
                f"{type(module).__name__} has no trainable parameters that are new to the "
                "optimizer; call requires_grad_(True) on it first"
            )
        return [self._at_present_rate(group, groups) for group in added]

    def _at_present_rate(
        self, group: dict[str, Any], groups: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Set a new group's rate to the fraction of the recipe's that the other groups are at."""
        guide = next((each for each in groups if each.get("kind") in KINDS), None)
        if guide is None:
            return group
        if isinstance(guide["lr"], Tensor):  # shared by all groups
            return {**group, "lr": guide["lr"]}
        began = self._settings(guide["kind"])["lr"]
        rates = {key: guide[key] / began for key in ("lr", "initial_lr") if key in guide}
        return {**group, **{key: group["lr"] * share for key, share in rates.items()}}


def _sinusoids(model: nn.Module) -> set[Tensor]:
    """The tables of sinusoids in Whisper's encoder, which transformers unfreezes when it loads it.

    A table that training has changed is a weight. On the meta device and in shards the values
    cannot be read, and the type decides.
    """
    tables = set[Tensor]()
    for module in model.modules():
        if is_named(module, "WhisperEncoder"):
            embeddings = [child for child in module.children() if isinstance(child, nn.Embedding)]
            tables |= {each.weight for each in embeddings if _is_table(each.weight)}
    return tables


def _is_table(weight: Tensor) -> bool:
    if weight.is_meta or is_sharded(weight):
        return True
    length, width = weight.shape
    if width < 4 or width % 2:
        return False
    rates = torch.exp(-math.log(10_000.0) / (width // 2 - 1) * torch.arange(width // 2))
    angles = torch.arange(length)[:, None] * rates
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    found = weight.detach().to("cpu", torch.float32)  # once, when the optimizer is built
    return bool(torch.allclose(found, table, rtol=0.0, atol=0.01))  # 16 bits, far positions


def _check_names(overrides: dict[str, Any]) -> None:
    of_layers = {"blocks", "transposed"}
    known = sorted({*MaxFactorSettings.names(), *Execution.names()} - {"lr", *of_layers})
    if "blocks" in overrides:
        raise TypeError(
            f"for_model() has no setting 'blocks', got {overrides['blocks']!r}: they depend on the "
            "layer; give heads_per_block, such as heads_per_block=1"
        )
    for name in overrides:
        if name not in known:
            raise TypeError(
                f"for_model() has no setting {name!r}; known settings: {', '.join(known)}"
            )


def _check_shares(
    name: str, recipe: Recipe, lr: float | Tensor | None, kinds: Iterable[str]
) -> None:
    """Refuse a tensor lr if the recipe scales it: scaled copies would not follow its changes."""
    shares = {kind: share for kind in kinds if (share := recipe.share(kind)) != 1.0}
    if shares and isinstance(lr, Tensor):
        told = ", ".join(f"{kind} {share:g}" for kind, share in shares.items())
        raise ValueError(
            f"lr is a tensor, but recipe {name!r} takes shares of it ({told}), which would not "
            "follow its changes; give a number, then set a tensor in each group if you need one"
        )


def _group_settings(
    recipe: Recipe, kind: str | None, lr: float | Tensor | None, overrides: dict[str, Any]
) -> dict[str, Any]:
    """The recipe's settings of a kind, with the caller's overrides."""
    settings = recipe.settings(kind, lr)
    replaced = dict(overrides)
    if kind == "vector":
        replaced.pop("weight_decay", None)
    if not isinstance(replaced.get("momentum", 0.0), Real):
        replaced.setdefault("nesterov", False)  # only a number may look ahead
    if replaced.get("momentum", 0.0) is None:
        replaced.setdefault("momentum_dtype", None)
        replaced.setdefault("d", COMMON["d"])  # (10) bounds only the input of a momentum
    return {**settings, **replaced}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data-parallel and torch.compile wrappers."""
    while True:
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            model = compiled
        elif isinstance(model, WRAPPERS):
            model = model.module
        else:
            return model


def _check_shapes(model: nn.Module) -> None:
    """Refuse modules without known shapes: FSDP1 flattens them, lazy layers have none yet."""
    for name, module in model.named_modules():
        if is_named(module, "FullyShardedDataParallel"):
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


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a model with their names before torch.compile, without duplicates."""
    return [(name.replace("_orig_mod.", ""), param) for name, param in model.named_parameters()]


def _kinds_by_name(model: nn.Module) -> dict[str, str]:
    kinds = _kinds(model)
    return {name: kinds[param] for name, param in _named(model)}


def _transposed_names(model: nn.Module) -> set[str]:
    """The weights of linear layers that have their inputs along the first dimension."""
    transposed = {
        param
        for module, key, param in _owned(model)
        if key == "weight" and is_transposed_linear(module)
    }
    return {name for name, param in _named(model) if param in transposed}


def _kinds(model: nn.Module) -> dict[Tensor, str]:
    """The kind of every parameter."""
    heads, adapters = _heads(model), _adapters(model)
    kinds: dict[Tensor, str] = {}
    for module, key, param in _owned(model):
        kind = _kind(module, key, param, is_head=module in heads)
        if module in adapters and kind != "vector":
            # The latter is rows of an embedding, of new tokens. A direction that is orthogonal
            # would go on moving those of tokens that are not seen.
            kind = "embedding" if is_named(module, "TrainableTokensLayer") else "adapter"
        kinds[param] = min(kinds.get(param, kind), kind, key=PRECEDENCE.index)
    return kinds


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each module with the names and parameters that it owns."""
    for module in model.modules():
        if module is model or not isinstance(module, PARTS):
            for key, param in _own_parameters(module):
                yield module, key, param


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module, and those in its lists, dicts and parametrizations."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    parts: dict[str, nn.Module] = {
        key: each for key, each in module.named_children() if isinstance(each, LISTS)
    }
    if is_parametrized(module):
        parts.update(cast("nn.ModuleDict", module.parametrizations).items())
    for name, part in parts.items():
        for key, param in _own_parameters(part):
            yield f"{name}.{key}", param


def _kind(module: nn.Module, key: str, param: Tensor, *, is_head: bool) -> str:
    if param.ndim < 2 or isinstance(module, NORMS):
        return "vector"
    if key != "weight" and _ndim_without_ones(param) < 2:  # weight_norm's magnitudes, bias_k
        return "vector"
    if isinstance(module, EMBEDDINGS):
        return "embedding"
    if is_head:
        return "head"
    if _is_linear(module) or isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return "hidden"
    if isinstance(module, _ConvNd):
        return "conv"
    return _bare_kind(module, key, param)


def _bare_kind(module: nn.Module, key: str, param: Tensor) -> str:
    """The kind of a parameter in a module of unknown type."""
    ndim = _ndim_without_ones(param)
    is_bias = any(part.endswith(("bias", "biases")) for part in key.split("."))
    if ndim < 2 or is_bias:  # (experts, n) is a bias for each expert
        return "vector"
    if ndim > 2:
        return "tensor"
    if param.ndim > 2 or _holds_layers(module):  # (1, n, d) is added to activations
        return "embedding"
    return "hidden" if any(map(_names_weight, WORD_ENDS.split(key))) else "embedding"


def _names_weight(word: str) -> bool:
    """Whether a word in a parameter's name stands for a linear map."""
    return word.lower() in WEIGHT_WORDS or re.fullmatch("W[a-z]{1,3}", word) is not None


def _holds_layers(module: nn.Module) -> bool:
    """Whether modules inside it have parameters of their own."""
    inner = [
        each for each in module.modules() if each is not module and not isinstance(each, PARTS)
    ]
    return any(True for each in inner for _ in each.parameters(recurse=False))


def _ndim_without_ones(param: Tensor) -> int:
    return sum(size != 1 for size in param.shape)


def _heads(model: nn.Module) -> set[nn.Module]:
    """The layers that project to the model's outputs."""
    modules = list(model.modules())
    linears = [module for module in modules if _is_linear(module)]
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, EMBEDDINGS)}
    last = _last_linears(modules)
    wide = {each for each in linears if _output_width(each) in vocabularies}
    inner = _inside_blocks(modules, last & wide)  # a vocabulary's width is a coincidence there
    likely = (wide - inner) | last
    heads = {linear for linear in likely if _is_last_in_line(linear, modules, last)}
    for module in modules:
        named = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(named, nn.Module):
            heads.update(named.modules())
    return heads or _beside_backbone(model)


def _last_linears(modules: list[nn.Module]) -> set[nn.Module]:
    """The last linear layer, and those beside it in a ModuleList with the same input.

    Such as one head for each task.
    """
    linears = [module for module in modules if _is_linear(module)]
    last = set(linears[-1:])
    for module in modules:
        beside = set(module.children()).intersection(linears)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and last <= beside:
            last |= {each for each in beside if _input_width(each) == _input_width(linears[-1])}
    return last


def _inside_blocks(modules: Iterable[nn.Module], heads: set[nn.Module]) -> set[nn.Module]:
    """The modules inside repeated blocks: siblings of one type, with parameters of one shape.

    In a ModuleList the type is enough: of a mixture model's blocks only some have experts.
    Siblings with embeddings are models, such as a student and its teacher. Those of a head are
    heads.
    """
    inside = set[nn.Module]()
    for module in modules:
        alike: dict[Any, list[nn.Module]] = {}
        for child in module.children():
            shapes: tuple[object, ...] = ()
            if not isinstance(module, nn.ModuleList):
                shapes = tuple(param.shape for param in child.parameters())
            alike.setdefault((type(child), shapes), []).append(child)
        blocks = [
            block
            for siblings in alike.values()
            if len(siblings) > 1 and not any(heads & set(each.modules()) for each in siblings)
            for block in siblings
            if not any(isinstance(each, EMBEDDINGS) for each in block.modules())
        ]
        inside.update(each for block in blocks for each in block.modules() if each is not block)
    return inside


def _is_last_in_line(linear: nn.Module, modules: list[nn.Module], last: set[nn.Module]) -> bool:
    """Whether no other layer takes inputs of the width that a linear layer puts out."""
    layers = [module for module in modules if _input_width(module) is not None]
    width, first = _output_width(linear), layers[0]
    # A first convolution takes the model's input: three classes are not three colours.
    is_free = linear in last and isinstance(first, _ConvNd)
    others = (each for each in layers if each is not linear and not (is_free and each is first))
    return all(_input_width(each) != width for each in others)


def _beside_backbone(model: nn.Module) -> set[nn.Module]:
    """The model's last layer, if it is linear and stands right after a module that holds layers.

    Such as a classifier beside an encoder, whatever its width is.
    """
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    has_own = any(True for _ in model.parameters(recurse=False))
    if len(children) == 1 and not has_own and not isinstance(children[0], nn.ModuleList):
        return _beside_backbone(children[0])  # a wrapper
    layered = [child for child in children if any(map(_is_layer, child.modules()))]
    if len(layered) < 2 or not _is_linear(layered[-1]) or _is_layer(layered[-2]):
        return set()
    return {layered[-1]}


def _is_layer(module: nn.Module) -> bool:
    """Whether it is a layer with matrices, other than an embedding."""
    return _is_linear(module) or isinstance(module, (_ConvNd, nn.MultiheadAttention, nn.RNNBase))


def _adapters(model: nn.Module) -> set[nn.Module]:
    """The modules that PEFT has added to layers of the model."""
    added: set[nn.Module] = set()
    for module in model.modules():
        if is_named(module, "BaseTunerLayer"):
            base = getattr(module, "base_layer", None)
            own = set(base.modules()) if isinstance(base, nn.Module) else set()
            added.update(set(module.modules()) - own)
    return added


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a Linear, or one by another name.

    These are Conv1D of transformers, whose weight is transposed, and pointwise convolutions, as in
    every block of a Conformer.
    """
    return isinstance(module, nn.Linear) or is_transposed_linear(module) or _is_pointwise(module)


def _is_pointwise(module: nn.Module) -> bool:
    """Whether it is a convolution with a kernel of one, from all channels to all channels."""
    return isinstance(module, _ConvNd) and set(module.kernel_size) == {1} and module.groups == 1


def _output_width(linear: nn.Module) -> int:
    name = "out_channels" if isinstance(linear, _ConvNd) else "out_features"
    width: int = getattr(linear, "nf" if is_transposed_linear(linear) else name)
    return width


def _input_width(module: nn.Module) -> int | None:
    """The width of a layer's input, or of an embedding's output."""
    width: int | None = None
    if is_transposed_linear(module):
        width = getattr(module, "nx", None)
    elif known := [name for types, name in INPUT_WIDTHS if isinstance(module, types)]:
        width = getattr(module, known[0])
    elif isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim == 1:
        width = weight.shape[0]  # a norm, of torch or of the model
    return width
