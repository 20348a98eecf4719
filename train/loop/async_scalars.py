"""Values that the host reads from a GPU later than it asks for them, without waiting for it."""

import torch
from torch import Tensor


class AsyncScalars:
    """A small tensor that is copied to the host without waiting for the device.

    Args:
        tensor: [n], on any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = tensor
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def wait(self) -> list[float]:
        """Return the values; waits only for work queued on the device before the copy."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()
