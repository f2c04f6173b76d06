"""vLLM's options of parallelism, and what they make of a MoE layer: its ranks, its sharding, its all-to-all."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.field_checks import check_fields
from ..core.problem import Parallel
from ..errors import SettingError
from ..releases.all2all import DEFAULT_ALL2ALL, is_batched


@dataclass(frozen=True, slots=True)
class Ranks:
    """The options, as vLLM's ``FusedMoEParallelConfig.make`` takes them.

    MoE layers are distributed over all ranks, tensor- and data-parallel ones: their experts with expert parallelism,
    else their intermediate size. All other layers are sharded over the tensor-parallel ranks only.

    Attributes:
        tp: ``--tensor-parallel-size``.
        dp: ``--data-parallel-size``.
        ep: ``--enable-expert-parallel``.
        all2all: ``--all2all-backend``, from `releases.all2all.effective_all2all`.
    """

    tp: int = 1
    dp: int = 1
    ep: bool = False
    all2all: str = DEFAULT_ALL2ALL

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def total(self) -> int:
        """Tensor- and data-parallel ranks together."""
        return self.tp * self.dp

    @property
    def spreads_experts(self) -> bool:
        """Whether ranks hold different experts."""
        return self.ep and self.total > 1

    @property
    def exchanges_tokens(self) -> bool:
        """Whether the all-to-all runs: with expert parallelism over data-parallel ranks."""
        return self.ep and self.dp > 1

    @property
    def parallel(self) -> Parallel:
        """The same in the vocabulary of a `Problem`, with experts in order."""
        batched = self.exchanges_tokens and is_batched(self.all2all)
        return Parallel(
            tp=1 if self.spreads_experts else self.total,
            ep=self.total if self.spreads_experts else 1,
            dp=self.dp,
            format="batched" if batched else "standard",
        )

    def check(self) -> None:
        """Refuses numbers of ranks below one.

        Raises:
            SettingError: there are none.
        """
        for count, option in ((self.tp, "--tp"), (self.dp, "--dp")):
            if count < 1:
                raise SettingError(f"{count} ranks are not possible", "Give 1 or more", option)

    def __str__(self) -> str:
        if self.total == 1:
            return "one rank"
        kind = "expert" if self.spreads_experts else "tensor"
        words = f"{kind} parallelism over {self.total} ranks"
        if self.dp == 1:
            return words
        words += f" (TP {self.tp} x DP {self.dp})"
        if self.exchanges_tokens:
            words += f", all-to-all {self.all2all}"
        return words
