"""Fill a model's declared weights from tensors that come one after another, in any order, as hosts hand them over.

A tensor goes straight to its place when it comes, and isn't kept: a host may use its memory for the next one. A weight gets
its module, and its bound layout, with its last tensor. So the order decides how many weights are half filled at a time, and
nothing is held twice. What is checked is what `loader` checks; that nothing is missing can only be said at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.errors import CheckpointError
from firstlight.models.causal import CausalModel
from firstlight.quant import PLAIN, Weight
from firstlight.weights.freed_memory import release_freed_memory
from firstlight.weights.loader import (
    Form,
    Target,
    TensorRole,
    check_dtype,
    check_shape,
    check_tied,
    copy_tensor,
    missing_error,
    own_name,
    targets,
    tensors_of,
    two_forms_error,
    unknown_error,
    unused_pattern,
)
from firstlight.weights.stored import Range, StoredTensor


class GivenTensor(StoredTensor):
    """A tensor that is in memory already, on any device."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        super().__init__(name, tuple(tensor.shape), tensor.dtype, tensor.nbytes, Path("memory"))
        self.tensor = tensor

    def load_slice(self, ranges: Iterable[Range] | None) -> torch.Tensor:
        """A view of the part within `ranges`."""
        return self.tensor[tuple(slice(start, stop) for start, stop in self.full_ranges(list(ranges or ())))]


@dataclass(slots=True, eq=False)
class _Filling:
    """A weight on its way. awaited: names of tensors that haven't come; None before the first, which tells the form."""

    target: Target
    form: Form | None = None
    weight: Weight | None = None
    awaited: set[str] | None = None


@dataclass(slots=True)
class StreamingLoader:
    """Takes tensors with `add`, and proves with `finish` that the model is complete.

    layouts: (module path, attribute) -> layout; plain if not named.
    """

    model: CausalModel
    device: torch.device | str
    layouts: Mapping[tuple[str, str], str] = field(default_factory=dict)
    _fillings: list[_Filling] = field(init=False)
    _uses: dict[str, list[tuple[_Filling, Form, TensorRole]]] = field(init=False)
    _names: dict[str, str] = field(default_factory=dict)  # of tensors that came: our name -> the published one
    _tied: dict[str, GivenTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fillings = [_Filling(target) for target in targets(self.model)]
        self._uses = {}
        for filling in self._fillings:
            for form in filling.target.spec.forms:
                for name, role in tensors_of(filling.target.spec, form).items():
                    self._uses.setdefault(name, []).append((filling, form, role))
        self._unused = unused_pattern(self.model)

    _unused: Any = field(init=False)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor under its published name.

        Raises CheckpointError if it is unknown, misshapen, of the wrong dtype, there twice, or of a second form of its weight.
        """
        own = own_name(type(self.model), name)
        if own in self._names:
            raise CheckpointError(f"tensor {name} is there twice: {self._names[own]} has the same meaning")
        uses = self._uses.get(own, [])
        if not uses and not self._unused.search(own):
            raise unknown_error(name)
        self._names[own] = name
        given = GivenTensor(name, tensor)
        self._compare_tied(own, given)
        for filling, form, role in uses:
            self._copy(filling, form, role, own, given)

    def finish(self) -> set[str]:
        """The published names of all tensors that came. Raises CheckpointError if a weight isn't complete."""
        for filling in self._fillings:
            spec = filling.target.spec
            if filling.awaited is None:
                raise missing_error([next(iter(tensors_of(spec, spec.forms[0])))])
            if filling.awaited:
                assert filling.form is not None
                raise missing_error([name for name in tensors_of(spec, filling.form) if name in filling.awaited])
        return set(self._names.values())

    def _copy(self, filling: _Filling, form: Form, role: TensorRole, own: str, given: GivenTensor) -> None:
        target = filling.target
        if filling.awaited is None:
            filling.form, filling.awaited = form, set(tensors_of(target.spec, form))
            filling.weight = target.spec.empty(self.device)
        elif filling.form is not form:
            assert filling.form is not None
            earlier = next(name for name in tensors_of(target.spec, filling.form) if name in self._names)
            raise two_forms_error([self._names[earlier], given.name])
        assert filling.weight is not None
        check_shape(target.spec, form, role, given)
        check_dtype(target.spec, role, given)
        copy_tensor(target.spec, form, filling.weight, role, given)
        filling.awaited.discard(own)
        if not filling.awaited:
            weight, filling.weight = filling.weight, None
            target.set(weight, self.layouts)
            del weight  # the plain form; the next weight may need its room
            if self.layouts.get((target.path, target.attribute), PLAIN) != PLAIN:
                release_freed_memory()

    def _compare_tied(self, own: str, given: GivenTensor) -> None:
        """Of a tied model, hold a copy of the embedding, or of a head that is stored all the same, until the other comes."""
        if not self.model.config.tie_word_embeddings:
            return
        embedding = self.model.embed_tokens.weight_specs["weight"].segments[0].source
        if own in ("lm_head.weight", embedding):
            self._tied[own] = GivenTensor(given.name, given.tensor.clone())
            if len(self._tied) == 2:
                check_tied(self._tied["lm_head.weight"], self._tied[embedding])
                self._tied.clear()


def load_streaming(
    model: CausalModel,
    tensors: Iterable[tuple[str, torch.Tensor]],
    device: torch.device | str,
    layouts: Mapping[tuple[str, str], str] | None = None,
) -> set[str]:
    """Fill every declared weight from (published name, tensor) pairs; returns the names of all that came.

    Raises CheckpointError as `loader.load_weights` does, though what is missing is known only at the end.
    """
    loader = StreamingLoader(model, device, layouts or {})
    for name, tensor in tensors:
        loader.add(name, tensor)
    return loader.finish()
