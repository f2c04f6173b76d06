"""Shard arithmetic: what a tensor-parallel cut leaves on a rank, whether it fits, and which other cut would.

vLLM cuts the intermediate size by the tensor-parallel size and gives every rank whole experts under expert parallelism;
the hidden size is never cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from .decision import Plan, Reason
from .problem import MX_BLOCK, Problem

_HALVED = ("moe_wna16", "gptq", "gptq_v2", "awq")
"""Packings whose groups are made smaller where they do not survive a cut."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def scale_group(problem: Problem) -> int:
    """Input features that share one scale in the second product on this rank; 1 where no group can be cut."""
    if problem.scheme.name in ("mxfp8", "mxfp4"):
        return MX_BLOCK
    return max(loaded_group(problem), 1)


def loaded_group(problem: Problem) -> int:
    """Input features that share one scale in the tensors that vLLM loads; -1 for one scale per output row.

    This is the checkpoint's group but for GPTQ's and AWQ's files: as vLLM's MoeWNA16 does it, to which stock vLLM falls
    back with them, the group is halved, and the scales are repeated, until it divides both sizes, but not below 32.
    Groups of features that are no neighbours cannot be halved.
    """
    group = problem.scheme.group_size
    if problem.scheme.packing in _HALVED and not has_order(problem):
        while group % 2 == 0 and group >= 64 and (problem.hidden_size % group or problem.intermediate_size % group):
            group //= 2
    return group


def group_in_words(problem: Problem) -> str:
    """That the checkpoint's scale groups are loaded as smaller ones, and why; "" where they are not."""
    group, loaded = problem.scheme.group_size, loaded_group(problem)
    if loaded == group:
        return ""
    size = problem.intermediate_size if problem.intermediate_size % group else problem.hidden_size
    return (
        f"scale groups of {group} are loaded as groups of {loaded}, because {size} features are no multiple of {group}"
    )


def has_order(problem: Problem) -> bool:
    """Whether the input features of the layer's matrices are reordered when they are multiplied.

    With act order ``static`` the groups are of neighbours, and only the order of quantising was another; with one scale
    per output row, no order changes anything.
    """
    return problem.scheme.act_order == "group" and problem.scheme.group_size != -1


def has_group_index(problem: Problem) -> bool:
    """Whether the second product needs to be told the group of each of its input features.

    With act order ``group`` a group's features are anywhere, so a rank that holds some of the features holds some of
    every group: it needs the scales of all groups, and their number in the shard is not the group's size.
    """
    return has_order(problem) and problem.parallel.tp > 1


def scale_columns(problem: Problem) -> tuple[int, int]:
    """Scales per output row of the first and of the second product on this rank."""
    group = loaded_group(problem)
    if group == -1:
        return 1, 1
    inner = problem.full_intermediate_size if has_group_index(problem) else problem.intermediate_size
    return problem.hidden_size // group, inner // group


def cut_in_words(problem: Problem) -> str:
    """The shard's arithmetic: ``640 / 2 = 320``, or the size itself where nothing is cut."""
    if problem.parallel.tp == 1:
        return str(problem.intermediate_size)
    if problem.whole_intermediate_size:
        return f"{problem.intermediate_size}, the largest share of {problem.full_intermediate_size} in whole groups,"
    return f"{problem.full_intermediate_size} / {problem.parallel.tp} = {problem.intermediate_size}"


Works = Callable[[Problem], bool]
"""Whether a layer that is cut otherwise would do."""


