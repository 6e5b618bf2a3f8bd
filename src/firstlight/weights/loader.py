"""Fill a model's declared weights from stored tensors, and prove at the end that nothing is missing or left over.

Weights are filled one at a time, straight into their final place: from the mapped file to the device, this rank's part only.
So peak memory is the model and its largest tensor. Anything wrong is an error that names the tensor, before serving.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from firstlight.errors import CheckpointError
from firstlight.models.causal import CausalModel
from firstlight.nn.module import Module, Piece, Segment, WeightSpec
from firstlight.quant import PLAIN, SCALE_SUFFIX, Packed, Weight, dtype_name, repack
from firstlight.weights.freed_memory import release_freed_memory
from firstlight.weights.stored import Range, StoredTensor


def published_names(model_class: type[CausalModel], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Stored tensors under the names that the model's modules use.

    Raises CheckpointError if two tensors end up with one name.
    """
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        target = name
        for published, own in model_class.renames:
            if name.startswith(published):
                target = own + name.removeprefix(published)
                break
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
    specs = [
        (path, module, attribute, spec)
        for path, module in model.named_modules()
        if isinstance(module, Module)
        for attribute, spec in module.weight_specs.items()
    ]
    plans = [loader.choose_form(spec) for _, _, _, spec in specs]
    loader.check_leftovers(model)
    for (path, module, attribute, spec), form in zip(specs, plans, strict=True):
        weight = loader.fill(spec, form)
        layout = layouts.get((path, attribute), PLAIN)
        setattr(module, attribute, repack(weight, layout))
        if layout != PLAIN:
            del weight  # the plain form; the next weight may need its room
            release_freed_memory()


