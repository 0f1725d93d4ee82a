"""What operations on sharded tensors are, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Asks only about the tensor itself, or hands it on.
METADATA = frozenset({
    "__deepcopy__", "__format__", "__hash__", "__len__", "__reduce_ex__", "__repr__", "_is_view", "backward",
    "data_ptr", "dim", "element_size", "full_tensor", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "is_inference", "is_leaf", "is_pinned", "is_same_size", "is_set_to", "ndimension", "nelement",
    "numel",
    "redistribute", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
    "storage_offset", "stride", "to_local", "type", "untyped_storage", "_has_compatible_shallow_copy_type",
})  # fmt: skip
# Same values, other tensor: still the parameter's.
ALIASES = frozenset({"detach", "data"})
COMPUTED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# An error on a rank without rows, and only there.
NEEDS_A_ROW = frozenset({
    "_foreach_norm", "amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "linalg_norm", "linalg_vector_norm",
    "max", "median", "min", "mode", "nanmedian", "norm", "quantile", "topk",
})  # fmt: skip
# In place and random: filled whole, so that equal generators give equal weights at every number of ranks.
RANDOM = frozenset({
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
})  # fmt: skip


def name_of(func: Callable[..., Any]) -> str:
    """Of an operation, or of the property that is read or set."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def asks_only(func: Callable[..., Any], name: str) -> bool:
    """Whether it needs no values, or hands the tensor on."""
    is_property = getattr(func, "__name__", "") in ("__get__", "__set__") and name not in COMPUTED_PROPERTIES
    return is_property or name in METADATA or (name.startswith("_foreach_") and name not in NEEDS_A_ROW)
