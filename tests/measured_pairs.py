"""Pairs of tiles with the faster one on an H200, from bench/history.md, for checking the static rank."""

from dataclasses import dataclass

from cute_attn.lab.benchmark.workload import Workload, of_traits
from cute_attn.traits import Traits


@dataclass(frozen=True)
class Pair:
    """A faster tile and a slower one.

    Attributes:
        what: the row of bench/notes.md.
        name: the traits.
        faster: the tile, by its fields that matter.
        slower: what it changes.
        seqlen: of the workload, if ``workload`` is None.
        right: whether the static rank has the faster one; if not, ``cute_attn.lab.rank`` says what it does not model.
        quick: built in every run of the tests; the others with ``--every-default``.
    """

    what: str
    name: str
    faster: str
    slower: str
    seqlen: int = 8192
    workload: Workload | None = None
    right: bool = True
    quick: bool = False

    @property
    def tiles(self) -> tuple[str, str]:
        """The faster and the slower tile."""
        fields = dict(item.split("=") for item in f"{self.faster},{self.slower}".split(","))
        return self.faster, ",".join(map("=".join, fields.items()))

    @property
    def load(self) -> Workload:
        """The workload that was timed, or one like it."""
        return self.workload or of_traits(Traits.parse(self.name), self.seqlen)


FORWARD, BACKWARD = "forward-sm90-bf16", "backward-sm90-bf16"
# Whole tiles: defaults change.
D64 = "tile_m=192,tile_n=128,num_stages=3,speculative=true"
D128 = "tile_m=128,tile_n=128,num_stages=2,q_in_regs=true,rescale_threshold=8,speculative=true,share_qo_smem=false"
D256 = "tile_m=128,tile_n=80,num_stages=2,rescale_threshold=8,share_qo_smem=true,speculative=false"
BIAS = "tile_m=192,tile_n=96,num_stages=3,bias_stages=2,speculative=true"
ONE_WARPGROUP = (
    "tile_m=64,tile_n=64,num_stages=3,q_in_regs=false,rescale_threshold=8,share_qo_smem=true,blocks_per_sm=2"
)
THREE_BLOCKS = "tile_m=64,tile_n=64,num_stages=2,blocks_per_sm=3"
AMPERE = "tile_m=128,tile_n=96,num_warps=4,num_stages=2,qk_unroll=0"
BACK = "tile_m=128,tile_n=128,dq_bulk=true,staggered=false"
BACK_BIAS = "tile_m=128,tile_n=128,dq_bulk=false,staggered=true,bias_stages=2"
BACK_DROPOUT = "tile_m=64,tile_n=128,dq_bulk=false,mask_warps=3"
AMPERE_BACK = "tile_m=64,tile_n=128,num_warps=4,p_in_regs=true,queries_at_once=32,sdp_unroll=0,dq_unroll=0"
AMPERE_BACK_D128 = (
    "tile_m=64,tile_n=128,num_warps=8,sdp_warps_m=2,dkv_warps_m=4,dq_warps_m=2,sdp_unroll=0,dq_unroll=0"
)
DECODE = Workload(16, 1, 32, 128, nheads_kv=8, seqlen_k=8192)

PAIRS = [
    Pair("Hopper forward 9, d128 causal: 690 against 650", f"{FORWARD}-d128-causal", D128, "speculative=false"),
    Pair("Hopper forward 5 and 6, d128: +3%", f"{FORWARD}-d128-causal", D128, "q_in_regs=false"),
    Pair("Hopper forward 14, 192 x 80: -6%", f"{FORWARD}-d128-causal", D128, "tile_m=192,tile_n=80,q_in_regs=false"),
    Pair("Hopper forward 14, three stages of 96: -14%", f"{FORWARD}-d128-causal", D128,
        "tile_n=96,num_stages=3,share_qo_smem=true"),
    Pair("Hopper forward 14, 144 keys: -7 to -10%", f"{FORWARD}-d128-causal", D128, "tile_n=144"),
    Pair("Hopper forward 14, 128 x 128 at d64: -17%", f"{FORWARD}-d64-causal", D64, "tile_m=128"),
    Pair("Hopper forward 15, s512 d64 causal: 276 against 207", f"{FORWARD}-d64-causal", THREE_BLOCKS,
        f"{D64},blocks_per_sm=1", 512, quick=True),
    Pair("Hopper forward 19, d64: 381 against 228", f"{FORWARD}-d64-bias_bf16", BIAS, "bias_stages=0", 2048),
    Pair("Hopper forward 20: 132 us against 317", f"{FORWARD}-d128", f"{ONE_WARPGROUP},pack_heads=4", "pack_heads=1",
        workload=DECODE),
    Pair("Hopper forward 9, off at d256: 742 against 733", f"{FORWARD}-d256", D256, "speculative=true", right=False),
    Pair("Ampere forward 7, 16 rows a warp at d64: -10%", "forward-sm80-bf16-d64-causal", AMPERE, "num_warps=8"),
    Pair("Hopper backward 42, d64: 564 against 448", f"{BACKWARD}-d64", BACK, "dq_bulk=false", right=False),
    Pair("Hopper backward 7, 64 queries at d64: 403 against 477", f"{BACKWARD}-d64-causal", BACK, "tile_m=64"),
    Pair("Hopper backward 47, d64: 403 against 334", f"{BACKWARD}-d64-bias_bf16", BACK_BIAS,
        "tile_m=64,dq_bulk=true,staggered=false", 2048),
    Pair("Ampere backward 1 and 2, d64: 349 against 317", "backward-sm80-bf16-d64", AMPERE_BACK,
        "sdp_unroll=2,dq_unroll=2"),
    Pair("Hopper backward 28, d128: 398 against 382", f"{BACKWARD}-d128-causal-dropout", BACK_DROPOUT, "mask_warps=0",
        2048),
    Pair("Ampere backward 10, d128: 339 against 299", "backward-sm80-bf16-d128", AMPERE_BACK_D128,
        "tile_n=64,num_warps=4,sdp_warps_m=2,dkv_warps_m=2,dq_warps_m=2,stages_q=1,stages_do=1"),
    Pair("Ampere backward 7, 16 queries at a time at d64: 346 against 313", "backward-sm80-bf16-d64-causal",
        AMPERE_BACK, "queries_at_once=16"),
]  # fmt: skip
