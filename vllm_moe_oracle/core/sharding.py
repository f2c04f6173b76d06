"""Shard arithmetic: the shard of a rank, whether scale groups and packed words survive, and which other sharding would.

Tensor parallelism shards the intermediate size; expert parallelism gives every rank whole experts. The hidden size is
never sharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from .decision import Reason, ShardPlan
from .env_vars import env_var
from .problem import MX_BLOCK, Parallel, Problem


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def scale_group_size(problem: Problem) -> int:
    """Input features per scale of w2 on this rank; 1 for scales per output row, which sharding cannot split."""
    if problem.scheme.name in ("mxfp8", "mxfp4"):
        return MX_BLOCK
    return max(loaded_group_size(problem), 1)


def loaded_group_size(problem: Problem) -> int:
    """Input features per scale in the tensors that vLLM loads; -1 for one scale per output row.

    This is the checkpoint's group size, unless it does not divide a size. Integers' groups are halved then, and their
    scales are repeated, until they divide both sizes, but not below 32: vLLM's MoeWNA16, to which stock vLLM falls back
    for GPTQ and AWQ files, does the same. Where shards differ, they must divide each. With act order the features of a
    group are not contiguous, and the group cannot be halved.
    """
    group = problem.scheme.group_size
    if problem.scheme.name == "wna16" and not has_act_order(problem):
        # Of shards that differ, the last is the whole less multiples of the first.
        sizes = (problem.hidden_size, problem.intermediate_size, problem.ragged_intermediate_size)
        while group % 2 == 0 and group >= 64 and any(size % group for size in sizes):
            group //= 2
    return group


def describe_loaded_group(problem: Problem) -> str:
    """Why the checkpoint's scale groups are loaded as smaller ones; "" if they are not."""
    group, loaded = problem.scheme.group_size, loaded_group_size(problem)
    if loaded == group:
        return ""
    sizes = (problem.intermediate_size, problem.hidden_size, problem.ragged_intermediate_size)
    size = next(size for size in sizes if size % group)
    reason = f"{size} features are not a multiple of {group}"
    return f"scale groups of {group} are loaded as groups of {loaded}, because {reason}"


def has_act_order(problem: Problem) -> bool:
    """Whether the layer's input features must be reordered at run time.

    Not with act order ``static``, whose groups are contiguous, and not with one scale per output row, for which the
    order of features is irrelevant.
    """
    return problem.scheme.act_order == "group" and problem.scheme.group_size != -1


def has_group_index(problem: Problem) -> bool:
    """Whether w2 needs an explicit group index for each of its input features.

    With act order ``group`` the features of a group are spread over all ranks. A rank needs the scales of all groups,
    and how many features of a group it holds varies.
    """
    return has_act_order(problem) and problem.parallel.tp > 1


def scale_columns(problem: Problem) -> tuple[int, int]:
    """Scales per output row of w13 and of w2 on this rank."""
    group = loaded_group_size(problem)
    if group == -1:
        return 1, 1
    inner = problem.unsharded_intermediate_size if has_group_index(problem) else problem.intermediate_size
    return problem.hidden_size // group, inner // group


def describe_shard(problem: Problem) -> str:
    """The arithmetic of the shard, for a message: ``640 / 2 = 320``, or the size itself without sharding."""
    if problem.parallel.tp == 1:
        return str(problem.intermediate_size)
    if problem.ragged_intermediate_size:
        unsharded = problem.unsharded_intermediate_size
        return f"{problem.intermediate_size}, the largest shard of {unsharded} in whole groups,"
    return f"{problem.unsharded_intermediate_size} / {problem.parallel.tp} = {problem.intermediate_size}"


IsViable = Callable[[Problem], bool]
"""Whether a layer with another sharding could run."""


