"""The Triton kernels of fused multi-scale attention; `triton_attention` says how they work, with the shape legend."""

import math

import triton
import triton.language as tl

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    # The compiler of 3.2 aborts the process on the products of the coarse levels.
    raise ImportError(
        f"Triton {triton.__version__} is installed: fused attention on GPU needs Triton 3.3 or later, the version of "
        'PyTorch 2.7. Until then use `attn_implementation="sdpa"`.'
    )

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


# Argument lists of the kernels are grouped by kind; one argument per line would be half of this file.
# fmt: off
@triton.jit
def _packed_rows(num_tokens, LEVEL: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr):
    """Rows before those of a level in a packed tensor, where a row of level k stands for min(s^k, UNIT) tokens."""
    rows = num_tokens * 0
    for level in tl.static_range(1, LEVEL):
        rows += tl.cdiv(num_tokens, STRIDE**level if STRIDE**level < UNIT else UNIT)
    return rows


@triton.jit
def _pair_offset(pair, num_rows, num_heads, HEAD_SIZE: tl.constexpr):
    """Offset of a pair of batch row and head in a tensor [B, num_rows, H, d]; int64, as the pair is."""
    return ((pair // num_heads) * num_rows * num_heads + pair % num_heads) * HEAD_SIZE


@triton.jit
def _rows(
    fine_ptr, coarse_ptr, start, num_tokens, num_heads,
    LEVEL: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, STRIDE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """
    The rows of a level for tokens start, start + STEP, ..., start + BLOCK - STEP: their addresses, [BLOCK / STEP, d],
    and a mask of those that exist. The pointers are those of one pair, and a row stands for UNIT tokens.
    """
    first = start // UNIT
    offset = tl.arange(0, BLOCK // STEP)
    if STEP < UNIT:
        # Steps of a block share its row. Otherwise tiles start where a row does, and each has its own.
        offset = (start + offset * STEP) // UNIT - first
    exists = first + offset < tl.cdiv(num_tokens, UNIT)
    base_ptr = fine_ptr
    if LEVEL > 0:
        base_ptr = coarse_ptr
        first += _packed_rows(num_tokens, LEVEL, STRIDE, UNIT)
    # Of the address only the scalar part can pass 2^31.
    pitch = num_heads * HEAD_SIZE
    column = tl.arange(0, BLOCK_D)
    pointers = base_ptr + first.to(tl.int64) * pitch + (offset * pitch)[:, None] + column[None, :]
    return pointers, exists[:, None] & (column < HEAD_SIZE)[None, :]


@triton.jit
def _load_weight(weight_ptr, token, num_tokens, LEVEL: tl.constexpr):
    """lambda_l of the queries, from [L, T] of one pair."""
    return tl.load(weight_ptr + LEVEL * num_tokens + token, mask=token < num_tokens, other=0.0)


@triton.jit
def _load_is_key(padding_ptr, token, num_tokens, HAS_PADDING: tl.constexpr):
    """Which tokens of a tile of keys are there, and not padding."""
    is_key = token < num_tokens
    if HAS_PADDING:
        is_key = is_key & (tl.load(padding_ptr + token, mask=is_key, other=0) != 0)
    return is_key


@triton.jit
def _is_visible(is_key, query_token, key_token, IS_CAUSAL: tl.constexpr):
    """[m, n], or [1, n] if all queries see the same keys."""
    visible = is_key[None, :]
    if IS_CAUSAL:
        visible = visible & (key_token[None, :] <= query_token[:, None])
    return visible


@triton.jit
def _is_kept(seed, dropout, pair, query_token, key_token, num_tokens):
    """What dropout leaves of a tile [m, n]: a function of the seed and the element, whatever the tiles are."""
    element = (pair * num_tokens + query_token)[:, None] * num_tokens + key_token[None, :]
    return tl.rand(seed, element) >= dropout


@triton.jit
def _sum_steps(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr):
    """[ROWS, COLUMNS] -> [ROWS / ROW_STEP, COLUMNS / COLUMN_STEP]."""
    if ROW_STEP > 1:
        tile = tl.sum(tl.reshape(tile, (ROWS // ROW_STEP, ROW_STEP, COLUMNS)), axis=1)
    if COLUMN_STEP > 1:
        tile = tl.sum(tl.reshape(tile, (ROWS // ROW_STEP, COLUMNS // COLUMN_STEP, COLUMN_STEP)), axis=2)
    return tile


@triton.jit
def _add_level_scores(
    scores, query_ptr, query_coarse_ptr, key_ptr, key_coarse_ptr, weight_ptr, scaling, start_m, start_n, num_tokens,
    num_heads, LEVEL: tl.constexpr, STRIDE: tl.constexpr, COARSEST: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds what a level gives to a tile of scores [m, n], times log2(e)."""
    UNIT: tl.constexpr = STRIDE**LEVEL
    STEP: tl.constexpr = UNIT if UNIT < COARSEST else COARSEST
    pointers, exists = _rows(
        query_ptr, query_coarse_ptr, start_m, num_tokens, num_heads, LEVEL, BLOCK_M, STEP, UNIT, STRIDE, HEAD_SIZE,
        BLOCK_D
    )
    query = tl.load(pointers, mask=exists, other=0.0)
    pointers, exists = _rows(
        key_ptr, key_coarse_ptr, start_n, num_tokens, num_heads, LEVEL, BLOCK_N, STEP, UNIT, STRIDE, HEAD_SIZE, BLOCK_D
    )
    key = tl.load(pointers, mask=exists, other=0.0)
    level_scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if STEP > 1:
        blocks = level_scores[:, None, :, None]
        blocks = tl.broadcast_to(blocks, (BLOCK_M // STEP, STEP, BLOCK_N // STEP, STEP))
        level_scores = tl.reshape(blocks, (BLOCK_M, BLOCK_N))
    weight = _load_weight(weight_ptr, start_m + tl.arange(0, BLOCK_M), num_tokens, LEVEL)
    return scores + (weight * (scaling * LOG2_E))[:, None] * level_scores


# Compiled into the kernel where they are 1 or a multiple of 16, the sizes of a call would cost a compilation for every
# new length and save nothing: addresses are aligned by the head size.
@triton.jit(do_not_specialize=["seed", "num_tokens", "num_heads"])
def forward_kernel(
    query_ptr, query_coarse_ptr, key_ptr, key_coarse_ptr, value_ptr, weight_ptr, padding_ptr, output_ptr, lse_ptr, seed,
    dropout, kept_scale, scaling, num_tokens, num_heads,
    STRIDE: tl.constexpr, NUM_LEVELS: tl.constexpr, COARSEST: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):
    """One tile of queries: its output and the log-sum-exp of its scores, -inf for a query that sees no key."""
    num_tiles = tl.cdiv(num_tokens, BLOCK_M)
    pair = (tl.program_id(0) // num_tiles).to(tl.int64)
    start_m = (tl.program_id(0) % num_tiles) * BLOCK_M
    fine_offset = _pair_offset(pair, num_tokens, num_heads, HEAD_SIZE)
    coarse_rows = _packed_rows(num_tokens, NUM_LEVELS, STRIDE, STRIDE**NUM_LEVELS)
    coarse_offset = _pair_offset(pair, coarse_rows, num_heads, HEAD_SIZE)
    query_ptr += fine_offset
    query_coarse_ptr += coarse_offset
    key_ptr += fine_offset
    key_coarse_ptr += coarse_offset
    value_ptr += fine_offset
    output_ptr += fine_offset
    weight_ptr += pair * num_tokens * NUM_LEVELS
    padding_ptr += (pair // num_heads) * num_tokens

    query_token = start_m + tl.arange(0, BLOCK_M)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = num_tokens
    if IS_CAUSAL:
        end = tl.minimum(num_tokens, start_m + BLOCK_M)
    for start_n in range(0, end, BLOCK_N):
        key_token = start_n + tl.arange(0, BLOCK_N)
        is_key = _load_is_key(padding_ptr, key_token, num_tokens, HAS_PADDING)
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for level in tl.static_range(NUM_LEVELS):
            scores = _add_level_scores(
                scores, query_ptr, query_coarse_ptr, key_ptr, key_coarse_ptr, weight_ptr, scaling, start_m, start_n,
                num_tokens, num_heads, level, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION
            )
        scores = tl.where(_is_visible(is_key, query_token, key_token, IS_CAUSAL), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key so far: -inf minus -inf is not a number.
        subtracted = tl.where(new_max == float("-inf"), 0.0, new_max)
        probabilities = tl.exp2(scores - subtracted[:, None])
        correction = tl.exp2(row_max - subtracted)
        row_sum = row_sum * correction + tl.sum(probabilities, axis=1)
        row_max = new_max
        if HAS_DROPOUT:
            kept = _is_kept(seed, dropout, pair, query_token, key_token, num_tokens)
            probabilities = tl.where(kept, probabilities, 0.0)
        pointers, exists = _rows(
            value_ptr, value_ptr, start_n, num_tokens, num_heads, 0, BLOCK_N, 1, 1, STRIDE, HEAD_SIZE, BLOCK_D
        )
        # Padding has probability 0, and 0 * inf is not a number.
        value = tl.load(pointers, mask=exists & is_key[:, None], other=0.0)
        output *= correction[:, None]
        output = tl.dot(probabilities.to(value.dtype), value, output, input_precision=PRECISION)

    is_empty = row_sum == 0.0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    output *= (kept_scale / row_sum)[:, None]
    pointers, exists = _rows(
        output_ptr, output_ptr, start_m, num_tokens, num_heads, 0, BLOCK_M, 1, 1, STRIDE, HEAD_SIZE, BLOCK_D
    )
    tl.store(pointers, output.to(pointers.dtype.element_ty), mask=exists)
    lse = tl.where(is_empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
    tl.store(lse_ptr + pair * num_tokens + query_token, lse, mask=query_token < num_tokens)


@triton.jit
def _zero_gradient(
    LEVEL: tl.constexpr, STRIDE: tl.constexpr, COARSEST: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr,
):
    """What `_add_gradient` starts from: [m, d] for a tile of queries, [n / STEP, d] for a tile of keys."""
    STEP: tl.constexpr = STRIDE**LEVEL if STRIDE**LEVEL < COARSEST else COARSEST
    return tl.zeros([BLOCK_N // STEP if OF_KEYS else BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def _add_gradient(
    gradient, score_gradient, other_ptr, other_coarse_ptr, weight_ptr, start_m, start_n, num_tokens, num_heads,
    LEVEL: tl.constexpr, STRIDE: tl.constexpr, COARSEST: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, OF_KEYS: tl.constexpr,
):
    """
    Adds what a tile of dS gives to one level, but for the scaling. For a tile of queries the other side are the keys,
    and the reverse.

        of keys:      sum_i lambda_l(i) dS_ij q^l[i // s^l], summed over the tokens j of a step too
        of queries:   sum_j dS_ij k^l[j // s^l], the gradient of lambda_l(i) q^l[i // s^l]
    """
    UNIT: tl.constexpr = STRIDE**LEVEL
    STEP: tl.constexpr = UNIT if UNIT < COARSEST else COARSEST
    BLOCK: tl.constexpr = BLOCK_M if OF_KEYS else BLOCK_N
    start = start_m if OF_KEYS else start_n
    pointers, exists = _rows(
        other_ptr, other_coarse_ptr, start, num_tokens, num_heads, LEVEL, BLOCK, STEP, UNIT, STRIDE, HEAD_SIZE, BLOCK_D
    )
    other = tl.load(pointers, mask=exists, other=0.0)
    if OF_KEYS:
        weight = _load_weight(weight_ptr, start_m + tl.arange(0, BLOCK_M), num_tokens, LEVEL)
        factor = tl.trans(_sum_steps(score_gradient * weight[:, None], BLOCK_M, BLOCK_N, STEP, STEP))
    else:
        factor = _sum_steps(score_gradient, BLOCK_M, BLOCK_N, 1, STEP)
    return tl.dot(factor.to(other.dtype), other, gradient, input_precision=PRECISION)


@triton.jit
def _store_gradient(
    gradient, query_ptr, query_coarse_ptr, weight_ptr, grad_ptr, grad_coarse_ptr, grad_weight_ptr, scaling, start,
    num_tokens, num_heads,
    LEVEL: tl.constexpr, STRIDE: tl.constexpr, COARSEST: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr,
):
    """Stores the gradient of one level for a tile of keys, or of queries and, with these, of the level weights."""
    UNIT: tl.constexpr = STRIDE**LEVEL
    STEP: tl.constexpr = UNIT if UNIT < COARSEST else COARSEST
    gradient *= scaling
    if not OF_KEYS:
        token = start + tl.arange(0, BLOCK)
        pointers, exists = _rows(
            query_ptr, query_coarse_ptr, start, num_tokens, num_heads, LEVEL, BLOCK, 1, UNIT, STRIDE, HEAD_SIZE, BLOCK_D
        )
        query = tl.load(pointers, mask=exists, other=0.0)
        grad_weight = tl.sum(gradient * query.to(tl.float32), axis=1)
        tl.store(grad_weight_ptr + LEVEL * num_tokens + token, grad_weight, mask=token < num_tokens)
        weight = _load_weight(weight_ptr, token, num_tokens, LEVEL)
        gradient = _sum_steps(gradient * weight[:, None], BLOCK, BLOCK_D, STEP, 1)
    pointers, exists = _rows(
        grad_ptr, grad_coarse_ptr, start, num_tokens, num_heads, LEVEL, BLOCK, STEP, STEP, STRIDE, HEAD_SIZE, BLOCK_D
    )
    tl.store(pointers, gradient.to(pointers.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["seed", "num_tokens", "num_heads"])
def backward_kernel(
    query_ptr, query_coarse_ptr, key_ptr, key_coarse_ptr, value_ptr, weight_ptr, padding_ptr, grad_output_ptr, lse_ptr,
    delta_ptr, grad_ptr, grad_coarse_ptr, grad_value_ptr, grad_weight_ptr, seed, dropout, kept_scale, scaling,
    num_tokens, num_heads,
    STRIDE: tl.constexpr, NUM_LEVELS: tl.constexpr, COARSEST: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr, FIRST: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """
    Gradients of up to four levels from FIRST on for one tile: of keys (and of the values, if FIRST is 0) or of queries
    (and of their level weights). Each sum is a variable of its own, since a loop cannot carry a list of tensors.
    """
    BLOCK: tl.constexpr = BLOCK_N if OF_KEYS else BLOCK_M
    OTHER_BLOCK: tl.constexpr = BLOCK_M if OF_KEYS else BLOCK_N
    num_tiles = tl.cdiv(num_tokens, BLOCK)
    pair = (tl.program_id(0) // num_tiles).to(tl.int64)
    start = (tl.program_id(0) % num_tiles) * BLOCK
    fine_offset = _pair_offset(pair, num_tokens, num_heads, HEAD_SIZE)
    coarse_rows = _packed_rows(num_tokens, NUM_LEVELS, STRIDE, STRIDE**NUM_LEVELS)
    coarse_offset = _pair_offset(pair, coarse_rows, num_heads, HEAD_SIZE)
    query_ptr += fine_offset
    query_coarse_ptr += coarse_offset
    key_ptr += fine_offset
    key_coarse_ptr += coarse_offset
    value_ptr += fine_offset
    grad_output_ptr += fine_offset
    grad_value_ptr += fine_offset
    grad_ptr += fine_offset
    coarse_rows = _packed_rows(num_tokens, NUM_LEVELS, STRIDE, COARSEST)
    grad_coarse_ptr += _pair_offset(pair, coarse_rows, num_heads, HEAD_SIZE)
    weight_ptr += pair * num_tokens * NUM_LEVELS
    grad_weight_ptr += pair * num_tokens * NUM_LEVELS
    padding_ptr += (pair // num_heads) * num_tokens
    lse_ptr += pair * num_tokens
    delta_ptr += pair * num_tokens
    other_ptr = query_ptr if OF_KEYS else key_ptr
    other_coarse_ptr = query_coarse_ptr if OF_KEYS else key_coarse_ptr

    grad_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if FIRST < NUM_LEVELS:
        grad_0 = _zero_gradient(FIRST, STRIDE, COARSEST, BLOCK_D, BLOCK_M, BLOCK_N, OF_KEYS)
    if FIRST + 1 < NUM_LEVELS:
        grad_1 = _zero_gradient(FIRST + 1, STRIDE, COARSEST, BLOCK_D, BLOCK_M, BLOCK_N, OF_KEYS)
    if FIRST + 2 < NUM_LEVELS:
        grad_2 = _zero_gradient(FIRST + 2, STRIDE, COARSEST, BLOCK_D, BLOCK_M, BLOCK_N, OF_KEYS)
    if FIRST + 3 < NUM_LEVELS:
        grad_3 = _zero_gradient(FIRST + 3, STRIDE, COARSEST, BLOCK_D, BLOCK_M, BLOCK_N, OF_KEYS)

    first = 0
    end = num_tokens
    if IS_CAUSAL:
        if OF_KEYS:
            first = (start // BLOCK_M) * BLOCK_M
        else:
            end = tl.minimum(num_tokens, start + BLOCK_M)
    for other_start in range(first, end, OTHER_BLOCK):
        start_m = other_start if OF_KEYS else start
        start_n = start if OF_KEYS else other_start
        query_token = start_m + tl.arange(0, BLOCK_M)
        key_token = start_n + tl.arange(0, BLOCK_N)
        is_key = _load_is_key(padding_ptr, key_token, num_tokens, HAS_PADDING)
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for level in tl.static_range(NUM_LEVELS):
            scores = _add_level_scores(
                scores, query_ptr, query_coarse_ptr, key_ptr, key_coarse_ptr, weight_ptr, scaling, start_m, start_n,
                num_tokens, num_heads, level, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION
            )
        is_query = query_token < num_tokens
        lse = tl.load(lse_ptr + query_token, mask=is_query, other=float("-inf"))
        delta = tl.load(delta_ptr + query_token, mask=is_query, other=0.0)
        # exp2(scores - inf) = 0: a query that is not there or sees no key has probabilities and gradients of 0.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        visible = _is_visible(is_key, query_token, key_token, IS_CAUSAL)
        probabilities = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)

        pointers, exists = _rows(
            grad_output_ptr, grad_output_ptr, start_m, num_tokens, num_heads, 0, BLOCK_M, 1, 1, STRIDE, HEAD_SIZE,
            BLOCK_D
        )
        grad_output = tl.load(pointers, mask=exists, other=0.0)
        pointers, exists = _rows(
            value_ptr, value_ptr, start_n, num_tokens, num_heads, 0, BLOCK_N, 1, 1, STRIDE, HEAD_SIZE, BLOCK_D
        )
        value = tl.load(pointers, mask=exists & is_key[:, None], other=0.0)
        grad_probabilities = tl.dot(grad_output, tl.trans(value), input_precision=PRECISION)
        kept_probabilities = probabilities
        if HAS_DROPOUT:
            kept = _is_kept(seed, dropout, pair, query_token, key_token, num_tokens)
            kept_probabilities = tl.where(kept, probabilities * kept_scale, 0.0)
            grad_probabilities = tl.where(kept, grad_probabilities * kept_scale, 0.0)
        if OF_KEYS and FIRST == 0:
            factor = tl.trans(kept_probabilities.to(grad_output.dtype))
            grad_value = tl.dot(factor, grad_output, grad_value, input_precision=PRECISION)
        grad_scores = probabilities * (grad_probabilities - delta[:, None])
        if FIRST < NUM_LEVELS:
            grad_0 = _add_gradient(
                grad_0, grad_scores, other_ptr, other_coarse_ptr, weight_ptr, start_m, start_n, num_tokens, num_heads,
                FIRST, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, OF_KEYS
            )
        if FIRST + 1 < NUM_LEVELS:
            grad_1 = _add_gradient(
                grad_1, grad_scores, other_ptr, other_coarse_ptr, weight_ptr, start_m, start_n, num_tokens, num_heads,
                FIRST + 1, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, OF_KEYS
            )
        if FIRST + 2 < NUM_LEVELS:
            grad_2 = _add_gradient(
                grad_2, grad_scores, other_ptr, other_coarse_ptr, weight_ptr, start_m, start_n, num_tokens, num_heads,
                FIRST + 2, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, OF_KEYS
            )
        if FIRST + 3 < NUM_LEVELS:
            grad_3 = _add_gradient(
                grad_3, grad_scores, other_ptr, other_coarse_ptr, weight_ptr, start_m, start_n, num_tokens, num_heads,
                FIRST + 3, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, OF_KEYS
            )

    if OF_KEYS and FIRST == 0:
        pointers, exists = _rows(
            grad_value_ptr, grad_value_ptr, start, num_tokens, num_heads, 0, BLOCK, 1, 1, STRIDE, HEAD_SIZE, BLOCK_D
        )
        tl.store(pointers, grad_value.to(pointers.dtype.element_ty), mask=exists)
    if FIRST < NUM_LEVELS:
        _store_gradient(
            grad_0, query_ptr, query_coarse_ptr, weight_ptr, grad_ptr, grad_coarse_ptr, grad_weight_ptr, scaling, start,
            num_tokens, num_heads, FIRST, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK, OF_KEYS
        )
    if FIRST + 1 < NUM_LEVELS:
        _store_gradient(
            grad_1, query_ptr, query_coarse_ptr, weight_ptr, grad_ptr, grad_coarse_ptr, grad_weight_ptr, scaling, start,
            num_tokens, num_heads, FIRST + 1, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK, OF_KEYS
        )
    if FIRST + 2 < NUM_LEVELS:
        _store_gradient(
            grad_2, query_ptr, query_coarse_ptr, weight_ptr, grad_ptr, grad_coarse_ptr, grad_weight_ptr, scaling, start,
            num_tokens, num_heads, FIRST + 2, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK, OF_KEYS
        )
    if FIRST + 3 < NUM_LEVELS:
        _store_gradient(
            grad_3, query_ptr, query_coarse_ptr, weight_ptr, grad_ptr, grad_coarse_ptr, grad_weight_ptr, scaling, start,
            num_tokens, num_heads, FIRST + 3, STRIDE, COARSEST, HEAD_SIZE, BLOCK_D, BLOCK, OF_KEYS
        )
