"""Fill a model's declared weights from stored tensors, and prove at the end that nothing is missing or left over.

Weights are filled one at a time, straight into their final place: from the mapped file to the device, this rank's part only.
So peak memory is the model and its largest tensor. Anything wrong is an error that names the tensor, before serving.

The functions on one weight (`tensors_of`, `check_shape`, `check_dtype`, `copy_tensor`) are shared with `streaming`, which
gets the tensors one after another and can't look ahead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from firstlight.errors import CheckpointError
from firstlight.models.causal import CausalModel
from firstlight.nn.module import Module, Piece, Segment, WeightSpec
from firstlight.quant import PLAIN, SCALE_SUFFIX, Packed, Weight, dtype_name, repack
from firstlight.weights.freed_memory import release_freed_memory
from firstlight.weights.stored import Range, StoredTensor

Form = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class TensorRole:
    """What one stored tensor is to a weight: which source, of which expert of a stack (None: of all), values or scales."""

    source: str
    expert: int | None = None
    scale: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A declared weight, and where it goes."""

    path: str
    module: Module
    attribute: str
    spec: WeightSpec

    def set(self, weight: Weight, layouts: Mapping[tuple[str, str], str]) -> None:
        """Give the module its weight, packed to its bound layout."""
        layout = layouts.get((self.path, self.attribute), PLAIN)
        setattr(self.module, self.attribute, repack(weight, layout))


def targets(model: torch.nn.Module) -> Iterator[Target]:
    """Every declared weight of a model."""
    for path, module in model.named_modules():
        if isinstance(module, Module):
            for attribute, spec in module.weight_specs.items():
                yield Target(path, module, attribute, spec)


COMPRESSED_SUFFIX = ".weight_scale"
"""What checkpoints of compressed-tensors call the scales that others call `.weight_scale_inv`; in both, value = element * scale."""

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Integers may be exponents, and kernels don't read scales in FP8."""


def own_name(model_class: type[CausalModel], name: str) -> str:
    """The name that the model's modules use for a published one."""
    if name.endswith(COMPRESSED_SUFFIX):
        name = name.removesuffix(COMPRESSED_SUFFIX) + ".weight" + SCALE_SUFFIX
    for published, own in model_class.renames:
        if name.startswith(published):
            return own + name.removeprefix(published)
    return name


