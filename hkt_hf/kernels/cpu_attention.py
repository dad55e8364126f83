"""
Fused multi-scale attention on CPU, in PyTorch operations: exact, and linear in memory.

The scheme is that of flash attention (Dao et al., arXiv 2205.14135): queries and keys are cut into tiles, one tile of
scores is in memory at a time, and the backward pass computes it again. What is ours is how the levels meet: a score of
level l counts for a block of s^l x s^l token pairs, so it is computed once per block and repeated, and the order of the
tokens (see `tiling`) makes that a broadcast.

Level weights are multiplied into the queries. If they are the same for all tokens, a coarse tile has coarse rows.
Weights per token make the rows of a block differ: a coarse query is then repeated over its block, once per weight, and
only the keys are coarse. The products of the scores grow by a third (L = 3, s = 2), but to multiply weights into coarse
scores, and to sum the gradients over their rows, would take longer.

Shape legend, beyond that of `attention_hkt`: G = pairs of batch row and head that are worked on at a time; M = queries
and N = keys of a tile, in run order. At level l a tile has M / s^l queries (M with weights per token) and N / s^l keys.

All tiles of a call have the same shape, so buffers and the views of them are made once: to make the views again for
every tile took a tenth of the time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .tiling import SCORES_PER_THREAD, choose_tiling, from_runs, pairs_at_a_time, to_runs

# The score of a key that a query must not see. Finite, so that a tile of nothing else gives no 0 / 0; so low that any
# score added to it is lost.
HIDDEN = -1e30


class FusedAttention:
    """One call: its inputs, the group of pairs that is worked on, in run order, and the buffers of one tile."""

    def __init__(
        self,
        query_levels: list[Tensor],
        key_levels: list[Tensor],
        value: Tensor,
        level_weights: Tensor,
        padding_mask: Tensor | None,
        seed: Tensor | None,
        *,
        stride: int,
        scaling: float,
        is_causal: bool,
        dropout: float,
    ):
        batch_size, num_heads, num_tokens, head_size = value.shape
        self.tiling = choose_tiling(num_tokens, stride, len(query_levels), is_causal)
        self.levels = range(self.tiling.num_levels)
        self.query_levels, self.key_levels, self.value = query_levels, key_levels, value
        self.per_token = level_weights.shape[2] > 1
        self.dtype = torch.promote_types(torch.float32, value.dtype)
        self.level_weights = level_weights.to(self.dtype).expand(batch_size, num_heads, -1, -1)
        self.padding_mask, self.scaling, self.is_causal = padding_mask, scaling, is_causal
        self.dropout, self.seed = dropout, seed

        tiling = self.tiling
        num_queries, num_keys = tiling.query_run * tiling.phases(0), tiling.key_run * tiling.phases(0)
        limit = torch.get_num_threads() * max(1, SCORES_PER_THREAD // (num_queries * num_keys))
        self.rows, self.heads = pairs_at_a_time(batch_size, num_heads, limit)
        self.pairs = self.rows * self.heads

        self.query = [self.query_runs(self.row_level(level), head_size) for level in self.levels]
        self.key = [self.key_runs(level, head_size) for level in self.levels]
        self.value_runs = self.key_runs(0, head_size)
        self.output = self.query_runs(0, head_size)
        self.log_sum_exp = self.query_runs(0, 1)
        if self.per_token:
            self.weights = {level: self.query_runs(0, 1) for level in self.levels[1:]}
            self.coarse_query = {level: self.query_runs(level, head_size) for level in self.levels[1:]}
        self.scores = [
            torch.empty(
                self.pairs, num_queries // stride ** self.row_level(level), num_keys // stride**level, dtype=self.dtype
            )
            for level in self.levels
        ]
        self.repeats = [self.repeat_views(level) for level in self.levels[1:]]
        self.after_last = self.after_last_views()
        self.query_tiles = [tiles(query) for query in self.query]
        self.key_tiles = [tiles(key) for key in self.key]
        self.key_tiles_T = [[key.transpose(1, 2) for key in keys] for keys in self.key_tiles]
        self.value_tiles, self.output_tiles = tiles(self.value_runs), tiles(self.output)
        self.log_sum_exp_tiles = tiles(self.log_sum_exp)
        self.visible_keys = None if padding_mask is None else self.key_runs(0, 1)
        if is_causal:
            order = torch.arange(num_queries).view(tiling.query_run, tiling.phases(0)).T.flatten()
            self.is_later = order[:, None] < order

    def row_level(self, level: int) -> int:
        """The level whose positions the queries of a level, the rows of its scores, are counted in."""
        return 0 if self.per_token else level

    def query_runs(self, level: int, width: int) -> Tensor:
        """[N, G, phases, r, width], of zeros: places after the last token are not written, but must be finite."""
        tiling = self.tiling
        shape = (tiling.num_query_runs, self.pairs, tiling.phases(level), tiling.query_run, width)
        return torch.zeros(shape, dtype=self.dtype)

    def key_runs(self, level: int, width: int) -> Tensor:
        tiling = self.tiling
        shape = (tiling.num_key_runs, self.pairs, tiling.phases(level), tiling.key_run, width)
        return torch.zeros(shape, dtype=self.dtype)

    def repeat_views(self, level: int) -> tuple[Tensor, Tensor]:
        """The scores of the next finer level, and those of this level as what is copied over their blocks."""
        stride, phases, key_run = self.tiling.stride, self.tiling.phases(level), self.tiling.key_run
        # With weights per token the rows are not repeated.
        row_phases, row_stride = (1, 1) if self.per_token else (phases, stride)
        target = self.scores[level - 1].view(self.pairs, row_phases, row_stride, -1, phases, stride, key_run)
        return target, self.scores[level].view(self.pairs, row_phases, 1, -1, phases, 1, key_run)

    def after_last_views(self) -> list[Tensor]:
        """The scores of the last key tile that belong to no token: blocks that are missing, and the rest of one."""
        phases, run = self.tiling.phases(0), self.tiling.key_run
        num_blocks, rest = divmod(self.value.shape[2] - (self.tiling.num_key_runs - 1) * run * phases, phases)
        of_blocks = self.scores[0].unflatten(2, (phases, run))
        views = [of_blocks[:, :, :, num_blocks + (rest > 0) :]]
        if rest > 0:
            views.append(of_blocks[:, :, rest:, num_blocks])
        return [view for view in views if view.numel()]

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Loads group after group, as slices of the batch and of the heads."""
        batch_size, num_heads = self.value.shape[:2]
        for row in range(0, batch_size, self.rows):
            for head in range(0, num_heads, self.heads):
                group = (slice(row, row + self.rows), slice(head, head + self.heads))
                self.load(group)
                yield group

    def load(self, group: tuple[slice, slice]) -> None:
        level_weights = self.level_weights[group] * self.scaling
        for level in self.levels:
            weights_BHt1 = level_weights[..., level, None]
            to_runs(self.key_levels[level][group], self.key[level])
            if self.per_token and level > 0:
                to_runs(self.query_levels[level][group], self.coarse_query[level])
                to_runs(weights_BHt1, self.weights[level])
                query, weights = self.coarse_query[level][:, :, :, None], self.in_blocks(level, self.weights[level])
                torch.mul(query, weights, out=self.in_blocks(level, self.query[level]))
            else:
                to_runs(self.query_levels[level][group], self.query[level], weights_BHt1)
        to_runs(self.value[group], self.value_runs)
        if self.padding_mask is not None:
            self.load_padding(group[0])

    def in_blocks(self, level: int, runs: Tensor) -> Tensor:
        """[N, G, phases of level 0, r, d] -> [N, G, phases of this level, s^l, r, d]"""
        return runs.unflatten(2, (self.tiling.phases(level), -1))

    def load_padding(self, rows: slice) -> None:
        visible_BT = self.padding_mask[rows].to(self.dtype)
        to_runs(visible_BT[:, None, :, None].expand(-1, self.heads, -1, -1), self.visible_keys)
        # What stands at a pad may be no number, and 0 times that would be none.
        for key in self.key:
            visible_blocks = self.visible_keys.unflatten(2, (key.shape[2], -1)).amax(dim=3)
            key.masked_fill_(visible_blocks == 0, 0.0)
        self.value_runs.masked_fill_(self.visible_keys == 0, 0.0)

    def visible_tiles(self, query_tile: int) -> list[int]:
        """The key tiles that a query tile sees, without those of pads alone."""
        key_tiles = range(query_tile + 1 if self.is_causal else self.tiling.num_key_runs)
        if self.visible_keys is None:
            return list(key_tiles)
        return [key_tile for key_tile in key_tiles if self.visible_keys[key_tile].any()]

    def hide_keys(self, scores: Tensor, query_tile: int, key_tile: int) -> None:
        """Hides pads, what comes after the last token and, in a causal call, after each query."""
        if self.is_causal and query_tile == key_tile:
            scores.masked_fill_(self.is_later, HIDDEN)
        if self.visible_keys is not None:
            is_pad = self.visible_keys[key_tile].flatten(1, 2).transpose(1, 2) == 0
            if is_pad.any():
                scores.masked_fill_(is_pad, HIDDEN)
        elif key_tile == self.tiling.num_key_runs - 1:
            for after_last in self.after_last:
                after_last.fill_(HIDDEN)

    def probabilities(self, query_tile: int, key_tile: int) -> tuple[Tensor, Tensor | None]:
        """
        The softmax [G, M, N] of a query tile over one key tile, and the logarithm [G, M, 1] of the sum of exponentials
        that it was divided by, if there is more than one key tile.
        """
        scores_GMN = self.fused_scores(query_tile, key_tile)
        self.hide_keys(scores_GMN, query_tile, key_tile)
        if not self.has_statistics:
            return softmax_(scores_GMN), None
        # exp(max - log_sum_exp) is the largest probability: two cheap passes, where an exponential of our own would
        # take twice as long as the whole of PyTorch's softmax kernel.
        largest_score = scores_GMN.amax(dim=-1, keepdim=True)
        softmax_(scores_GMN)
        return scores_GMN, largest_score.sub_(scores_GMN.amax(dim=-1, keepdim=True).log_())

    def fused_scores(self, query_tile: int, key_tile: int) -> Tensor:
        """The scores [G, M, N] of all levels: each level adds to a repetition of the next coarser one."""
        for level in reversed(self.levels):
            query, key_T = self.query_tiles[level][query_tile], self.key_tiles_T[level][key_tile]
            if level == self.levels[-1]:
                torch.bmm(query, key_T, out=self.scores[level])
            else:
                self.scores[level].baddbmm_(query, key_T)
            if level > 0:
                target, source = self.repeats[level - 1]
                target.copy_(source)
        return self.scores[0]

    def dropout_factor(self, scores: Tensor, group_index: int, query_tile: int, key_tile: int) -> Tensor:
        """0 or 1 / (1 - p) for each probability of a tile: the same in the forward and in the backward pass."""
        tiling = self.tiling
        tile_index = (group_index * tiling.num_query_runs + query_tile) * tiling.num_key_runs + key_tile
        generator = torch.Generator().manual_seed(self.seed.item() + tile_index)
        kept = torch.empty_like(scores).bernoulli_(1 - self.dropout, generator=generator)
        return kept.div_(1 - self.dropout)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output [B, H, T, d] and the log-sum-exp [B, H, T], or zeros if there is one key tile: no use for it."""
        output = new_states(self.value)
        log_sum_exp = torch.zeros(*self.value.shape[:3], 1, dtype=self.dtype)
        for index, group in enumerate(self.groups()):
            for query_tile in range(self.tiling.num_query_runs):
                self.attend(index, query_tile)
            from_runs(self.output, output[group])
            if self.has_statistics:
                from_runs(self.log_sum_exp, log_sum_exp[group])
        return output, log_sum_exp.squeeze(-1)

    def attend(self, group_index: int, query_tile: int) -> None:
        """Writes the output of a query tile: the average of what it finds in each key tile, weighted by their sums."""
        output = self.output_tiles[query_tile]
        key_tiles = self.visible_tiles(query_tile)
        if not key_tiles:
            output.zero_()
            return
        outputs = output.new_empty(len(key_tiles), *output.shape)
        statistics = output.new_empty(len(key_tiles), *output.shape[:2], 1)
        for position, key_tile in enumerate(key_tiles):
            probabilities, log_sum_exp = self.probabilities(query_tile, key_tile)
            if self.dropout > 0:
                probabilities *= self.dropout_factor(probabilities, group_index, query_tile, key_tile)
            torch.bmm(probabilities, self.value_tiles[key_tile], out=outputs[position])
            if self.has_statistics:
                statistics[position] = log_sum_exp
        if self.has_statistics:
            self.log_sum_exp_tiles[query_tile].copy_(statistics.logsumexp(dim=0))
            outputs *= statistics.softmax(dim=0)
        torch.sum(outputs, dim=0, out=output)

    def backward(
        self, grad_output: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """
        Gradients of the query levels, key levels and value, like them in shape and dtype, and of the level weights,
        [B, H, T or 1, L].
        """
        head_size = self.value.shape[3]
        self.grad_output, self.delta = self.query_runs(0, head_size), self.query_runs(0, 1)
        self.grad_query = [torch.empty_like(query) for query in self.query]
        self.grad_key = [torch.empty_like(key) for key in self.key]
        self.grad_value = torch.empty_like(self.value_runs)
        self.grad_scores = torch.empty_like(self.scores[0])
        self.sums = [self.sum_views(level) for level in self.levels[1:]]
        self.grad_output_tiles, self.delta_tiles = tiles(self.grad_output), tiles(self.delta)
        self.grad_query_tiles = [tiles(gradient) for gradient in self.grad_query]
        self.grad_key_tiles = [tiles(gradient) for gradient in self.grad_key]
        self.grad_value_tiles = tiles(self.grad_value)
        self.value_tiles_T = [value.transpose(1, 2) for value in self.value_tiles]

        grad_query_levels = [new_states(query) for query in self.query_levels]
        grad_key_levels = [new_states(key) for key in self.key_levels]
        grad_value, grad_level_weights = new_states(self.value), torch.zeros(self.level_weights.shape, dtype=self.dtype)
        for level in range(len(self.levels), len(self.query_levels)):
            # These levels are left out, see `choose_tiling`.
            grad_query_levels[level].zero_()
            grad_key_levels[level].zero_()
        for index, group in enumerate(self.groups()):
            to_runs(grad_output[group], self.grad_output)
            if self.has_statistics:
                to_runs(log_sum_exp[group][..., None], self.log_sum_exp)
                products = output[group].to(self.dtype) * grad_output[group].to(self.dtype)
                to_runs(products.sum(dim=-1, keepdim=True), self.delta)
            for gradient in (*self.grad_query, *self.grad_key, self.grad_value):
                gradient.zero_()
            for query_tile in range(self.tiling.num_query_runs):
                for key_tile in self.visible_tiles(query_tile):
                    self.differentiate_tile(index, query_tile, key_tile)
            for level in self.levels:
                from_runs(self.grad_key[level], grad_key_levels[level][group])
                grad_query, grad_weights = self.query_gradients(level, group)
                grad_query_levels[level][group] = grad_query
                grad_level_weights[group][..., level] = grad_weights
            from_runs(self.grad_value, grad_value[group])
        return grad_query_levels, grad_key_levels, grad_value, grad_level_weights

    def differentiate_tile(self, group_index: int, query_tile: int, key_tile: int) -> None:
        """Adds what one tile of scores contributes to each gradient; weights and factors of queries come later."""
        probabilities, log_sum_exp = self.probabilities(query_tile, key_tile)
        grad_output, grad_scores = self.grad_output_tiles[query_tile], self.grad_scores
        if self.has_statistics:
            # The probabilities of this tile are too large by the share of the others in the softmax. It is cheaper to
            # scale the rows of what they meet.
            share = (log_sum_exp - self.log_sum_exp_tiles[query_tile]).exp_()
            grad_output = grad_output * share
        torch.bmm(grad_output, self.value_tiles_T[key_tile], out=grad_scores)
        kept = probabilities
        if self.dropout > 0:
            factor = self.dropout_factor(probabilities, group_index, query_tile, key_tile)
            grad_scores *= factor
            kept = factor.mul_(probabilities)
        self.grad_value_tiles[key_tile].baddbmm_(kept.transpose(1, 2), grad_output)
        if self.has_statistics:
            grad_scores.sub_(share.mul_(self.delta_tiles[query_tile])).mul_(probabilities)
        else:
            softmax_backward_(grad_scores, probabilities)

        for level in self.levels:
            if level > 0:
                for parts, sums in self.sums[level - 1]:
                    add_parts(parts, out=sums)
                grad_scores = self.scores[level]
            query, key = self.query_tiles[level][query_tile], self.key_tiles[level][key_tile]
            self.grad_query_tiles[level][query_tile].baddbmm_(grad_scores, key)
            self.grad_key_tiles[level][key_tile].baddbmm_(grad_scores.transpose(1, 2), query)

    def sum_views(self, level: int) -> list[tuple[tuple[Tensor, ...], Tensor]]:
        """
        The sums over blocks from the gradients of the next finer level's scores to those of this level, which take the
        place of its scores: what is added, and where the sum goes.
        """
        stride, phases, key_run = self.tiling.stride, self.tiling.phases(level), self.tiling.key_run
        fine, coarse, sums = self.grad_scores if level == 1 else self.scores[level - 1], self.scores[level], []
        if not self.per_token:
            # The rows first: whole phases with all their keys lie next to each other, the fastest of all sums.
            row_sums = fine.new_empty(self.pairs, coarse.shape[1], fine.shape[2])
            parts = fine.view(self.pairs, phases, stride, -1).unbind(2)
            sums.append((parts, row_sums.view(self.pairs, phases, -1)))
            fine = row_sums
        columns = fine.view(self.pairs, coarse.shape[1], phases, stride, key_run)
        sums.append((columns.unbind(3), coarse.view(self.pairs, -1, phases, key_run)))
        return sums

    def query_gradients(self, level: int, group: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        """The gradients of a group's queries [B, H, T_l, d] and of their level weights, [B, H, T or 1]."""
        query = self.query_levels[level][group].to(self.dtype)
        grad_query = torch.empty_like(query)
        if self.per_token and level > 0:
            grad_rows = self.in_blocks(level, self.grad_query[level])
            grad_weights = torch.linalg.vecdot(grad_rows, self.coarse_query[level][:, :, :, None]).flatten(2, 3)
            grad_weights_BHT1 = query.new_empty(*query.shape[:2], self.value.shape[2], 1)
            from_runs(grad_weights[..., None], grad_weights_BHT1)
            from_runs((grad_rows * self.in_blocks(level, self.weights[level])).sum(dim=3), grad_query)
            return grad_query, grad_weights_BHT1.squeeze(-1) * self.scaling
        from_runs(self.grad_query[level], grad_query)
        grad_weights = torch.linalg.vecdot(grad_query, query) * self.scaling
        if not self.per_token:
            grad_weights = grad_weights.sum(dim=-1, keepdim=True)
        return grad_query.mul_(self.level_weights[group][..., level, None] * self.scaling), grad_weights

    @property
    def has_statistics(self) -> bool:
        return self.tiling.num_key_runs > 1


def tiles(runs: Tensor) -> tuple[Tensor, ...]:
    """[N, G, phases, r, d] -> N times [G, positions of a tile, d]"""
    return runs.flatten(2, 3).unbind(0)


def new_states(like_BHtd: Tensor) -> Tensor:
    """An empty tensor of the same shape, laid out as [B, T, H, d], which is what a layer reads and writes."""
    return torch.empty_like(like_BHtd.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def add_parts(parts: tuple[Tensor, ...], out: Tensor) -> None:
    """The sum of at least two tensors: additions take a third of the time of PyTorch's sum here."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


def softmax_(scores: Tensor) -> Tensor:
    return torch.ops.aten._softmax.out(scores, -1, False, out=scores)


def softmax_backward_(grad_output: Tensor, output: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data.out(grad_output, output, -1, output.dtype, grad_input=grad_output)