def ways_out(problem: Problem, works: Works) -> str:
    """Parallel settings, and shares of whole groups, under which the layer would do, as a remedy; may be empty.

    Of tensor-parallel sizes only those are asked about that divide the present one: heads and everything else that is
    cut as well come out even then.

    Args:
        problem: the layer on this rank.
        works: asked about the same layer under other settings. It should know every rule of whoever refuses: a way out
            that another rule closes is none.
    """
    ranks, full = problem.parallel.tp, problem.full_intermediate_size
    if ranks == 1:
        return ""
    smaller = (size for size in range(ranks - 1, 0, -1) if ranks % size == 0)
    ways = [f"TP {size}" for size in smaller if any(map(works, _cut_over(problem, size)))][:1]
    local = -(-problem.num_experts // ranks)
    spread = dataclasses.replace(
        problem,
        intermediate_size=full,
        whole_intermediate_size=0,
        local_experts=local,
        parallel=dataclasses.replace(problem.parallel, tp=1, ep=ranks),
    )
    if problem.num_experts >= ranks and works(spread):
        ways.append(f"expert parallelism over the {ranks} ranks (--enable-expert-parallel)")
    words = f"{' or '.join(ways)} would work" if ways else ""
    ragged = in_whole_groups(problem)
    if ragged is not problem and works(ragged):
        words += (
            f"{'; so ' if ways else ''}would ragged_shards=1, with {ragged.intermediate_size} on the first rank "
            f"and {share_of(ragged, ranks - 1)} on the last"
        )
    return words


def _cut_over(problem: Problem, ranks: int) -> Iterator[Problem]:
    """The layer on one of fewer tensor-parallel ranks."""
    full, parallel = problem.full_intermediate_size, dataclasses.replace(problem.parallel, tp=ranks)
    if full % ranks == 0:
        even = dataclasses.replace(
            problem, intermediate_size=full // ranks, whole_intermediate_size=0, parallel=parallel
        )
        yield in_whole_groups(even) if problem.whole_intermediate_size else even
    share = _largest_share(full, ranks, MX_BLOCK)
    if _cut_in_blocks(problem) and share:
        yield dataclasses.replace(problem, intermediate_size=share, whole_intermediate_size=full, parallel=parallel)


def survives(problem: Problem) -> bool:
    """Whether scale groups and packed words survive the cut, and every rank gets its experts."""
    return not (_broken_groups(problem) or _broken_words(problem) or loader_reasons(problem))


def group_reasons(problem: Problem, works: Works = survives) -> list[Reason]:
    """Why the checkpoint's scale groups do not survive the cut; empty when they do.

    A rank's scales are a slice of the checkpoint's: they begin and end with a group. With act order ``group`` every
    rank holds all scales, and only the whole size must be a multiple.

    Args:
        problem: the layer on this rank.
        works: see `ways_out`.
    """
    return _with_ways_out(_broken_groups(problem), problem, works)


def _with_ways_out(broken: list[Reason], problem: Problem, works: Works) -> list[Reason]:
    """The reasons, those of the size that is cut with what would help."""
    cut = [reason for reason in broken if reason.code.endswith(".intermediate")]
    if not cut:
        return broken
    remedy = ways_out(problem, works)
    return [dataclasses.replace(reason, remedy=remedy) if reason in cut else reason for reason in broken]


def _broken_groups(problem: Problem) -> list[Reason]:
    group, tp = scale_group(problem), problem.parallel.tp
    whole = has_group_index(problem)
    inner = problem.full_intermediate_size if whole else problem.intermediate_size
    sizes = (
        ("hidden", problem.hidden_size, str(problem.hidden_size)),
        ("intermediate", inner, str(inner) if whole or tp == 1 else cut_in_words(problem)),
    )
    return [
        Reason(
            f"group.{name}",
            f"{name} size {words} is no multiple of the scale group {group} ({size} mod {group} = {size % group})",
        )
        for name, size, words in sizes
        if size % group
    ]


def in_whole_blocks(problem: Problem, block: int = MX_BLOCK) -> Problem:
    """The problem with a share of whole blocks for each tensor-parallel rank, as gpt-oss's loader cuts it in 32.

    2880 features over 4 ranks are 736, 736, 736 and 672. The problem as it is where equal shares are whole already,
    and where a rank would get nothing or blocks do not divide the whole: then it is refused by its numbers.

    Args:
        problem: one rank's share of equal ones.
        block: features that no cut may separate.
    """
    whole = problem.full_intermediate_size
    share = _largest_share(whole, problem.parallel.tp, block)
    if problem.intermediate_size % block == 0 or not share:
        return problem
    return dataclasses.replace(problem, intermediate_size=share, whole_intermediate_size=whole)


def _largest_share(whole: int, ranks: int, block: int) -> int:
    """The first rank's share of whole blocks; 0 where blocks do not divide the whole, or a rank would get nothing."""
    share = round_up(-(-whole // ranks), block)
    return 0 if whole % block or share * (ranks - 1) >= whole else share


def _cut_in_blocks(problem: Problem) -> bool:
    """Whether the layer's loader cuts between blocks when equal shares would split one: gpt-oss's MXFP4."""
    return problem.scheme.name == "mxfp4" and problem.activation.interleaved


def in_whole_groups(problem: Problem) -> Problem:
    """The problem with a share of whole scale groups for each tensor-parallel rank, where equal shares would split one.

    640 features in groups of 128 over 2 ranks are 384 and 256. The problem as it is for other formats than integers,
    and where there is nothing to split or no such share.
    """
    group = loaded_group(problem)
    if problem.scheme.name != "wna16" or group == -1 or has_group_index(problem):
        return problem
    return in_whole_blocks(problem, group)


def share_of(problem: Problem, rank: int) -> int:
    """Features between the two products that a tensor-parallel rank really has."""
    return min(problem.intermediate_size, problem.full_intermediate_size - rank * problem.intermediate_size)


def loader_reasons(problem: Problem) -> list[Reason]:
    """Why a model's own loader does not give ranks the experts that vLLM expects there; empty where it does.

    gpt-oss's cuts them into equal parts, in every packing, where vLLM's map of experts gives the first ranks one more.
    """
    experts, ranks = problem.num_experts, problem.parallel.ep
    equal = problem.equal_experts or problem.scheme.packing == "gpt_oss"
    if not equal or experts % ranks == 0:
        return []
    even = [size for size in range(2, ranks) if experts % size == 0]
    return [
        Reason(
            "expert_parallel.loader",
            f"vLLM's loader of gpt-oss gives each of {ranks} ranks {experts // ranks} of {experts} experts, "
            f"which leaves {experts % ranks} to nobody",
            f"expert parallelism over {even[-1]} ranks, or tensor parallelism" if even else "tensor parallelism",
        )
    ]


def codes_per_word(problem: Problem) -> int:
    """Integer codes that no cut may separate: those of one packed word, and at least those of one byte."""
    scheme = problem.scheme
    if scheme.name != "wna16" or scheme.bits not in (4, 8):
        return 1
    return (8 if scheme.packing in ("moe_wna16", "compressed-tensors-int") else 32) // scheme.bits


def packing_reasons(problem: Problem, works: Works = survives) -> list[Reason]:
    """Why the packed words of integer codes do not survive the cut; empty when they do.

    Some packings put the codes of neighbouring input features into one word, some those of neighbouring rows, and zero
    points are always packed by rows: both sizes must be whole words in all of them.

    Args:
        problem: the layer on this rank.
        works: see `ways_out`.
    """
    return _with_ways_out(_broken_words(problem), problem, works)


def _broken_words(problem: Problem) -> list[Reason]:
    codes = codes_per_word(problem)
    sizes = (
        ("hidden", problem.hidden_size, str(problem.hidden_size)),
        ("intermediate", problem.intermediate_size, cut_in_words(problem)),
    )
    return [
        Reason(
            f"packing.{name}",
            f"{name} size {words} is no multiple of the {codes} codes in one word of the packing "
            f"{problem.scheme.packing} ({size} mod {codes} = {size % codes})",
        )
        for name, size, words in sizes
        if size % codes
    ]


def padded(problem: Problem, hidden_multiple: int = 1, intermediate_multiple: int = 1) -> Plan:
    """The plan of a kernel whose tensors are zero-padded to multiples.

    Args:
        problem: the layer.
        hidden_multiple: what the kernel wants the hidden size to be a multiple of.
        intermediate_multiple: the same for the intermediate size of one rank.
    """
    hidden = round_up(problem.hidden_size, hidden_multiple)
    intermediate = round_up(problem.intermediate_size, intermediate_multiple)
    notes = []
    if problem.whole_intermediate_size:
        last = share_of(problem, problem.parallel.tp - 1)
        notes.append(
            f"intermediate size {problem.full_intermediate_size} is cut in whole groups of {scale_group(problem)}: "
            f"{problem.intermediate_size} on each of {problem.parallel.tp} ranks but the last, which has {last}"
        )
    for name, real, kernel, multiple in (
        ("hidden", problem.hidden_size, hidden, hidden_multiple),
        ("intermediate", problem.intermediate_size, intermediate, intermediate_multiple),
    ):
        if kernel != real:
            notes.append(f"{name} size {real} is zero-padded to {kernel}, the next multiple of {multiple}")
    return Plan(hidden, intermediate, tuple(notes))