def suggest_parallelism(problem: Problem, works: IsViable) -> str:
    """Parallel settings under which the layer could run, as a remedy; empty if there are none.

    Only tensor-parallel sizes that divide the present one are considered, so that attention heads stay evenly sharded.

    Args:
        problem: the layer on this rank.
        works: whether the layer can run under other settings. It must check every rule, so that no remedy leads to
            another refusal.
    """
    ranks, full = problem.parallel.tp, problem.unsharded_intermediate_size
    if ranks == 1:
        return ""
    smaller = _smaller_shardings(problem.parallel)
    ways = [words for words, each in smaller if any(map(works, _resharded(problem, each)))][:1]
    local = -(-problem.num_experts // ranks)
    spread = dataclasses.replace(
        problem,
        intermediate_size=full,
        ragged_intermediate_size=0,
        unpadded_intermediate_size=0,
        local_experts=local,
        parallel=dataclasses.replace(problem.parallel, tp=1, ep=ranks),
    )
    if problem.num_experts >= ranks and works(spread):
        ways.append(f"expert parallelism over the {ranks} ranks (--enable-expert-parallel)")
    words = f"{' or '.join(ways)} would work" if ways else ""
    ragged = shard_by_scale_groups(problem)
    if ragged is not problem and works(ragged):
        words += (
            f"{'; so ' if ways else ''}would {env_var('ragged_shards')}=1, with {ragged.intermediate_size} on the "
            f"first rank and {shard_size(ragged, ranks - 1)} on the last"
        )
    return words


def _smaller_shardings(parallel: Parallel) -> Iterator[tuple[str, Parallel]]:
    """Shardings over fewer ranks, most ranks first, in words: fewer tensor-parallel ones, or fewer data-parallel
    ones."""
    tp = _tensor_ranks(parallel)
    dp = parallel.tp // tp
    for size in (size for size in range(parallel.tp - 1, 0, -1) if parallel.tp % size == 0):
        if size % dp == 0:
            smaller = dataclasses.replace(parallel, tp=size)
            yield smaller.shard_words, smaller
        elif size % tp == 0:
            yield f"TP {tp} x DP {size // tp}", dataclasses.replace(parallel, tp=size, dp=size // tp)


def _tensor_ranks(parallel: Parallel) -> int:
    """vLLM's ``--tensor-parallel-size``, where the intermediate size is sharded."""
    return parallel.tp // parallel.dp if parallel.splits_over_dp else parallel.tp


def pads_experts(width: int, tp: int, least: int) -> bool:
    """Whether a model's code in vLLM pads experts with zeros, to `least` columns on each tensor-parallel rank.

    The code counts ``--tensor-parallel-size`` alone; vLLM shards the padded experts over data-parallel ranks, too.

    Args:
        width: intermediate size of an expert in the checkpoint.
        tp: tensor-parallel ranks; 1 under expert parallelism.
        least: from `releases.expert_names.min_expert_width`, or the model's own; 0 where the code does not pad.
    """
    return tp > 1 and width // tp < least


def _padded_width(problem: Problem) -> int:
    """Columns on each tensor-parallel rank to which the model's code padded the experts; 0 if it did not."""
    if not problem.unpadded_intermediate_size:
        return 0
    return problem.intermediate_size * problem.parallel.tp // _tensor_ranks(problem.parallel)


def _resharded(problem: Problem, parallel: Parallel) -> Iterator[Problem]:
    """The layer on one of the ranks of another sharding, in each way that it can be sharded."""
    full, ranks = problem.unsharded_intermediate_size, parallel.tp
    if pads_experts(full, _tensor_ranks(parallel), _padded_width(problem)):
        return
    if full % ranks == 0:
        even = dataclasses.replace(
            problem,
            intermediate_size=full // ranks,
            ragged_intermediate_size=0,
            unpadded_intermediate_size=0,
            parallel=parallel,
        )
        yield shard_by_scale_groups(even) if problem.ragged_intermediate_size else even
    share = _first_shard_size(full, ranks, MX_BLOCK)
    if loader_shards_by_blocks(problem) and share:
        yield dataclasses.replace(problem, intermediate_size=share, ragged_intermediate_size=full, parallel=parallel)


def is_shardable(problem: Problem) -> bool:
    """Whether the sharding splits no scale group and no packed word, and every rank gets its experts."""
    split = _split_scale_groups(problem) or _split_packed_words(problem)
    return not (split or loader_reasons(problem) or problem.unpadded_intermediate_size)


def split_reasons(problem: Problem, works: IsViable = is_shardable) -> list[Reason]:
    """Why the sharding would split scale groups or packed words of integer codes; empty if it does not.

    A rank's scales are a slice of the checkpoint's, so a shard must begin and end with a group. With act order
    ``group`` every rank holds all scales, and only the unsharded size must be a multiple of the group size. Some
    packings pack along input features, others along rows, and zero points are always packed along rows: both sizes must
    be whole words.

    Args:
        problem: the layer on this rank.
        works: see `suggest_parallelism`.
    """
    broken = _split_scale_groups(problem) + _split_packed_words(problem)
    sharded = [reason for reason in broken if reason.code.endswith(".intermediate")]
    if not sharded:
        return broken
    remedy = suggest_parallelism(problem, works)
    return [dataclasses.replace(reason, remedy=remedy) if reason in sharded else reason for reason in broken]


def _split_scale_groups(problem: Problem) -> list[Reason]:
    group, tp = scale_group_size(problem), problem.parallel.tp
    halved = f", halved from {problem.scheme.group_size}" if 1 < group < problem.scheme.group_size else ""
    whole = has_group_index(problem)
    inner = problem.unsharded_intermediate_size if whole else problem.intermediate_size
    words, what = str(inner) if whole or tp == 1 else describe_shard(problem), f"the scale group {group}{halved}"
    hidden = size_reasons("group.hidden", problem.hidden_size, group, what=what)
    return hidden + size_reasons("group.intermediate", inner, group, words, what)


def size_reasons(code: str, size: int, multiple: int, words: str = "", what: str = "") -> list[Reason]:
    """Why a size is not a multiple; empty if it is.

    Args:
        code: the reason's code, which ends with the size's name.
        size: the size.
        multiple: what it must be a multiple of.
        words: the size in words; "" for its number.
        what: the multiple in words; "" for its number.
    """
    if size % multiple == 0:
        return []
    rule = f"{code.rpartition('.')[2]} size {words or size} is not a multiple of {what or multiple}"
    return [Reason(code, f"{rule} ({size} mod {multiple} = {size % multiple})")]


def shard_by_blocks(problem: Problem, block: int = MX_BLOCK) -> Problem:
    """The problem with a shard of whole blocks for each tensor-parallel rank, as gpt-oss's loader makes it in 32s.

    2880 features over 4 ranks are 736, 736, 736 and 672. The problem is returned unchanged if equal shards are whole
    blocks already, if a rank would get nothing, or if the block does not divide the unsharded size.

    Args:
        problem: the layer with equal shards.
        block: features that must stay together.
    """
    whole = problem.unsharded_intermediate_size
    share = _first_shard_size(whole, problem.parallel.tp, block)
    if problem.intermediate_size % block == 0 or not share or problem.unpadded_intermediate_size:
        return problem
    return dataclasses.replace(problem, intermediate_size=share, ragged_intermediate_size=whole)


def _first_shard_size(whole: int, ranks: int, block: int) -> int:
    """The first rank's shard in whole blocks; 0 if blocks do not divide the whole, or a rank would get nothing."""
    share = round_up(-(-whole // ranks), block)
    return 0 if whole % block or share * (ranks - 1) >= whole else share


def loader_shards_by_blocks(problem: Problem) -> bool:
    """Whether the model's loader shards at blocks when equal shards would split one: gpt-oss's MXFP4."""
    return problem.scheme.name == "mxfp4" and problem.activation.interleaved


def shard_by_scale_groups(problem: Problem) -> Problem:
    """The problem with a shard of whole scale groups for each tensor-parallel rank, if equal shards would split one.

    160 features in groups of 32 over 2 ranks are 96 and 64. The problem is returned unchanged for formats other than
    integers, and if there is nothing to split or no such sharding.
    """
    group = loaded_group_size(problem)
    if problem.scheme.name != "wna16" or group == -1 or has_group_index(problem):
        return problem
    return shard_by_blocks(problem, group)


def shard_size(problem: Problem, rank: int) -> int:
    """The intermediate size that a tensor-parallel rank really holds; only the last one may hold less."""
    return min(problem.intermediate_size, problem.unsharded_intermediate_size - rank * problem.intermediate_size)


def loader_reasons(problem: Problem) -> list[Reason]:
    """Why a model's own loader gives ranks other experts than vLLM expects; empty if it does not.

    gpt-oss's loader splits the experts evenly, in every packing; vLLM's expert map gives the first ranks one more.
    Loading fails then, or, with a single expert to a rank, fills the places of two with it.
    """
    experts, ranks = problem.num_experts, problem.parallel.ep
    equal = problem.even_expert_split or problem.scheme.packing == "gpt_oss"
    if not equal or experts % ranks == 0:
        return []
    even = [size for size in range(2, ranks) if experts % size == 0]
    ways = [f"expert parallelism over {even[-1]} ranks"] if even else []
    whole = dataclasses.replace(problem, local_experts=experts)
    if any(map(is_shardable, _resharded(whole, dataclasses.replace(problem.parallel, tp=ranks, ep=1)))):
        ways.append("the same ranks without --enable-expert-parallel")
    return [
        Reason(
            "expert_parallel.loader",
            f"vLLM's loader of gpt-oss gives each of {ranks} ranks {experts // ranks} of {experts} experts, "
            f"which leaves {experts % ranks} without a rank",
            ", or ".join(ways) or "one rank",
        )
    ]


def padding_reasons(problem: Problem, works: IsViable = is_shardable) -> list[Reason]:
    """Why padded experts are not loaded here; empty where the model's code does not pad them.

    Args:
        problem: the layer on this rank.
        works: see `suggest_parallelism`.
    """
    whole, ranks, least = problem.unpadded_intermediate_size, _tensor_ranks(problem.parallel), _padded_width(problem)
    if not whole:
        return []
    return [
        Reason(
            "intermediate.padded",
            f"the model's code in vLLM pads experts below {least} columns per rank with zeros ({whole} over {ranks} "
            f"ranks: {whole // ranks}), which no backend here loads",
            suggest_parallelism(problem, works),
        )
    ]


def codes_per_word(problem: Problem) -> int:
    """Integer codes that must stay together: those of one packed word, and at least those of one byte."""
    scheme = problem.scheme
    if scheme.name != "wna16" or scheme.bits not in (4, 8):
        return 1
    return (8 if scheme.packing in ("moe_wna16", "compressed-tensors-int") else 32) // scheme.bits


def _split_packed_words(problem: Problem) -> list[Reason]:
    codes = codes_per_word(problem)
    words, what = describe_shard(problem), f"the {codes} codes in one word of the packing {problem.scheme.packing}"
    hidden = size_reasons("packing.hidden", problem.hidden_size, codes, what=what)
    return hidden + size_reasons("packing.intermediate", problem.intermediate_size, codes, words, what)


def padded_plan(problem: Problem, hidden_multiple: int = 1, intermediate_multiple: int = 1) -> ShardPlan:
    """The plan of a kernel whose tensors are zero-padded.

    Args:
        problem: the layer.
        hidden_multiple: the kernel's hidden size must be a multiple of this.
        intermediate_multiple: the kernel's intermediate size on one rank must be a multiple of this.
    """
    hidden = round_up(problem.hidden_size, hidden_multiple)
    intermediate = round_up(problem.intermediate_size, intermediate_multiple)
    notes = []
    if problem.ragged_intermediate_size:
        last = shard_size(problem, problem.parallel.tp - 1)
        notes.append(
            f"intermediate size {problem.unsharded_intermediate_size} is sharded in whole groups of "
            f"{scale_group_size(problem)}: {problem.intermediate_size} on each of {problem.parallel.tp} ranks but the "
            f"last, which has {last}"
        )
    for name, real, kernel, multiple in (
        ("hidden", problem.hidden_size, hidden, hidden_multiple),
        ("intermediate", problem.intermediate_size, intermediate, intermediate_multiple),
    ):
        if kernel != real:
            notes.append(f"{name} size {real} is zero-padded to {kernel}, the next multiple of {multiple}")
    return ShardPlan(hidden, intermediate, tuple(notes))
