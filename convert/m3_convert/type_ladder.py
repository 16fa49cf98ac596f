"""The types that a search may give a tensor."""

from collections.abc import Collection, Mapping
from math import prod
from typing import Final

from m3_convert.imatrix import ImportanceMatrix
from m3_convert.plan import Plan, PlannedTensor, aligned
from m3_convert.precision import FALLBACKS, always_f32, is_index_projection, source_precision
from m3_runtime.quantize import TensorType, row_bytes

K_TYPES: Final = (TensorType.Q2_K, TensorType.Q3_K, TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K)
IQ_TYPES: Final = (
    TensorType.IQ1_M,
    TensorType.IQ2_XXS,
    TensorType.IQ2_XS,
    TensorType.IQ2_S,
    TensorType.IQ3_XXS,
    TensorType.IQ3_S,
    TensorType.IQ4_XS,
)

Ladder = tuple[TensorType, ...]  #: ascending by size


def free_tensors(plan: Plan, leave_to_rules: Collection[str]) -> list[PlannedTensor]:
    """The tensors whose type a search may choose: not norms, router and index projections, which choose what is read;
    not those that rules of the user decide (`leave_to_rules`); not those that would be rounded a second time."""
    return [
        tensor
        for tensor in plan.tensors
        if always_f32(tensor.name) is None
        and not is_index_projection(tensor.name)
        and tensor.name not in leave_to_rules
        and (not tensor.origin or plan.choice.allow_requantize)
    ]


def ladder(tensor: PlannedTensor, family: Collection[TensorType], importance: ImportanceMatrix | None) -> Ladder:
    """The types for a tensor, ascending by size, the last one the source's own precision.

    family: types of the recipe that the search begins with. K types and Q8_0 are always tried, the IQ types, which take
    longer to read, if one of them is in the family; types that need importance only where there is some.
    """
    top = source_precision(list(dict.fromkeys(m.tensor.dtype for m in tensor.matrices)))
    wanted = [*K_TYPES, TensorType.Q8_0, *sorted(family), *(IQ_TYPES if set(IQ_TYPES) & set(family) else ())]
    known = importance is not None and tensor.name in importance.entries
    found = {top}
    for type_ in wanted:
        fitted = fitted_type(type_, tensor.shape[-1])
        size = tensor_bytes(tensor, fitted)
        if size < tensor_bytes(tensor, top) and (known or not fitted.needs_importance):
            found.add(fitted)
    return tuple(sorted(found, key=lambda t: (tensor_bytes(tensor, t), t)))


def flat(ladders: Mapping[str, Ladder], type_: TensorType) -> dict[str, TensorType]:
    """`type_` for every tensor, or the next larger one that it can have."""
    return {
        name: type_ if type_ in types else next((t for t in types if bits(t) >= bits(type_)), types[-1])
        for name, types in ladders.items()
    }


def fitted_type(type_: TensorType, columns: int) -> TensorType:
    """The type, or what takes its place in rows that its block does not divide."""
    while columns % type_.block_size:
        type_ = FALLBACKS.get(type_, TensorType.F16)
    return type_


def bits(type_: TensorType) -> float:
    """Of a value, scales included."""
    return 8 * row_bytes(type_, type_.block_size) / type_.block_size


def tensor_bytes(tensor: PlannedTensor, type_: TensorType) -> int:
    """What a tensor takes in the file with this type, padding included."""
    return aligned(prod(tensor.shape[:-1]) * row_bytes(type_, tensor.shape[-1]))
