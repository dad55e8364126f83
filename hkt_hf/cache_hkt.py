"""
What a causal HKT model keeps of the tokens that it has read, so that the next one costs O(T).

Rows are laid out without pads, as by `attention_hkt.take_tokens`: token i of a row is its i-th real token. What lies
behind the real tokens of a row has no meaning, and the next ones overwrite it. A position of a level depends on the
first token of its block and those before it alone, so whatever is kept of a prefix is right for the prefix: to take
tokens back is to forget that they came.

Source: ours.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .attention_hkt import level_length


class HKTCacheLayer(CacheLayerMixin):
    """
    The states of one layer, [B, T_l, D] each, by name and level: "input" of the next level's convolution, "query",
    "key" (the queries and keys as they meet in the scores, rotated if they are) and "value".
    """

    is_croppable = True
    # Its states are made when the first tokens come.
    supports_early_init = False

    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride
        self.num_tokens = 0
        self.states: dict[tuple[str, int], Tensor] = {}

    def update(self, name: str, level: int, new_BtD: Tensor, start: Tensor | int) -> Tensor:
        """
        Writes the states of new tokens, those of row b from position `start_b` on.

        Args:
            name, level: of the states.
            new_BtD: [B, t, D].
            start: [B], integers, or one for all rows. No row starts beyond the positions that `num_tokens` make.

        Returns:
            All states of that name and level, [B, T_l, D].
        """
        old_BtD = self.states.get((name, level))
        if old_BtD is None:
            states_BtD = new_BtD
        elif isinstance(start, int):
            states_BtD = torch.cat([old_BtD[:, :start], new_BtD], dim=1)
        else:
            width = level_length(self.num_tokens, self.stride, level) + new_BtD.shape[1]
            states_BtD = F.pad(old_BtD, (0, 0, 0, width - old_BtD.shape[1]))
            positions_Bt = start[:, None] + torch.arange(new_BtD.shape[1], device=start.device)
            states_BtD[torch.arange(len(start), device=start.device)[:, None], positions_Bt] = new_BtD
        self.states[name, level] = states_BtD
        self.device = new_BtD.device
        self.is_initialized = True
        return states_BtD

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do before the first `update`."""

    def get_seq_length(self) -> int:
        """The number of tokens, pads included."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens, pads included."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes minus the number of tokens to remove, as in crop(-3); got {tokens_to_remove}."
            )
        self.num_tokens = max(0, self.num_tokens + tokens_to_remove)

    def reset(self) -> None:
        self.num_tokens = 0
        self.states = {}
        self.is_initialized = False

    def offload(self) -> None:
        self._replace(lambda states_BtD: states_BtD.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._replace(lambda states_BtD: states_BtD.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda states_BtD: states_BtD.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda states_BtD: states_BtD[indices.to(states_BtD.device)])

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self.states = {key: change(states_BtD) for key, states_BtD in self.states.items()}


def adopt_cache(cache: Cache, num_layers: int, stride: int) -> Cache:
    """
    Makes an empty `DynamicCache` one of HKT, in place, and returns it.

    Raises:
        ValueError: the cache is of another kind, or holds the states of another model.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"`cache` is a {type(cache).__name__}: it must be a `DynamicCache()` of transformers.")
    if len(cache.layers) == num_layers and all(type(layer) is HKTCacheLayer for layer in cache.layers):
        return cache
    if any(type(layer) is not DynamicLayer for layer in cache.layers) or cache.get_seq_length() > 0:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise ValueError(
            f"The cache has {len(cache.layers)} layers ({kinds}) with {cache.get_seq_length()} tokens; this model "
            f"needs {num_layers} that hold the coarse levels too. Pass an empty `DynamicCache()`, or none; static and "
            "quantized caches (`cache_implementation`) are not supported."
        )
    cache.layers = [HKTCacheLayer(stride) for _ in range(num_layers)]
    cache.layer_class_to_replicate = None
    return cache