def published_names(model_class: type[CausalModel], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Stored tensors under the names that the model's modules use.

    Raises CheckpointError if two tensors end up with one name.
    """
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        target = own_name(model_class, name)
        if target in renamed:
            raise CheckpointError(f"tensor {name} is there twice: {renamed[target].name} has the same meaning")
        renamed[target] = tensor
    return renamed


def load_weights(
    model: CausalModel,
    tensors: Mapping[str, StoredTensor],
    device: torch.device | str,
    layouts: Mapping[tuple[str, str], str] | None = None,
) -> None:
    """Fill every declared weight of `model` on `device`, each packed to its bound layout.

    tensors: by the names that `published_names` gives. layouts: (module path, attribute) -> layout; plain if not named.
    Raises CheckpointError for a tensor that is missing, unknown, misshapen, or given in two forms.
    """
    loader = _Loader(tensors, device)
    layouts = layouts or {}
    weights = list(targets(model))
    plans = [loader.choose_form(target.spec) for target in weights]
    loader.check_leftovers(model)
    for target, form in zip(weights, plans, strict=True):
        target.set(loader.fill(target.spec, form), layouts)
        if layouts.get((target.path, target.attribute), PLAIN) != PLAIN:
            release_freed_memory()  # the plain form's; the next weight may need its room


def tensors_of(spec: WeightSpec, form: Form) -> dict[str, TensorRole]:
    """The stored tensors that fill a weight in one of its forms, by name; those of experts elsewhere too."""
    scaled = spec.format.block is not None
    roles: dict[str, TensorRole] = {}
    for scale in (False, True) if scaled else (False,):
        for source in dict.fromkeys(segment.source for segment in form):
            name = source + SCALE_SUFFIX if scale else source
            if "{expert}" in name:
                for expert in range(spec.shape[0]):
                    roles[name.replace("{expert}", str(expert))] = TensorRole(source, expert, scale)
            else:
                roles[name] = TensorRole(source, None, scale)
    return roles


def check_shape(spec: WeightSpec, form: Form, role: TensorRole, tensor: StoredTensor) -> None:
    """Raises CheckpointError if a stored tensor hasn't the shape that its part of a weight has."""
    size = max(segment.end for segment in form if segment.source == role.source)
    expected = list(spec.shape)
    expected[spec.axis] = size
    if role.expert is not None:
        expected = expected[1:]
    stored = tuple(tensor.shape)
    seen = stored
    if role.scale:
        assert spec.format.block is not None
        expected[-2:] = [-(-expected[-2 + i] // spec.format.block[i]) for i in range(2)]
    elif spec.flatten and len(stored) > 1:
        seen = (stored[0], prod(stored[1:]))
    if seen != tuple(expected):
        raise CheckpointError(f"tensor {tensor.name} has shape {list(stored)}; the model needs {expected}")


def check_dtype(spec: WeightSpec, role: TensorRole, tensor: StoredTensor) -> None:
    """Raises CheckpointError where copying would convert in silence: FP8 without its scales, integers for something else.

    Scales may be stored narrower than they are kept: a bfloat16 scale is the same number in float32.
    """
    form, name = spec.format, tensor.name
    if form.is_plain:
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            missing = f"; tensor {_scale_names(name)} is missing" if tensor.dtype.itemsize == 1 else ""
            raise CheckpointError(
                f"tensor {name} is {dtype_name(tensor.dtype)}; the model needs float16, bfloat16 or float32{missing}"
            )
        return
    if role.scale and tensor.dtype not in SCALE_DTYPES:
        kinds = ", ".join(map(dtype_name, SCALE_DTYPES))
        raise CheckpointError(f"tensor {name} is {dtype_name(tensor.dtype)}; scales in {kinds} are supported")
    found = tensor.ggml_type if form.block is None else dtype_name(tensor.dtype)
    expected = form.scale_dtype if role.scale else form.dtype
    widened = role.scale and expected == "float32" and found in ("bfloat16", "float16")
    if found != expected and not widened:
        raise CheckpointError(f"tensor {name} is {found}; the rest of its weight is {expected}")


def copy_tensor(spec: WeightSpec, form: Form, weight: Weight, role: TensorRole, tensor: StoredTensor) -> None:
    """Copy this rank's part of one stored tensor into its weight; nothing if it is an expert of another rank."""
    held = spec.experts
    expert = role.expert
    if expert is not None:
        assert held is not None
        if not held.start <= expert < held.stop:
            return
        expert -= held.start
    for piece in spec.pieces(form):
        if piece.source == role.source:
            (_copy_scale if role.scale else _copy_values)(spec, weight, piece, tensor, expert)  # type: ignore[arg-type]


def _copy_values(spec: WeightSpec, weight: Weight, piece: Piece, stored: StoredTensor, expert: int | None) -> None:
    """Copy one piece into the weight, or into one expert of a stack."""
    axis = spec.axis if expert is None else spec.axis - 1
    ranges: list[Range] = [None] * (len(spec.shape) - (0 if expert is None else 1))
    if expert is None and spec.experts is not None:
        ranges[0] = (spec.experts.start, spec.experts.stop)
    if spec.flatten:
        ranges = ranges[:1]
    ranges[axis] = (piece.start, piece.stop)
    target = _at(weight.parts["data"] if isinstance(weight, Packed) else weight, expert)
    if isinstance(weight, torch.Tensor):
        values = stored.load_slice(ranges)
        values = values.flatten(1) if spec.flatten else values
        target.narrow(axis, piece.target, piece.stop - piece.start).copy_(values)
    elif weight.format.block is None:
        raw = stored.load_packed(ranges)  # type: ignore[attr-defined]
        per_block = target.shape[axis] * (piece.stop - piece.start) // max(weight.shape[spec.axis], 1)
        start = target.shape[axis] * piece.target // max(weight.shape[spec.axis], 1)
        target.narrow(axis, start, per_block).copy_(raw)
    else:
        target.narrow(axis, piece.target, piece.stop - piece.start).copy_(stored.load_slice(ranges))


def _copy_scale(spec: WeightSpec, weight: Packed, piece: Piece, stored: StoredTensor, expert: int | None) -> None:
    """Scales of one piece: local block i of the piece lies within one stored block, whose scale it takes."""
    assert spec.format.block is not None
    assert weight.format.block is not None
    axis = spec.axis if expert is None else spec.axis - 1
    dimension = spec.axis - len(spec.shape) + 2
    stored_block, local_block = spec.format.block[dimension], weight.format.block[dimension]
    values = stored.load()
    if expert is None and spec.experts is not None:
        values = values[spec.experts.start : spec.experts.stop]
    target = _at(weight.parts["scale"], expert)
    first = piece.target // local_block
    count = -(-(piece.stop - piece.start) // local_block)
    blocks = (piece.start + local_block * torch.arange(count, device="cpu")) // stored_block
    target.narrow(axis, first, count).copy_(values.index_select(axis, blocks.to(values.device)))


def _at(tensor: torch.Tensor, expert: int | None) -> torch.Tensor:
    return tensor if expert is None else tensor[expert]


def unused_pattern(model: CausalModel) -> re.Pattern[str]:
    """Names of tensors that a checkpoint may hold though the model has no use for them."""
    tied = [r"^lm_head\.weight(_scale_inv)?$"] if model.config.tie_word_embeddings else []
    return re.compile("|".join(f"(?:{pattern})" for pattern in [*model.ignored, *tied]))


def two_forms_error(names: list[str]) -> CheckpointError:
    """For a weight that is stored in two of its forms, each named by one of its tensors."""
    return CheckpointError(f"one weight is stored in two forms: {' and '.join(names)}; keep one")


def missing_error(names: list[str]) -> CheckpointError:
    """For tensors of one weight that aren't there."""
    more = f" (and {len(names) - 1} more of this weight)" if len(names) > 1 else ""
    values = names[0].removesuffix(SCALE_SUFFIX)
    wanted = names[0] if values == names[0] else _scale_names(values)
    return CheckpointError(f"tensor {wanted} is missing from the checkpoint{more}")


def _scale_names(name: str) -> str:
    """What the scales of a tensor may be called in a checkpoint."""
    return f"{name}_scale or {name}{SCALE_SUFFIX}"


def unknown_error(name: str) -> CheckpointError:
    """For a tensor that no module asks for and the family doesn't name as unused."""
    return CheckpointError(
        f"tensor {name} is in the checkpoint, but the model has no use for it; "
        "is config.json the one that belongs to these weights?"
    )


def check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    """A tied head that is stored all the same must be the embedding. Raises CheckpointError."""
    if head.shape != embedding.shape or not torch.equal(head.load(), embedding.load()):
        raise CheckpointError(
            f"config.json says tie_word_embeddings, but tensor {head.name} isn't {embedding.name}; "
            "set tie_word_embeddings to false if the head is its own"
        )


@dataclass(slots=True)
class _Loader:
    tensors: Mapping[str, StoredTensor]
    device: torch.device | str
    used: set[str] | None = None

    def choose_form(self, spec: WeightSpec) -> Form:
        """The form in which the checkpoint stores a weight. All names are checked before anything is read."""
        self.used = set() if self.used is None else self.used
        roles = [(form, tensors_of(spec, form)) for form in spec.forms]
        present = [(form, names) for form, names in roles if any(name in self.tensors for name in names)]
        if len(present) > 1:
            raise two_forms_error([next(iter(names)) for _, names in present])
        if not present:
            raise missing_error([next(iter(roles[0][1]))])
        form, names = present[0]
        if missing := [name for name in names if name not in self.tensors]:
            raise missing_error(missing)
        for name, role in names.items():
            check_shape(spec, form, role, self.tensors[name])
            check_dtype(spec, role, self.tensors[name])
        self.used.update(names)
        return form

    def check_leftovers(self, model: CausalModel) -> None:
        """Raises CheckpointError for a tensor that no module asks for and the family doesn't name as unused."""
        if model.config.tie_word_embeddings and "lm_head.weight" in self.tensors:
            embedding = model.embed_tokens.weight_specs["weight"].segments[0].source
            check_tied(self.tensors["lm_head.weight"], self.tensors[embedding])
        unused = unused_pattern(model)
        for name, tensor in self.tensors.items():
            if name not in (self.used or ()) and not unused.search(name):
                raise unknown_error(tensor.name)

    def fill(self, spec: WeightSpec, form: Form) -> Weight:
        """This rank's part of a weight, on the device."""
        weight = spec.empty(self.device)
        for name, role in tensors_of(spec, form).items():
            copy_tensor(spec, form, weight, role, self.tensors[name])
        return weight
