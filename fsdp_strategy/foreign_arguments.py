"""Arguments of other sharded strategies: who passes one is told what it is called here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# What users of Lightning's own sharded strategies may try, and what says the same here.
_FOREIGN_ARGUMENTS = {
    "auto_wrap_policy": "use units",
    "wrapping_policy": "use units",
    "policy": "use units",
    "activation_checkpointing_policy": "use activation_checkpointing",
    "sharding_strategy": "everything is always sharded; use reshard_after_forward=False for SHARD_GRAD_OP",
    "stage": "everything is always sharded; use reshard_after_forward=False for stage 2",
    "state_dict_type": "checkpoints are full files that open anywhere",
    "save_distributed_checkpoint": "checkpoints are full files that open anywhere",
    "mixed_precision": "use Trainer(precision=...) and reduce_dtype",
    "precision": "use Trainer(precision=...)",
    "forward_prefetch": "use prefetch_limit",
    "backward_prefetch": "use prefetch_limit",
    "limit_all_gathers": "use prefetch_limit",
    "use_orig_params": "parameters always keep their names",
    "sync_module_states": "rank 0's values are always used",
    "data_parallel_size": "use Trainer(devices=..., num_nodes=...)",
    "allgather_bucket_size": "use units",
    "reduce_bucket_size": "use units",
}


def meets_foreign_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate a constructor so that an argument of another sharded strategy raises a TypeError that names ours."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name in _FOREIGN_ARGUMENTS:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}: {_FOREIGN_ARGUMENTS[name]}.")
        init(self, *args, **kwargs)

    return checked