@dataclass(slots=True)
class _Loader:
    tensors: Mapping[str, StoredTensor]
    device: torch.device | str
    used: set[str] | None = None

    def choose_form(self, spec: WeightSpec) -> tuple[Segment, ...]:
        """The form in which the checkpoint stores a weight. All names are checked before anything is read."""
        self.used = set() if self.used is None else self.used
        present = [form for form in spec.forms if any(name in self.tensors for name in self._names(spec, form))]
        if len(present) > 1:
            names = [self._names(spec, form)[0] for form in present]
            raise CheckpointError(f"one weight is stored in two forms: {' and '.join(names)}; keep one")
        if not present:
            raise CheckpointError(f"tensor {self._names(spec, spec.forms[0])[0]} is missing from the checkpoint")
        form = present[0]
        missing = [name for name in self._names(spec, form) if name not in self.tensors]
        if missing:
            more = f" (and {len(missing) - 1} more of this weight)" if len(missing) > 1 else ""
            raise CheckpointError(f"tensor {missing[0]} is missing from the checkpoint{more}")
        self._check_shapes(spec, form)
        for name in self._names(spec, form):
            self._check_dtype(spec, name)
        self.used.update(self._names(spec, form))
        return form

    def _names(self, spec: WeightSpec, form: tuple[Segment, ...]) -> list[str]:
        sources = dict.fromkeys(segment.source for segment in form)
        if spec.format.block is not None:
            sources.update(dict.fromkeys(source + SCALE_SUFFIX for source in list(sources)))
        names = []
        for source in sources:
            if "{expert}" in source:
                names += [source.replace("{expert}", str(expert)) for expert in range(spec.shape[0])]
            else:
                names.append(source)
        return names

    def _check_shapes(self, spec: WeightSpec, form: tuple[Segment, ...]) -> None:
        sizes: dict[str, int] = {}
        for segment in form:
            end = max(stop for _, stop in segment.ranges) if segment.ranges else segment.size
            sizes[segment.source] = max(sizes.get(segment.source, 0), end)
        for source, size in sizes.items():
            shape = list(spec.shape)
            shape[spec.axis] = size
            experts = range(spec.shape[0]) if "{expert}" in source else [None]
            if "{expert}" in source:
                shape = shape[1:]
            for expert in experts:
                name = source if expert is None else source.replace("{expert}", str(expert))
                self._check_shape(name, tuple(shape), spec.flatten)
                if spec.format.block is not None:
                    rows, columns = (-(-shape[-2 + i] // spec.format.block[i]) for i in range(2))
                    self._check_shape(name + SCALE_SUFFIX, (*shape[:-2], rows, columns), False)

    def _check_shape(self, name: str, expected: tuple[int, ...], flatten: bool) -> None:
        stored = self.tensors[name].shape
        seen = (stored[0], prod(stored[1:])) if flatten and len(stored) > 1 else tuple(stored)
        if seen != expected:
            raise CheckpointError(f"tensor {name} has shape {list(stored)}; the model needs {list(expected)}")

    def _check_dtype(self, spec: WeightSpec, name: str) -> None:
        """Copying would convert in silence: FP8 without its scales, integers that stand for something else."""
        stored, form = self.tensors[name], spec.format
        scale = form.block is not None and name.endswith(SCALE_SUFFIX)
        if form.is_plain:
            if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
                missing = f"; tensor {name}{SCALE_SUFFIX} is missing" if stored.dtype.itemsize == 1 else ""
                raise CheckpointError(
                    f"tensor {name} is {dtype_name(stored.dtype)}; the model needs float16, bfloat16 or float32{missing}"
                )
            return
        found = stored.ggml_type if form.block is None else dtype_name(stored.dtype)
        expected = form.scale_dtype if scale else form.dtype
        if found != expected:
            raise CheckpointError(f"tensor {name} is {found}; the rest of its weight is {expected}")

    def check_leftovers(self, model: CausalModel) -> None:
        """Raises CheckpointError for a tensor that no module asks for and the family doesn't name as unused."""
        patterns = [re.compile(pattern) for pattern in model.ignored]
        if model.config.tie_word_embeddings:
            self._check_tied(model)
            patterns.append(re.compile(r"^lm_head\.weight(_scale_inv)?$"))
        for name in self.tensors:
            if name not in (self.used or ()) and not any(pattern.search(name) for pattern in patterns):
                raise CheckpointError(
                    f"tensor {self.tensors[name].name} is in the checkpoint, but the model has no use for it; "
                    "is config.json the one that belongs to these weights?"
                )

    def _check_tied(self, model: CausalModel) -> None:
        """A tied head that is stored all the same must be the embedding."""
        head = self.tensors.get("lm_head.weight")
        embedding = self.tensors[model.embed_tokens.weight_specs["weight"].segments[0].source]
        if head is not None and (head.shape != embedding.shape or not torch.equal(head.load(), embedding.load())):
            raise CheckpointError(
                f"config.json says tie_word_embeddings, but tensor {head.name} isn't {embedding.name}; "
                "set tie_word_embeddings to false if the head is its own"
            )

    def fill(self, spec: WeightSpec, form: tuple[Segment, ...]) -> Weight:
        """This rank's part of a weight, on the device."""
        weight = spec.empty(self.device)
        for piece in spec.pieces(form):
            if spec.experts is None:
                self._copy(spec, weight, piece, piece.source, None)
            elif "{expert}" in piece.source:
                for i, expert in enumerate(range(spec.experts.start, spec.experts.stop)):
                    self._copy(spec, weight, piece, piece.source.replace("{expert}", str(expert)), i)
            else:
                self._copy(spec, weight, piece, piece.source, None)
        return weight

    def _copy(self, spec: WeightSpec, weight: Weight, piece: Piece, name: str, expert: int | None) -> None:
        """Copy one piece into the weight, or into one expert of a stack."""
        axis = spec.axis if expert is None else spec.axis - 1
        ranges: list[Range] = [None] * (len(spec.shape) - (0 if expert is None else 1))
        if expert is None and spec.experts is not None:
            ranges[0] = (spec.experts.start, spec.experts.stop)
        if spec.flatten:
            ranges = ranges[:1]
        ranges[axis] = (piece.start, piece.stop)
        target = _at(weight.parts["data"] if isinstance(weight, Packed) else weight, expert)
        stored = self.tensors[name]
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
            self._copy_scale(spec, weight, piece, name, expert, axis)

    def _copy_scale(
        self, spec: WeightSpec, weight: Packed, piece: Piece, name: str, expert: int | None, axis: int
    ) -> None:
        """Scales of one piece: local block i of the piece lies within one stored block, whose scale it takes."""
        assert spec.format.block is not None
        assert weight.format.block is not None
        dimension = spec.axis - len(spec.shape) + 2
        stored_block, local_block = spec.format.block[dimension], weight.format.block[dimension]
        stored = self.tensors[name + SCALE_SUFFIX].load()
        if expert is None and spec.experts is not None:
            stored = stored[spec.experts.start : spec.experts.stop]
        target = _at(weight.parts["scale"], expert)
        first = piece.target // local_block
        count = -(-(piece.stop - piece.start) // local_block)
        blocks = (piece.start + local_block * torch.arange(count)) // stored_block
        target.narrow(axis, first, count).copy_(stored.index_select(axis, blocks.to(stored.device)))


def _at(tensor: torch.Tensor, expert: int | None) -> torch.Tensor:
    return tensor if expert is None else tensor[expert]
