"""
Fused multi-scale attention on CPU, in PyTorch operations: exact, and linear in memory.

The scheme is that of flash attention (Dao et al., arXiv 2205.14135): queries and keys are cut into tiles, one tile of
scores is in memory at a time, and the backward pass computes it again. What is ours is how the levels meet: a score of
level l counts for a block of s^l x s^l token pairs, so it is computed once per block and repeated, and the order of the
tokens (see `tiling`) makes that a broadcast.

Level weights that are the same for all tokens are multiplied into the queries, and a coarse tile has coarse rows.
Weights per token make the rows of a block differ: a coarse tile is then computed without weights, repeated over the
rows of its blocks, weighted, and has the rows of the fine tile from there on.

Shape legend, beyond that of `attention_hkt`: G = pairs of batch row and head that are worked on at a time; M = queries
and N = keys of a tile, in run order. At level l a tile has M / s^l and N / s^l positions.
"""

import math
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
        self.num_queries = tiling.query_run * tiling.phases(0)
        num_keys = tiling.key_run * tiling.phases(0)
        limit = torch.get_num_threads() * max(1, SCORES_PER_THREAD // (self.num_queries * num_keys))
        self.rows, self.heads = pairs_at_a_time(batch_size, num_heads, limit)
        self.pairs = self.rows * self.heads
        self.num_scores = self.pairs * self.num_queries * num_keys

        self.query = [self.query_runs(level, head_size) for level in self.levels]
        self.key = [self.key_runs(level, head_size) for level in self.levels]
        self.value_runs = self.key_runs(0, head_size)
        self.output = self.query_runs(0, head_size)
        self.log_sum_exp = self.query_runs(0, 1)
        self.weights = [self.query_runs(0, 1) if self.per_token else None for _ in self.levels]
        self.scores = [self.buffer(stride ** (2 * level)) for level in self.levels]
        self.weighted_scores = [
            self.buffer(stride**level) if self.per_token and level > 0 else None for level in self.levels
        ]
        self.visible_keys = None if padding_mask is None else self.key_runs(0, 1)
        if is_causal:
            order = torch.arange(self.num_queries).view(tiling.query_run, tiling.phases(0)).T.flatten()
            self.is_later = order[:, None] < order

    def query_runs(self, level: int, width: int) -> Tensor:
        """[N, G, phases, r, width], of zeros: places after the last token are not written, but must be finite."""
        tiling = self.tiling
        shape = (tiling.num_query_runs, self.pairs, tiling.phases(level), tiling.query_run, width)
        return torch.zeros(shape, dtype=self.dtype)

    def key_runs(self, level: int, width: int) -> Tensor:
        tiling = self.tiling
        shape = (tiling.num_key_runs, self.pairs, tiling.phases(level), tiling.key_run, width)
        return torch.zeros(shape, dtype=self.dtype)

    def buffer(self, reduction: int) -> Tensor:
        """Room for the scores of a tile, or for a part of them."""
        return torch.empty(self.num_scores // reduction, dtype=self.dtype)

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Loads group after group, as slices of the batch and of the heads."""
        batch_size, num_heads = self.value.shape[:2]
        for row in range(0, batch_size, self.rows):
            for head in range(0, num_heads, self.heads):
                group = (slice(row, row + self.rows), slice(head, head + self.heads))
                self.load(group)
                yield group

    def load(self, group: tuple[slice, slice]) -> None:
        for level in self.levels:
            to_runs(self.query_levels[level][group], self.query[level], self.query_factor(level, group))
            to_runs(self.key_levels[level][group], self.key[level])
            if self.per_token:
                to_runs(self.level_weights[group][..., level, None], self.weights[level])
        to_runs(self.value[group], self.value_runs)
        if self.padding_mask is not None:
            self.load_padding(group[0])

    def query_factor(self, level: int, group: tuple[slice, slice]) -> Tensor:
        """What the queries of a level are multiplied with, [B, H, t or 1, 1]."""
        if self.per_token and level > 0:
            return self.level_weights.new_full((1, 1, 1, 1), self.scaling)
        return self.level_weights[group][..., level, None] * self.scaling

    def load_padding(self, rows: slice) -> None:
        visible_BT = self.padding_mask[rows].to(self.dtype)
        to_runs(visible_BT[:, None, :, None].expand(-1, self.heads, -1, -1), self.visible_keys)
        # What stands at a pad may be no number, and 0 times that would be none.
        for key in self.key:
            visible_blocks = self.visible_keys.unflatten(2, (key.shape[2], -1)).amax(dim=3)
            key.masked_fill_(visible_blocks == 0, 0.0)
        self.value_runs.masked_fill_(self.visible_keys == 0, 0.0)

    def key_tiles(self, query_tile: int) -> list[int]:
        """The key tiles that a query tile sees, without those of pads alone."""
        tiles = range(query_tile + 1 if self.is_causal else self.tiling.num_key_runs)
        if self.visible_keys is None:
            return list(tiles)
        return [key_tile for key_tile in tiles if self.visible_keys[key_tile].any()]

    def hide_keys(self, scores: Tensor, query_tile: int, key_tile: int) -> None:
        """Hides pads, what comes after the last token and, in a causal call, after each query."""
        if self.is_causal and query_tile == key_tile:
            scores.masked_fill_(self.is_later, HIDDEN)
        if self.visible_keys is not None:
            is_pad = tile(self.visible_keys, key_tile).transpose(1, 2) == 0
            if is_pad.any():
                scores.masked_fill_(is_pad, HIDDEN)
        elif key_tile == self.tiling.num_key_runs - 1:
            phases, run = self.tiling.phases(0), self.tiling.key_run
            num_blocks, rest = divmod(self.value.shape[2] - key_tile * run * phases, phases)
            of_blocks = scores.unflatten(2, (phases, run))
            of_blocks[..., num_blocks + (rest > 0) :] = HIDDEN
            if rest > 0:
                of_blocks[..., rest:, num_blocks] = HIDDEN

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
        coarse = None
        for level in reversed(self.levels):
            query = tile(self.query[level], query_tile)
            key_T = tile(self.key[level], key_tile).transpose(1, 2)
            scores = take(self.scores[level], self.pairs, query.shape[1], key_T.shape[2])
            if level > 0 and self.per_token:
                torch.bmm(query, key_T, out=scores)
                scores = self.weigh_rows(level, scores, coarse, query_tile)
            elif coarse is not None:
                self.repeat(level, coarse, scores)
                scores.baddbmm_(query, key_T)
            else:
                torch.bmm(query, key_T, out=scores)
            coarse = scores
        return scores

    def repeat(self, level: int, coarse: Tensor, scores: Tensor) -> None:
        """Writes the scores of level l + 1 over their blocks at level l."""
        pairs, stride = self.pairs, self.tiling.stride
        query_run, key_run, phases = self.tiling.query_run, self.tiling.key_run, self.tiling.phases(level + 1)
        coarse_rows = (scores.shape[1], 1, 1) if self.per_token else (phases, 1, query_run)
        rows = (scores.shape[1], 1, 1) if self.per_token else (phases, stride, query_run)
        source = coarse.view(pairs, *coarse_rows, -1, 1, key_run)
        scores.view(pairs, *rows, -1, stride, key_run).copy_(source)

    def weigh_rows(self, level: int, scores: Tensor, coarse: Tensor | None, query_tile: int) -> Tensor:
        """[G, M / s^l, N / s^l] -> [G, M, N / s^l]: times the level weight of each token, plus the coarser levels."""
        pairs, stride = self.pairs, self.tiling.stride
        query_run, key_run, phases = self.tiling.query_run, self.tiling.key_run, self.tiling.phases(level)
        rows = (pairs, phases, stride**level, query_run)
        weighted = take(self.weighted_scores[level], pairs, self.num_queries, scores.shape[2])
        weights = tile(self.weights[level], query_tile)
        if coarse is None:
            source = scores.view(pairs, phases, 1, query_run, -1)
            torch.mul(source, weights.view(*rows, 1), out=weighted.view(*rows, -1))
        else:
            torch.addcmul(
                coarse.view(*rows, -1, 1, key_run),
                scores.view(pairs, phases, 1, query_run, -1, stride, key_run),
                weights.view(*rows, 1, 1, 1),
                out=weighted.view(*rows, -1, stride, key_run),
            )
        return weighted

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
        output = tile(self.output, query_tile)
        tiles = self.key_tiles(query_tile)
        if not tiles:
            output.zero_()
            return
        outputs = output.new_empty(len(tiles), *output.shape)
        statistics = output.new_empty(len(tiles), *output.shape[:2], 1)
        for position, key_tile in enumerate(tiles):
            probabilities, log_sum_exp = self.probabilities(query_tile, key_tile)
            if self.dropout > 0:
                probabilities *= self.dropout_factor(probabilities, group_index, query_tile, key_tile)
            torch.bmm(probabilities, tile(self.value_runs, key_tile), out=outputs[position])
            if self.has_statistics:
                statistics[position] = log_sum_exp
        if self.has_statistics:
            tile(self.log_sum_exp, query_tile).copy_(statistics.logsumexp(dim=0))
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
        # With weights per token the gradient of a coarse query is collected per token first.
        self.grad_query = [self.query_runs(0 if self.per_token else level, head_size) for level in self.levels]
        self.grad_key = [self.key_runs(level, head_size) for level in self.levels]
        self.grad_value = self.key_runs(0, head_size)
        self.grad_scores, self.partial_sums = self.buffer(1), self.buffer(self.tiling.stride)

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
                for key_tile in self.key_tiles(query_tile):
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
        grad_output, value = tile(self.grad_output, query_tile), tile(self.value_runs, key_tile)
        grad_scores = take(self.grad_scores, *probabilities.shape)
        if self.has_statistics:
            # The probabilities of this tile are too large by the share of the others in the softmax. It is cheaper to
            # scale the rows of what they meet.
            share = (log_sum_exp - tile(self.log_sum_exp, query_tile)).exp_()
            grad_output = grad_output * share
        torch.bmm(grad_output, value.transpose(1, 2), out=grad_scores)
        kept = probabilities
        if self.dropout > 0:
            factor = self.dropout_factor(probabilities, group_index, query_tile, key_tile)
            grad_scores *= factor
            kept = factor.mul_(probabilities)
        tile(self.grad_value, key_tile).baddbmm_(kept.transpose(1, 2), grad_output)
        if self.has_statistics:
            grad_scores.sub_(share.mul_(tile(self.delta, query_tile))).mul_(probabilities)
        else:
            softmax_backward_(grad_scores, probabilities)

        for level in self.levels:
            query, key = tile(self.query[level], query_tile), tile(self.key[level], key_tile)
            if level > 0 and not self.per_token:
                grad_scores = self.sum_rows(level, grad_scores)
            if level > 0:
                grad_scores = self.sum_columns(level, grad_scores)
            tile(self.grad_query[level], query_tile).baddbmm_(grad_scores, key)
            grad_level_scores = grad_scores
            if level > 0 and self.per_token:
                grad_level_scores = self.sum_weighted_rows(level, grad_scores, query_tile)
            tile(self.grad_key[level], key_tile).baddbmm_(grad_level_scores.transpose(1, 2), query)

    def sum_rows(self, level: int, grad_scores: Tensor) -> Tensor:
        """Over the queries of a block of this level: [G, m, n] -> [G, m / s, n]."""
        num_rows, num_columns = grad_scores.shape[1] // self.tiling.stride, grad_scores.shape[2]
        # Whole phases with all their keys lie next to each other: the fastest of all sums.
        parts = grad_scores.view(self.pairs, self.tiling.phases(level), self.tiling.stride, -1)
        sums = take(self.partial_sums, self.pairs, num_rows, num_columns)
        add_parts(parts, 2, out=sums.view(self.pairs, self.tiling.phases(level), -1))
        return sums

    def sum_columns(self, level: int, grad_scores: Tensor) -> Tensor:
        """Over the keys of a block of this level: [G, m, n] -> [G, m, n / s]."""
        stride, key_run = self.tiling.stride, self.tiling.key_run
        num_rows, num_columns = grad_scores.shape[1], grad_scores.shape[2] // stride
        buffer = self.weighted_scores[level] if self.per_token else self.scores[level]
        sums = take(buffer, self.pairs, num_rows, num_columns)
        parts = grad_scores.view(self.pairs, num_rows, -1, stride, key_run)
        add_parts(parts, 3, out=sums.view(self.pairs, num_rows, -1, key_run))
        return sums

    def sum_weighted_rows(self, level: int, grad_scores: Tensor, query_tile: int) -> Tensor:
        """[G, M, N / s^l] -> [G, M / s^l, N / s^l], through the level weight of each token."""
        num_columns, block = grad_scores.shape[2], self.tiling.stride**level
        rows = (self.pairs, self.tiling.phases(level), block, self.tiling.query_run)
        weighted = take(self.partial_sums, *rows, num_columns)
        torch.mul(grad_scores.view(*rows, -1), tile(self.weights[level], query_tile).view(*rows, 1), out=weighted)
        summed = take(self.scores[level], self.pairs, self.num_queries // block, num_columns)
        add_parts(weighted.flatten(3), 2, out=summed.view(self.pairs, rows[1], -1))
        return summed

    def query_gradients(self, level: int, group: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
        """The gradients of a group's queries [B, H, T_l, d] and of their level weights, [B, H, T or 1]."""
        query, factor = self.query_levels[level][group].to(self.dtype), self.query_factor(level, group)
        grad_query = torch.empty_like(query)
        if self.per_token and level > 0:
            stride, phases = self.tiling.stride, self.tiling.phases(level)
            grad_rows = self.grad_query[level].unflatten(2, (phases, stride**level))
            grad_weights = (grad_rows * self.query[level][:, :, :, None]).sum(dim=-1, keepdim=True).flatten(2, 3)
            from_runs((grad_rows * self.weights[level].unflatten(2, (phases, -1))).sum(dim=3), grad_query)
            grad_weights_BHT1 = factor.new_empty(*query.shape[:2], self.value.shape[2], 1)
            from_runs(grad_weights, grad_weights_BHT1)
            return grad_query * factor, grad_weights_BHT1.squeeze(-1)
        from_runs(self.grad_query[level], grad_query)
        grad_weights = torch.linalg.vecdot(grad_query, query) * self.scaling
        if not self.per_token:
            grad_weights = grad_weights.sum(dim=-1, keepdim=True)
        return grad_query.mul_(factor), grad_weights

    @property
    def has_statistics(self) -> bool:
        return self.tiling.num_key_runs > 1


def tile(runs: Tensor, index: int) -> Tensor:
    """[N, G, phases, r, d] -> [G, positions of a tile, d]"""
    return runs[index].flatten(1, 2)


def take(buffer: Tensor, *shape: int) -> Tensor:
    """The beginning of a buffer in a shape."""
    return buffer[: math.prod(shape)].view(shape)


def new_states(like_BHtd: Tensor) -> Tensor:
    """An empty tensor of the same shape, laid out as [B, T, H, d], which is what a layer reads and writes."""
    return torch.empty_like(like_BHtd.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def add_parts(parts: Tensor, dim: int, out: Tensor) -> None:
    """The sum over an axis of at least 2: additions take a third of the time of PyTorch's sum here."""
    first, second, *others = parts.unbind(dim)
    torch.add(first, second, out=out)
    for other in others:
        out += other


def softmax_(scores: Tensor) -> Tensor:
    return torch.ops.aten._softmax.out(scores, -1, False, out=scores)


def softmax_backward_(grad_output: Tensor, output: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data.out(grad_output, output, -1, output.dtype, grad_input=grad_output)
