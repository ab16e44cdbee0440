"""The commands of the laboratory that need no GPU: what they refuse, in one sentence each."""

from tests import processes

NAME = "forward-sm90-bf16-d128-causal"
WRONG = {
    f"ab {NAME} --tile a --tile b --peer fa4": "B is given more than once; accepted: one of NAME2",
    f"ab {NAME} --peer fa5": "--peer is 'fa5'; accepted: fa2, mem_efficient,",
    f"ab {NAME} --workload large": "workload has 'large'; accepted: bBATCH",
    f"tune {NAME}": "there is no GPU; --static (static_only=True) ranks without one",
    f"tune {NAME} tile_q=3": "space has 'tile_q'; accepted: fields of ForwardSm90Tile (tile_m, tile_n,",
    f"tune {NAME} num_stages=9|10": "all 2 tiles were declined: 2 need more shared memory than sm90 has",
}


def test_wrong_calls():
    done = processes.run_at_once([("-m", "cute_attn", *command.split()) for command in WRONG])
    for command, one in zip(WRONG, done, strict=True):
        assert one.returncode == 2 and one.stdout == "", command
        assert one.stderr.startswith("error: ") and one.stderr.count("\n") == 1, one.stderr
        assert WRONG[command] in one.stderr
