"""Attention over the paged cache in Triton: `attend` iterates over keys, `merge` combines splits.

A program holds a tile of queries that share one key head and iterates over their keys once, with a
running maximum and sum in float32 (the online softmax of arXiv 1805.02867). The tile's rows belong
to one request, ordered by token and then by head, so that a group of any size fills it.

A request of one row would keep few programs busy, so its keys are cut into splits of a fixed size
(independent of the batch, so that other requests do not change how an answer is rounded), and
`merge` combines their results. Programs find out on the device which rows and keys are theirs, so
that the host need not know which requests have how many.
"""

import triton
import triton.language as tl

# Their alignment varies between steps; specialising on it would compile while serving.
STEP = ["positions", "query_starts", "context_lens", "block_tables", "block_bases"]


@triton.jit(
    do_not_specialize=[
        *("table_width", "requests", "splits", "bias_head", "bias_row", "bias_span", "longest")
    ],
    do_not_specialize_on_alignment=STEP,
)
def attend(
    q,  # [T, HEADS, HEAD_DIM], of any strides
    keys,  # [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], contiguous; likewise values
    values,
    key_scales,  # [blocks, BLOCK_SIZE, KV_HEADS] if SCALED; likewise for values
    value_scales,
    out,  # [T, HEADS, HEAD_DIM]; with splits [R, HEADS, splits, HEAD_DIM] float32, undivided
    maxima,  # with splits [R, HEADS, splits] float32; likewise sums
    sums,
    positions,
    query_starts,
    context_lens,
    block_tables,
    block_bases,
    table_width,  # stride between requests, of both tables
    requests,
    splits,  # of the longest request's keys
    q_row,  # strides in elements
    q_head,
    q_dim,
    scale,
    bias,  # by head, then as BIAS says
    bias_head,  # strides in elements
    bias_row,
    bias_span,  # columns of a table
    bias_zero,  # column of distance 0
    cosines,  # [positions, PAIRS]; likewise sines
    sines,
    magnitude,
    far,  # if FAR: keys of this distance or more are rotated by other positions, as queries are
    far_queries,  # [positions] int64: those of queries; likewise of keys
    far_keys,
    forgotten,  # [R, HEADS, longest] float64 if GATED: of each key, less that of the query's own
    longest,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,  # keys and values are 8-bit, each to be multiplied by its scale
    BIAS: tl.constexpr,  # none, linear, table, key or dense
    STORAGE: tl.constexpr,  # none, raw or block: of keys that are rotated here
    PAIRS: tl.constexpr,  # of coordinates that are rotated here
    INTERLEAVED: tl.constexpr,
    FAR: tl.constexpr,
    GATED: tl.constexpr,
    CAP: tl.constexpr,  # scores without bias go smoothly to ± this; or None
    SPLIT: tl.constexpr,  # keys per split, for requests of one row; 0: for all others, unsplit
    QUERIES: tl.constexpr,  # rows of a tile
    KEYS: tl.constexpr,  # columns of a tile
    DIMS: tl.constexpr,  # head_dim, pairs and unrotated coordinates: each padded to a power of 2
    ROTATED: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,  # multiply as float32, as the interpreter's bfloat16 products are wrong
):
    """Programs: with splits (tiles of the heads · KV_HEADS, requests, any number, which share a
    request's splits), else (tiles of all rows, and one more for each request · KV_HEADS).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    FACTOR: tl.constexpr = tl.float32 if WIDE else q.dtype.element_ty
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    if SPLIT:
        request = tl.program_id(1)
        first_row = tl.load(query_starts + request)
    else:
        request = _request_of(tile, query_starts, requests, GROUP, QUERIES)
        first_row = tl.load(query_starts + request)
        tile -= _first_tile(first_row, request, GROUP, QUERIES)
    rows = (tl.load(query_starts + request + 1) - first_row).to(tl.int32)
    context = tl.load(context_lens + request).to(tl.int32)
    if (rows == 1) == (SPLIT == 0):
        return
    if tile * QUERIES >= rows * GROUP:
        return

    flat = tile * QUERIES + tl.arange(0, QUERIES)
    row = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    live = row < rows
    index = context - rows + row  # of the query among its request's keys
    begin, end = _visible(tile * QUERIES // GROUP, context - rows, WINDOW), context
    if CAUSAL:
        last = tl.minimum((tile * QUERIES + QUERIES - 1) // GROUP, rows - 1)
        end = tl.minimum(end, context - rows + last + 1)

    at = tl.load(positions + first_row + row, mask=live, other=0).to(tl.int32)
    query = q + ((first_row + row) * q_row + head * q_head)[:, None]
    dim = tl.arange(0, DIMS)
    pair = tl.arange(0, ROTATED)
    left = pair * 2 if INTERLEAVED else pair
    right = left + (1 if INTERLEAVED else PAIRS)
    beyond = 2 * PAIRS + tl.arange(0, REST)  # unrotated coordinates, where others are rotated
    inside = live[:, None] & (dim < HEAD_DIM)[None, :]
    if STORAGE == "none":
        whole = tl.load(query + dim[None, :] * q_dim, mask=inside, other=0.0).to(FACTOR)
    else:
        of_query = query + left[None, :] * q_dim, query + right[None, :] * q_dim
        paired = live[:, None] & (pair < PAIRS)[None, :]
        angle = at[:, None] * PAIRS + pair[None, :]
        query_a, query_b = _rotated(*of_query, cosines + angle, sines + angle, paired)
        query_a, query_b = (query_a * magnitude).to(FACTOR), (query_b * magnitude).to(FACTOR)
        if FAR:
            angle = tl.load(far_queries + at).to(tl.int32)[:, None] * PAIRS + pair[None, :]
            far_a, far_b = _rotated(*of_query, cosines + angle, sines + angle, paired)
            far_a, far_b = (far_a * magnitude).to(FACTOR), (far_b * magnitude).to(FACTOR)
        if 2 * PAIRS < HEAD_DIM:
            there = live[:, None] & (beyond < HEAD_DIM)[None, :]
            rest = tl.load(query + beyond[None, :] * q_dim, mask=there, other=0.0).to(FACTOR)

    if GATED:
        of_head = forgotten + (request.to(tl.int64) * HEADS + head)[:, None] * longest
        of_query = tl.load(of_head + index[:, None], mask=live[:, None], other=0.0)

    first, last = 0, 1
    if SPLIT:
        first, last = begin // SPLIT, tl.cdiv(end, SPLIT)
    for split in range(first + tl.program_id(2), last, tl.num_programs(2)):
        from_key, to_key = begin, end
        if SPLIT:
            from_key = tl.maximum(begin, split * SPLIT)
            to_key = tl.minimum(end, (split + 1) * SPLIT)
        maximum = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        found = tl.zeros([QUERIES, DIMS], tl.float32)
        for start in range(from_key, to_key, KEYS):
            key = start + tl.arange(0, KEYS)
            used = key < to_key
            column, offset = key // BLOCK_SIZE, key % BLOCK_SIZE
            block = tl.load(block_tables + request * table_width + column, mask=used, other=0)
            base = tl.load(block_bases + request * table_width + column, mask=used, other=0)
            number = (block * BLOCK_SIZE + offset) * KV_HEADS + kv_head
            entry = number * HEAD_DIM
            key_at = base.to(tl.int32) + offset

            stored = keys + entry[None, :]
            if STORAGE == "none":
                columns = tl.load(
                    stored + dim[:, None], mask=(dim < HEAD_DIM)[:, None] & used[None, :], other=0.0
                )
                scores = tl.dot(whole, columns.to(FACTOR), input_precision="ieee")
            else:
                of_key = stored + left[:, None], stored + right[:, None]
                in_pairs = (pair < PAIRS)[:, None] & used[None, :]
                lacking = key_at if STORAGE == "raw" else base.to(tl.int32)
                key_angle = lacking[None, :] * PAIRS + pair[:, None]
                if FAR:
                    is_far = at[:, None] - key_at[None, :] >= far
                    counted = live[:, None] & used[None, :]
                    scores = tl.zeros([QUERIES, KEYS], tl.float32)
                    # Few tiles have keys of both kinds.
                    if tl.max((counted & ~is_far).to(tl.int32)) > 0:
                        key_a, key_b = _rotated(
                            *of_key, cosines + key_angle, sines + key_angle, in_pairs
                        )
                        scores = _products(query_a, query_b, key_a, key_b, FACTOR)
                    if tl.max((counted & is_far).to(tl.int32)) > 0:
                        other = tl.load(far_keys + key_at, mask=used, other=0).to(tl.int32)
                        turn = other[None, :] * PAIRS + pair[:, None]
                        key_a, key_b = _rotated(*of_key, cosines + turn, sines + turn, in_pairs)
                        far_scores = _products(far_a, far_b, key_a, key_b, FACTOR)
                        scores = tl.where(is_far, far_scores, scores)
                else:
                    key_a, key_b = _rotated(
                        *of_key, cosines + key_angle, sines + key_angle, in_pairs
                    )
                    scores = _products(query_a, query_b, key_a, key_b, FACTOR)
                if 2 * PAIRS < HEAD_DIM:
                    columns = tl.load(
                        stored + beyond[:, None],
                        mask=(beyond < HEAD_DIM)[:, None] & used[None, :],
                        other=0.0,
                    )
                    scores += tl.dot(rest, columns.to(FACTOR), input_precision="ieee")
            scores *= scale
            if SCALED:
                scores *= tl.load(key_scales + number, mask=used, other=0.0)[None, :]
            if CAP is not None:
                scores = CAP * (2 * tl.sigmoid(scores * (2 / CAP)) - 1)  # tanh

            seen = live[:, None] & used[None, :]
            gap = index[:, None] - key[None, :]
            if CAUSAL:
                seen &= gap >= 0
            if WINDOW:
                seen &= gap < WINDOW
            scores = _biased(
                scores,
                # In 64 bits, as a dense bias is large.
                bias + (head.to(tl.int64) * bias_head + (first_row + row) * bias_row)[:, None],
                key[None, :],
                at[:, None] - key_at[None, :],
                key_at[None, :],
                seen,
                bias_span,
                bias_zero,
                BIAS,
            )
            if GATED:
                later = tl.load(of_head + key[None, :], mask=seen, other=0.0)
                scores += (later - of_query).to(tl.float32)
            scores = tl.where(seen, scores, float("-inf"))

            higher = tl.maximum(maximum, tl.max(scores, axis=1))
            # Where nothing was seen yet, -inf minus -inf would be NaN.
            reference = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - reference[:, None])
            kept = tl.exp(maximum - reference)
            rows_of_values = tl.load(
                values + entry[:, None] + dim[None, :],
                mask=used[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            found *= kept[:, None]
            if SCALED:
                # Values are scaled, not weights: a scaled weight may underflow in float16.
                scales = tl.load(value_scales + number, mask=used, other=0.0)
                rows_of_values = rows_of_values.to(tl.float32) * scales[:, None]
            found += tl.dot(weights.to(FACTOR), rows_of_values.to(FACTOR), input_precision="ieee")
            total = total * kept + tl.sum(weights, axis=1)
            maximum = higher

        if SPLIT:
            part = (request.to(tl.int64) * HEADS + head) * splits + split
            tl.store(maxima + part, maximum, mask=live)
            tl.store(sums + part, total, mask=live)
            tl.store(out + part[:, None] * HEAD_DIM + dim[None, :], found, mask=inside)
        else:
            found /= tl.where(total == 0.0, 1.0, total)[:, None]
            entry = (first_row + row) * HEADS + head
            place = out + entry[:, None] * HEAD_DIM + dim[None, :]
            tl.store(place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["query_starts", "context_lens"],
)
def merge(
    parts,  # [R, HEADS, splits, HEAD_DIM] float32
    maxima,  # [R, HEADS, splits] float32; likewise sums
    sums,
    out,  # [T, HEADS, HEAD_DIM]
    query_starts,
    context_lens,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,  # splits per iteration
    DIMS: tl.constexpr,
):
    """Programs: (requests, HEADS). A request without keys gets zeros."""
    request, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) - row != 1:
        return
    context = tl.load(context_lens + request).to(tl.int32)
    first = _visible(0, context - 1, WINDOW) // SPLIT
    last = tl.cdiv(context, SPLIT)
    first_part = (request.to(tl.int64) * HEADS + head) * splits
    dim = tl.arange(0, DIMS)

    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    found = tl.zeros([DIMS], tl.float32)
    for start in range(first, last, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        used = split < last
        part = first_part + split
        part_maximum = tl.load(maxima + part, mask=used, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(part_maximum, axis=0))
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # as in `attend`
        weights, kept = tl.exp(part_maximum - reference), tl.exp(maximum - reference)
        part_sums = tl.load(sums + part, mask=used, other=0.0)
        inside = used[:, None] & (dim < HEAD_DIM)[None, :]
        rows = tl.load(parts + part[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        found = found * kept + tl.sum(weights[:, None] * rows, axis=0)
        total = total * kept + tl.sum(weights * part_sums, axis=0)
        maximum = higher
    found /= tl.where(total == 0.0, 1.0, total)
    place = out + (row * HEADS + head) * HEAD_DIM + dim
    tl.store(place, found.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(
    do_not_specialize=["table_width", "longest"],
    do_not_specialize_on_alignment=["context_lens", "block_tables"],
)
def forget(
    gates,  # [blocks, HEADS, BLOCK_SIZE] float32, contiguous
    forgotten,  # [R, HEADS, longest] float64
    context_lens,
    block_tables,
    table_width,
    longest,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # per iteration
    TILE: tl.constexpr,  # heads per program
):
    """For each key, the sum of the gates of its request's later tokens, from the last one on.

    Programs: (requests, tiles of heads).
    """
    request = tl.program_id(0)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    context = tl.load(context_lens + request).to(tl.int32)
    to = forgotten + (request.to(tl.int64) * HEADS + head)[None, :] * longest
    tiles = tl.cdiv(context, KEYS)
    later = tl.zeros([TILE], tl.float64)
    for number in range(tiles):
        key = (tiles - 1 - number) * KEYS + tl.arange(0, KEYS)
        # Of the token after each key: subtracting a key's own gate would lose what small ones say.
        token = key + 1
        used = token < context
        block = tl.load(
            block_tables + request * table_width + token // BLOCK_SIZE, mask=used, other=0
        )
        row = block[:, None] * HEADS + head[None, :]
        place = row * BLOCK_SIZE + (token % BLOCK_SIZE)[:, None]
        there = (head < HEADS)[None, :]
        gate = tl.load(gates + place, mask=used[:, None] & there, other=0.0).to(tl.float64)
        sums = later[None, :] + tl.cumsum(gate, axis=0, reverse=True)
        tl.store(to + key[:, None], sums, mask=(key < context)[:, None] & there)
        later += tl.sum(gate, axis=0)


@triton.jit
def _request_of(tile, query_starts, requests, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """The request whose rows are a tile's: the last whose tiles begin with it or before."""
    low, high = 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        begins = _first_tile(tl.load(query_starts + middle), middle, GROUP, QUERIES)
        low, high = tl.where(begins <= tile, middle, low), tl.where(begins <= tile, high, middle)
    return low


