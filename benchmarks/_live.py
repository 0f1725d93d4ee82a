"""Live bytes as seen from outside: every storage that torch hands out, whoever made it and whatever resizes it."""

import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators return while it is active, each once, until they are freed.

    Views share a storage and count once. All live storages are asked for their size after every operator, so that one
    that is resized to nothing and back, without any operator, counts for what it holds. Memory that a kernel or a
    backend's thread takes and gives back within an operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes())
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # what is sharded has no memory itself
        address = storage._cdata
        if address not in self._storages or self._storages[address]() is None:
            self._storages[address] = weakref.ref(storage)

    def live_nbytes(self) -> int:
        """Bytes held now."""
        total = 0
        for address, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[address]
            else:
                total += storage.nbytes()
        return total

    def start_peak(self) -> int:
        """Forget the peak; return the bytes held now."""
        self.peak_nbytes = self.live_nbytes()
        return self.peak_nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._storages.clear()
