"""Random functions of scores: text in the spellings that people use, over captured tensors and Python values.

Rules are text with holes: ``{f}`` a float, ``{i}`` an integer, ``{m}`` a bool, ``{c}`` and ``{n}`` Python numbers, and
``{@4}`` an index of a dimension of 4 elements. Floats stay small and away from poles.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Decisions read from bytes, two for each. 0 is the simplest decision, and also the one when bytes run out."""

    def __init__(self, data: bytes) -> None:
        self.data, self.used = data, 0

    def number(self, below: int) -> int:
        pair = self.data[self.used : self.used + 2]
        self.used += 2
        return int.from_bytes(pair, "big") % below

    def of(self, options: Sequence[T]) -> T:
        return options[self.number(len(options))]

    def one_in(self, n: int) -> bool:
        return self.number(n) == n - 1


def _rules(text: str) -> tuple[str, ...]:
    return tuple(rule.strip() for rule in text.split(";"))


LEAVES = {
    "f": _rules("""
        score; score; slopes[h]; q_idx * 0.125; table[h, {@9}]; keys[b, kv_idx]; cap; rows[q_idx];
        cube[b, h, {@5}]; halves[h, kv_idx]; halves16[q_idx % 6, {@3}]; doubles[{@7}]; temperature;
        (cap * factor); (score + pair[1]); (score * options['slope']); cube[b][h][{@5}];
        rows[kv_idx % rows.shape[0]]; table[h][{@9}]; torch.tensor({c}); strided[{@4}, b];
        keys[b][q_idx % keys.size(1)]; tables[1][h, {@3}]; table.T[{@9}, h]; table.flatten()[h * 9 + {@9}];
        (rows * 2)[q_idx]; table[:, 0][h]; named['cap']; torch.exp(slopes)[h];
        torch.linspace(0, 1, 5, device=q_idx.device)[{@5}]; holder.slopes[h]; (score * holder.factor);
        rows.max(); (score * len(pair)); table[0].sum(); torch.stack([cap, named['cap']])[{@2}]
    """),
    "i": _rules("""
        (q_idx - kv_idx); q_idx; kv_idx; h; b; (q_idx + {n}); document[b, q_idx]; lengths[b]; signed[{@6}];
        unsigned[{@8}].int(); count; (q_idx - lengths[b]); torch.zeros_like(q_idx);
        torch.arange(9, device=q_idx.device)[{@9}]; (kv_idx + table.shape[1]); document.long()[b, kv_idx]
    """),
    "m": _rules("""
        (q_idx >= kv_idx); (document[b, q_idx] == document[b, kv_idx]); kept[kv_idx]; (h == 1);
        ((q_idx - kv_idx).abs() <= {n}); (kv_idx < lengths[b]); flag; torch.logical_not(kept[kv_idx])
    """),
}
RULES = {
    "f": _rules("""
        ({f} + {f}); ({f} - {f}); ({f} * {c}); -{f}; +{f}; ({c} - {f}); torch.add({f}, {f});
        torch.tanh({f}); ({f}).tanh() * {c}; torch.sigmoid({f}); ({f}).sigmoid(); ({f} * torch.tanh({f}));
        torch.exp(-({f}).abs()); ({f}).clamp(max=2.0).exp(); torch.exp2(({f}).clamp(-3, 2));
        torch.log(({f}).abs() + 0.5); torch.log2({f} * {f} + 1); (({f}) ** 2 + 1).log(); ({f}).square();
        torch.sqrt(({f}).abs() + 0.25); (({f}).square() + 1) ** 0.5; torch.rsqrt(({f}) ** 2 + 0.5);
        ({f} / (1.5 + abs({f}))); torch.div({f}, 2 + ({f}).abs()); torch.reciprocal(({f}).abs() + 1);
        torch.where({m}, {f}, {f}); torch.where({m}, {f}, {c}); torch.where({m}, {c}, {f});
        ({f}).where({m}, {f}); torch.where({m}, {c}, 0.0); torch.clamp({f}, -1.5, {c});
        ({f}).clamp(min={c}); ({f}).clip(-2, 2); torch.clamp({f}, min=slopes[h]); torch.clamp_min({f}, -1);
        ({f}).clamp_max(1.25); torch.minimum({f}, {f}); torch.maximum({f}, {f} * 0.5); torch.abs({f});
        ({f}).abs(); abs({f}); torch.relu({f}); ({f}).relu(); torch.sign({f}) * {f}; torch.sin({f}); ({f}).cos();
        torch.neg({f}); torch.floor({f} * 3); ({f} * 2).ceil(); torch.trunc({f}); (q_idx * 0.375 // 1); ({f} % 1.5);
        ({f}) ** 3; torch.remainder({f}, -1.25); ({i}) * {c}; ({i}) / {n}; torch.tanh(({i}) / 8);
        ({i}).float() * 0.1; ({i}).to(torch.float32) * 0.05; ({i}).to(score.dtype) * 0.05;
        ({i}).double() / 16; ({m}).float(); ({i}).type_as(score) / 32; {m} * {f}; {f} * ({m});
        2.0 ** -({i} % 5); torch.pow({f}, 2); torch.mul({f}, {c}); torch.sub({f}, {f});
        ({f}).mul({c}).add({f}); torch.true_divide({f}, 3); helper({f}); partial_helper({f});
        functools.reduce(torch.add, [{f}, {f}]); sum([{f}, {f}]); ({f} if on else {f});
        ({f} * math.sqrt(factor + 1)); torch.where({m}, {f}, -1); ({f}).float(); torch.lt({f}, {f}).float();
        ({i}).abs().float().sqrt(); max(factor, {c}) * {f};
        operator.mul({f}, {c}); ({f}).true_divide({c} + 3);
        ({f}).to(torch.float64)
    """),
    "i": _rules("""
        ({i} + {i}); ({i} - {n}); ({n} - {i}); ({i} * 3); -({i}); ({i} // {n}); ({i} % {n});
        torch.div({i}, {n}, rounding_mode='floor'); torch.floor_divide({i}, {n}); ({i} % -{n});
        torch.remainder({i}, {n}); ({i} & 5); ({i} | 3); ({i} ^ {i}); ~({i}); ({i} >> 1); ({i} << 2);
        torch.bitwise_and({i}, 6); torch.bitwise_or({i}, 1); torch.bitwise_xor({i}, {i}); abs({i});
        torch.bitwise_right_shift({i}, 2); torch.bitwise_left_shift({i}, 1); torch.bitwise_not({i});
        ({i}).clamp(-3, {n}); torch.clamp({i}, max={n}); torch.minimum({i}, {i}); torch.maximum({i}, {i});
        torch.where({m}, {i}, {i}); torch.where({m}, {i}, {n}); ({f}).clamp(-9, 9).int();
        ({f}).trunc().int(); ({f}).floor().to(torch.int32); ({i}).to(torch.long); ({i}).long() // 2;
        ({m}).int(); ({m}).long(); torch.sign({i}); ({i}).square() % 11; ({i}) ** 2 % 13;
        ({i}).abs() // {n}; {m} + {i}; ({i} // -{n}); ({i}).sub({i}); ({i} + steps);
        ({i}).to(torch.int64) >> 1; (({i} > 0) & ({i} < 5)).int()
    """),
    "m": _rules("""
        ({m} & {m}); ({m} | {m}); ~({m}); ({m} ^ {m}); torch.logical_and({m}, {m}); ({i} <= {i});
        torch.logical_or({m}, {m}); torch.logical_xor({m}, {m}); ({i} < {n}); ({i} != {i}); ({i} == {n});
        ({f} > {c}); ({f} <= {f}); torch.lt({f}, {c}); torch.ge({i}, {n}); ({i}).eq({n}); ({i}).bool();
        torch.where({m}, {m}, {m}); ({m}) == ({m}); ({i} % 3).to(torch.bool); torch.greater({i}, {i});
        ({n} < {i}); ({c} >= {f}); ({m} & on); torch.logical_and({i}, {m}); torch.not_equal({i}, {n})
    """),
}
FAULTS = {
    "negative index": ("f", "table[h, -1 - {@9}]", "rows[q_idx - rows.shape[0]]"),
    "value on the host": ("f", "{f} * float(cap)", "{f} * temperature.item()", "({f} if flag else {f})"),
    "isinstance": ("f", "({f} if isinstance(score, torch.Tensor) else 0 * {f})"),
    "alias in place": (
        "f",
        "    x{k} = score + 0\n    y = x{k}\n    y += {f}",
        "    x{k} = ({f}) * 1.0 + 1\n    y = x{k}\n    y *= {c}",
    ),
    "narrow integers": (  # cast at once: vmap does not promote them with tensors of no dimensions as torch does
        "i",
        *_rules("""
            (unsigned[{@8}] * 3).int(); (2 - unsigned[{@8}]).int(); (~unsigned[{@8}]).int();
            (unsigned[{@8}] << 1).int()
        """),
    ),
    "methods of rows": ("i", *_rules("document[b].max(); document[b].long()[q_idx]; document[b].sum() % 7")),
    "16-bit casts": ("f", "({f}).half().float()", "({f}).bfloat16() * 1.0"),
    "numbers of score's dtype": (
        "f",
        *_rules("""
            torch.tanh(torch.full_like(score, {c})); torch.tanh(score.new_tensor({c})); torch.sign({f});
            torch.where({m}, {f}, torch.zeros_like(score)); torch.zeros_like({f}) + {f}
        """),
    ),
    "bytes above 127": ("i", "large[{@8}].int()"),
}
"""Faults found before: the kind of the rules, and the rules."""
DRAWN = tuple(x for x in FAULTS if x not in ("methods of rows", "16-bit casts"))
"""Rules that are always drawn; others are refused, or differ from vmap's rounding."""
RETURNS = _rules("""
    score + {f}; {f}; score + torch.tanh({f}); score * torch.sigmoid({f}); torch.where({m}, score, {f});
    torch.where({m}, score, -torch.inf); torch.where({m}, score + {f}, float('-inf')); score - abs({i}) * 0.1;
    {f} + score * 0.5
""")
LINES = (
    ("    x{k} = {f}", "f"),
    ("    n{k} = {i}", "i"),
    ("    m{k} = {m}", "m"),
    ("    x{k} = score * 1.5\n    x{k} += {f}", "f"),
    ("    x{k} = score\n    for step in range(steps):\n        x{k} = x{k} + step * {f}", "f"),
    ("    if on and factor > 0.5:\n        x{k} = {f}\n    else:\n        x{k} = {f}", "f"),
    ("    n{k}, x{k} = {i}, {f}", "f"),
    ("    inner = lambda x: x + {f}\n    x{k} = inner({f})", "f"),
)
FORMS = ("closure", "globals", "partial", "object", "method", "defaults", "module")
"""Places in which a function keeps captured values."""


