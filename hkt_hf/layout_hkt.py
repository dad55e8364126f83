"""
Where the sequences of a batch lie: between pads, several in one row, or after tokens that were read before.

Strided convolutions count from the start of a row, so pads before the tokens, or another sequence, would shift their
phase. Every layer therefore computes on rows that each start with the first token of one sequence and have pads at
their ends only. Source: ours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import is_tracing

from .attention_hkt import level_length, take_tokens


@dataclass(frozen=True)
class TokenLayout:
    """
    Attributes:
        positions_Rt: [R, t] or [1, t], the place of each token of a row in its sequence, cached tokens counted.
        start: how many tokens the sequence of each row has in the cache, [R], or one number for all rows.
        num_cached: how many there are in the cache, pads included.
        is_token_Rt: boolean [R, t], True = a real token. None = no pads.
        index_Rt, inverse_BT: from the tokens of the batch to those of the rows and back, as in `take_tokens`. None =
            the rows are the batch.
    """

    positions_Rt: Tensor
    start: Tensor | int = 0
    num_cached: int = 0
    is_token_Rt: Tensor | None = None
    index_Rt: Tensor | None = None
    inverse_BT: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether a row of the batch holds several sequences."""
        return self.index_Rt is not None and len(self.index_Rt) > len(self.inverse_BT)

    def rows(self, states_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [R, t, ...]."""
        return states_BT if self.index_Rt is None else take_tokens(states_BT, self.index_Rt)

    def tokens(self, states_Rt: Tensor) -> Tensor:
        """[R, t, ...] -> [B, T, ...]."""
        return states_Rt if self.inverse_BT is None else take_tokens(states_Rt, self.inverse_BT)

    def attention_maps(self, maps_RHtt: Tensor) -> Tensor:
        """[R, H, t, t] -> [B, H, T, T], 0 between sequences. The maps of cached tokens stay as they are."""
        if self.inverse_BT is None or self.num_cached > 0:
            return maps_RHtt
        row_BT, place_BT = self.inverse_BT // maps_RHtt.shape[2], self.inverse_BT % maps_RHtt.shape[2]
        maps_BTTH = maps_RHtt[row_BT[:, :, None], :, place_BT[:, :, None], place_BT[:, None, :]]
        is_same_row_BTT = row_BT[:, :, None] == row_BT[:, None, :]
        return (maps_BTTH * is_same_row_BTT[..., None]).permute(0, 3, 1, 2)

    def level_start(self, stride: int, level: int) -> Tensor | int:
        """How many positions of a level the cached tokens make."""
        return level_length(self.start, stride, level)

    def level_positions(self, stride: int, level: int) -> Tensor:
        """[R, t_l] or [1, t_l], the positions of a level that the new tokens make, and perhaps one too many."""
        num_tokens, start = self.positions_Rt.shape[1], self.level_start(stride, level)
        if isinstance(start, int):
            count = level_length(self.start + num_tokens, stride, level) - start
            return torch.arange(start, start + count, device=self.positions_Rt.device)[None]
        count = level_length(num_tokens, stride, level)
        return start[:, None] + torch.arange(count, device=start.device)

    def of_level(self, states_Rt: Tensor, stride: int, level: int) -> Tensor:
        """Of the states of tokens [R, t], those of the first token of each new block [R, t_l]."""
        if self.num_cached == 0:
            return states_Rt[:, :: stride**level]
        offsets_Rt = stride**level * self.level_positions(stride, level) - torch.as_tensor(self.start).view(-1, 1)
        offsets_Rt = offsets_Rt.clamp(max=states_Rt.shape[1] - 1)
        return states_Rt.expand(len(offsets_Rt), -1).gather(1, offsets_Rt.expand(len(states_Rt), -1))


def make_layout(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    shape: tuple[int, int],
    num_cached: int,
    device: torch.device,
) -> TokenLayout:
    """
    Args:
        attention_mask: boolean [B, num_cached + T], True = a real token. None = all are, and then a position of 0 after
            the first token of a row begins another sequence (as from `DataCollatorWithFlattening`).
        position_ids: [B, T] or [1, T], or None.
        shape: (B, T) of the input.
        num_cached: how many tokens are in the cache, pads included.
        device: that of the input.

    A traced graph must hold for all inputs: there a mask always leads to a layout, and packed sequences are not seen.
    """
    batch_size, num_tokens = shape
    if attention_mask is None or (not is_tracing(attention_mask) and attention_mask.all()):
        if attention_mask is None and position_ids is not None and num_cached == 0 and holds_several(position_ids):
            return unpack((position_ids == 0).expand(batch_size, -1))
        return TokenLayout(
            torch.arange(num_cached, num_cached + num_tokens, device=device)[None], num_cached, num_cached
        )

    start_B = attention_mask[:, :num_cached].sum(dim=1)
    is_token_BT = attention_mask[:, num_cached:]
    # Real tokens first, in their order, then the pads.
    num_real_B1 = is_token_BT.sum(dim=1, keepdim=True)
    place_BT = torch.where(is_token_BT, is_token_BT.cumsum(dim=1), num_real_B1 + (~is_token_BT).cumsum(dim=1)) - 1
    token_T = torch.arange(num_tokens, device=device)
    positions_Bt = start_B[:, None] + token_T
    start = start_B if num_cached > 0 else 0
    if not is_tracing(attention_mask) and bool((place_BT == token_T).all()):
        return TokenLayout(positions_Bt, start, num_cached, is_token_BT)
    row_B1 = num_tokens * torch.arange(batch_size, device=device)[:, None]
    index_Bt = torch.empty_like(place_BT).scatter_(1, place_BT, token_T.expand(batch_size, -1))
    return TokenLayout(positions_Bt, start, num_cached, token_T < num_real_B1, row_B1 + index_Bt, row_B1 + place_BT)


def holds_several(position_ids: Tensor) -> bool:
    """Whether a row holds several sequences: a position of 0 after its first token begins another one."""
    return not is_tracing(position_ids) and bool((position_ids[:, 1:] == 0).any())


def unpack(begins_BT: Tensor) -> TokenLayout:
    """The layout of rows that hold several sequences: True where one begins; the start of a row always is one."""
    begins_N = torch.cat([torch.ones_like(begins_BT[:, :1]), begins_BT[:, 1:]], dim=1).flatten()
    token_N = torch.arange(len(begins_N), device=begins_N.device)
    first_R = token_N[begins_N]
    length_R = torch.diff(first_R, append=first_R.new_tensor([len(begins_N)]))
    row_N = begins_N.cumsum(0) - 1
    longest = int(length_R.max())
    token_t = torch.arange(longest, device=begins_N.device)
    is_token_Rt = token_t < length_R[:, None]
    index_Rt = (first_R[:, None] + token_t).masked_fill(~is_token_Rt, 0)
    inverse_BT = (row_N * longest + token_N - first_R[row_N]).view(begins_BT.shape)
    return TokenLayout(token_t[None], 0, 0, is_token_Rt, index_Rt, inverse_BT)


def open_empty_rows(is_token_Rt: Tensor) -> Tensor:
    """
    Lets the queries of a row without any real token attend to all of its pads, whose values are 0: the attention is
    then exactly 0 with finite gradients, whatever a backend makes of a softmax over nothing (0 in PyTorch's CPU
    kernels, not a number elsewhere).
    """
    return is_token_Rt | ~is_token_Rt.any(dim=-1, keepdim=True)
