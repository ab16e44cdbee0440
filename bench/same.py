"""Does an A/B of a kernel with itself say "same"? The test of the machine, and of the statistics on it.

    python -m bench.same                                       20 A/Bs of the Hopper forward, one line each
    python -m bench.same backward-sm90-bf16-d128 --times 5 --workload b2-s8192-h16

Needs a GPU. In 19 of 20 it should; a machine whose clock jumps shows here first.
"""

import argparse
from collections import Counter

from bench.run import need_gpu
from cute_attn.lab.race import ab


def main() -> None:
    """Print each outcome, and how many there are of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="forward-sm90-bf16-d128", help="a kernel")
    parser.add_argument("--times", type=int, default=20, help="how many A/Bs")
    parser.add_argument("--workload", default="b8-s2048-h16", help="sizes")
    parser.add_argument(
        "--budget", type=float, default=15, help="seconds of each, beside its first 21 rounds"
    )
    options = parser.parse_args()

    need_gpu()
    from cute_attn.lab.card import Gpu

    card, outcomes = Gpu(), Counter[str]()
    for _ in range(options.times):
        start = card.now()
        found = ab(options.name, options.name, [options.workload], budget_s=options.budget, card=card)
        (one,) = found.measured
        outcomes[one.outcome] += 1
        low, high = (100 * (value - 1) for value in (one.low, one.high))
        print(
            f"{one.outcome:10} {low:+.2f}% to {high:+.2f}%  {one.rounds} rounds, {one.void} void, "
            f"{card.now() - start:.1f} s, {one.state}",
            flush=True,
        )
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))


if __name__ == "__main__":
    main()