_NOT_ARGUMENTS = re.compile(
    r"\b(on|pair|options|tables|named|holder|flag|item|float\(cap|max\(|T|flatten|sum|stack|linspace|arange|long)\b"
    r"|range|rows \* 2|:, 0|exp\(slopes|math"
)
"""Operations that functions cannot apply to tensors and numbers that are passed as arguments of the call."""


def draw_body(choices: Choices, kind: str, faults: Sequence[str] = DRAWN, arguments: bool = False) -> str:
    """Lines of a function that returns a score ("f") or a bool ("m"). arguments: captured values are its arguments."""
    made = Body(choices, "score" if kind == "f" else "mask", faults, arguments)
    lines = [made.line(k) for k in range(choices.of((0, 1, 2, 3)))]
    text = choices.of(RETURNS) if kind == "f" else "{m}"
    return "\n".join([*lines, f"    return {made.filled(text, choices.of((1, 2, 3)))}"])


class Body:
    def __init__(
        self, choices: Choices, what: str, faults: Sequence[str] = (), arguments: bool = False
    ) -> None:
        self.choices, self.what, self.arguments = choices, what, arguments
        self.leaves = {kind: [x for x in LEAVES[kind] if self._has(x)] for kind in LEAVES}
        self.rules = {kind: [x for x in RULES[kind] if self._has(x)] for kind in RULES}
        self.lines = [x for x in LINES if self._has(x[0])]
        for fault in faults:
            kind, *rules = FAULTS[fault]
            self.rules[kind] += [x for x in rules if self._has(x) and x[0] != " "] * 2
            self.lines += [(x, kind) for x in rules if self._has(x) and x[0] == " "]

    def _has(self, rule: str) -> bool:
        if self.arguments and _NOT_ARGUMENTS.search(rule):
            return False
        return self.what == "score" or "score" not in rule

    def line(self, k: int) -> str:
        text, kind = self.choices.of(self.lines)
        made = self.filled(text.replace("{k}", str(k)), self.choices.of((1, 2, 3)))
        self.leaves[kind] += [f"{'x' if kind == 'f' else 'n' if kind == 'i' else 'm'}{k}"] * 4
        return made

    def filled(self, text: str, depth: int) -> str:
        return re.sub(r"\{(\w|@\d*)\}", lambda hole: self._hole(hole[1], depth), text)

    def _hole(self, kind: str, depth: int) -> str:
        if kind == "c":
            return self.choices.of(
                ("0.5", "0.75", "-0.3", "1", "2", "1e-3", *("factor", "pair[0]") * (not self.arguments))
            )
        if kind == "n":
            return self.choices.of(("2", "3", "5", "7", "16", "steps"))
        if kind[0] == "@":
            return self._index(int(kind[1:] or 1), depth)
        rules = self.leaves[kind] if depth <= 0 or self.choices.number(5) == 0 else self.rules[kind]
        return self.filled(self.choices.of(rules), depth - 1)

    def _index(self, n: int, depth: int) -> str:
        form = self.choices.of(
            ("({i}).clamp(0, %d)", "({i}) %% %d", "torch.clamp({i}, 0, %d)", "abs({i}) %% %d", "%d")
        )
        bound = n - 1 if "clamp" in form or form == "%d" else n
        index = self.filled(form % bound, min(depth, 1) - 1)
        return f"({index}).long()" if "signed" in index else index  # torch accepts no signed integers here
