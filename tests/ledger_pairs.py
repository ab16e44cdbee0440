"""Pairs of tiles of which bench/notes.md says which is faster on an H200, to hold the static rank against."""

from dataclasses import dataclass

from cute_attn.benchmark.workload import Workload, of_traits
from cute_attn.traits import Traits


@dataclass(frozen=True)
class Pair:
    """A faster tile and a slower one.

    Attributes:
        what: the row of the ledger.
        name: the traits.
        faster, slower: fields that change the default tile.
        seqlen: of the workload, if ``workload`` is None.
        right: whether the static rank has the faster one; if not, ``cute_attn.lab.rank`` says what it does not model.
        held_out: not looked at while the model was made.
        quick: built in every run of the tests; the others with ``--every-default``.
    """

    what: str
    name: str
    faster: str
    slower: str
    seqlen: int = 8192
    workload: Workload | None = None
    right: bool = True
    held_out: bool = False
    quick: bool = False

    @property
    def load(self) -> Workload:
        return self.workload or of_traits(Traits.parse(self.name), self.seqlen)


FORWARD = "forward-sm90-bf16"
ONE_WARPGROUP = (
    "tile_m=64,tile_n=64,num_stages=3,q_in_regs=false,rescale_threshold=8,share_qo_smem=true,blocks_per_sm=2"
)
DECODE = Workload(16, 1, 32, 128, nheads_kv=8, seqlen_k=8192)
THREE_BLOCKS = "tile_m=64,tile_n=64,num_stages=2,blocks_per_sm=3"

PAIRS = [
    Pair(
        "Hopper forward 9, d128 causal: 690 against 650",
        f"{FORWARD}-d128-causal",
        "",
        "speculative=false",
    ),
    Pair("Hopper forward 5 and 6, d128: +3%", f"{FORWARD}-d128-causal", "", "q_in_regs=false"),
    Pair(
        "Hopper forward 14, 192 x 80: -6%",
        f"{FORWARD}-d128-causal",
        "",
        "tile_m=192,tile_n=80,q_in_regs=false",
    ),
    Pair(
        "Hopper forward 14, three stages of 96: -14%",
        f"{FORWARD}-d128-causal",
        "",
        "tile_n=96,num_stages=3,share_qo_smem=true",
    ),
    Pair("Hopper forward 14, 144 keys: -7 to -10%", f"{FORWARD}-d128-causal", "", "tile_n=144"),
    Pair("Hopper forward 14, 128 x 128 at d64: -17%", f"{FORWARD}-d64-causal", "", "tile_m=128"),
    Pair(
        "Hopper forward 15, s512 d64 causal: 276 against 207",
        f"{FORWARD}-d64-causal",
        THREE_BLOCKS,
        "",
        512,
        quick=True,
    ),
    Pair("Hopper forward 19, d64: 381 against 228", f"{FORWARD}-d64-bias_bf16", "", "bias_stages=0", 2048),
    Pair(
        "Hopper forward 20: 132 us against 317",
        f"{FORWARD}-d128",
        f"{ONE_WARPGROUP},pack_heads=4",
        ONE_WARPGROUP,
        workload=DECODE,
    ),
    Pair(
        "Hopper forward 9, off at d256: 742 against 733",
        f"{FORWARD}-d256",
        "",
        "speculative=true",
        right=False,
    ),
    Pair(
        "Ampere forward 7, 16 rows a warp at d64: -10%",
        "forward-sm80-bf16-d64-causal",
        "",
        "num_warps=8",
        quick=True,
    ),
    Pair(
        "Hopper backward 42, d64: 564 against 448", "backward-sm90-bf16-d64", "", "dq_bulk=false", right=False
    ),
    Pair(
        "Hopper backward 7, 64 queries at d64: 403 against 477",
        "backward-sm90-bf16-d64-causal",
        "",
        "tile_m=64",
    ),
    Pair(
        "Hopper backward 47, d64: 403 against 334",
        "backward-sm90-bf16-d64-bias_bf16",
        "",
        "tile_m=64,dq_bulk=true,staggered=false",
        2048,
    ),
    Pair(
        "Ampere backward 1 and 2, d64: 349 against 317",
        "backward-sm80-bf16-d64",
        "",
        "sdp_unroll=2,dq_unroll=2",
    ),
    Pair(
        "Hopper backward 28, d128: 398 against 382",
        "backward-sm90-bf16-d128-causal-dropout",
        "",
        "mask_warps=0",
        2048,
        held_out=True,
    ),
    Pair(
        "Ampere backward 10, d128: 339 against 299",
        "backward-sm80-bf16-d128",
        "",
        "tile_n=64,num_warps=4,sdp_warps_m=2,dkv_warps_m=2,dq_warps_m=2,stages_q=1,stages_do=1",
        held_out=True,
    ),
    Pair(
        "Ampere backward 7, 16 queries at a time at d64: 346 against 313",
        "backward-sm80-bf16-d64-causal",
        "",
        "queries_at_once=16",
        held_out=True,
    ),
]