@triton.jit
def _first_tile(first_row, request, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Of a request's rows; one to spare for each before it, as none shares a tile with another."""
    return (first_row * GROUP // QUERIES).to(tl.int32) + request


@triton.jit
def _visible(row, before, WINDOW: tl.constexpr):
    """The first key that a row sees; `before` is the number of keys before the request's rows."""
    if WINDOW:
        return tl.maximum(before + row - WINDOW + 1, 0)
    else:
        return 0


@triton.jit
def _rotated(left, right, cosines, sines, there):
    """Rotate pairs of coordinates in float32; all arguments but `there` are addresses."""
    a = tl.load(left, mask=there, other=0.0).to(tl.float32)
    b = tl.load(right, mask=there, other=0.0).to(tl.float32)
    cos = tl.load(cosines, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(sines, mask=there, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _products(query_a, query_b, key_a, key_b, FACTOR: tl.constexpr):
    """[QUERIES, KEYS] float32, of the coordinates that form pairs."""
    scores = tl.dot(query_a, key_a.to(FACTOR), input_precision="ieee")
    return scores + tl.dot(query_b, key_b.to(FACTOR), input_precision="ieee")


@triton.jit
def _biased(scores, own, key, distance, key_at, seen, span, zero, BIAS: tl.constexpr):
    """Scores plus the bias at own [QUERIES, 1]: a slope, a table, or values by key [1, KEYS].

    distance [QUERIES, KEYS] and key_at [1, KEYS] are in positions.
    """
    if BIAS == "linear":
        scores -= tl.load(own) * distance.to(tl.float32)
    elif BIAS == "table":
        column = tl.minimum(tl.maximum(distance + zero, 0), span - 1)
        scores += tl.load(own + column, mask=seen, other=0.0)
    elif BIAS == "key":
        scores += tl.load(own + tl.minimum(key_at, span - 1), mask=seen, other=0.0)
    elif BIAS == "dense":
        scores += tl.load(own + key, mask=seen, other=0.0)
    return scores
