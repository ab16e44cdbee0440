"""All epilogues of one kernel, in the order of application."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float16, Float32, Int32

from cute_attn.device.math import LOG2_E
from cute_attn.device.score_tile import Band, ScoreContext, ScoreMap, ScoreTile
from cute_attn.device.seqlen import SeqlenInfo, Seqlens
from cute_attn.epilogues.alibi import Alibi
from cute_attn.epilogues.base import Epilogue
from cute_attn.epilogues.bias import Bias
from cute_attn.epilogues.dropout import Dropout, DropoutState
from cute_attn.epilogues.inputs import ScoreInputs
from cute_attn.epilogues.mask import Mask
from cute_attn.epilogues.maxima import Maxima, MaximaState
from cute_attn.epilogues.names import user_epilogue
from cute_attn.epilogues.sinks import Sinks
from cute_attn.epilogues.softcap import Softcap
from cute_attn.epilogues.tree import Tree
from cute_attn.traits import Traits
from cute_attn.work.block_range import BlockRange, divides


@cute.jit
def run_if(condition: Boolean, action: Constexpr) -> None:
    """Call ``action`` if the condition holds; the action may change only registers or memory."""
    if condition:
        action()


@dataclass(frozen=True)
class ScoreState:
    """The epilogues' states of one work tile."""

    band: Band
    modifiers: tuple
    dropout: DropoutState | None
    maxima: MaximaState | None = None


@dataclass(frozen=True)
class EpilogueChain:
    """The steps between both products.

    ``modifiers`` change scores, the mask hides keys, ``maxima`` are noted; sinks join the softmax's sums; dropout
    changes P.
    """

    mask: Mask
    modifiers: tuple[Epilogue, ...]
    dropout: Dropout | None
    softcap: bool
    top_left: bool
    sinks: Sinks | None = None
    differentiable: bool = False  # in a kernel of derivatives: ``forward`` returns values for ``backward``
    maxima: Maxima | None = None
    visits_lists: bool = False  # only listed blocks; those without a mask leave out the lists' epilogue
    in_order: bool = False  # lists are those of a cache

    @staticmethod
    def of(traits: Traits, tile: Any = None) -> "EpilogueChain":
        """The chain for ``traits``: softcap, ALiBi, bias, tree, user epilogues in their order, mask, dropout, sinks.

        tile: the tile of a kernel that can visit only listed blocks. The chain does so if a listed block is a whole
        number of the tile's blocks. None for other kernels.

        Raises:
            ValueError: no epilogue is registered under one of the names in ``traits``.
            NotImplementedError: the kernel computes derivatives, and a user's epilogue has no backward.
        """
        reason = EpilogueChain.decline(traits)
        if reason:
            raise NotImplementedError(reason)
        derivatives = traits.differentiates
        slopes = Float32 if traits.dtype == "fp32" or traits.op == "jvp" else Float16
        modifiers: list[Epilogue] = []
        if traits.softcap:
            modifiers.append(Softcap(slopes if derivatives else None))
        if traits.alibi:
            modifiers.append(Alibi())
        if traits.bias:
            tangent = traits.bias_tangent
            ahead = (
                tangent
                and traits.bias != "fp32"
                and not (traits.softcap or traits.epilogues or traits.dropout)
            )
            modifiers.append(Bias(traits.bias, traits.bias_grad, traits.op == "kvcache", tangent, ahead))
        if traits.tree:
            modifiers.append(Tree())
        modifiers += [user_epilogue(name).of(traits) for name in traits.epilogues]
        dropout = Dropout(traits.dropout, traits.varlen) if traits.dropout else None
        sinks = Sinks(traits.sinks, traits.sinks_tangent) if traits.sinks else None
        listed = any(m.lists_blocks for m in modifiers)
        in_order = traits.op == "kvcache"
        alone = not (traits.mask or traits.seqused_q or traits.seqused_k)
        # Of a list in order, bounds leave a range; but leftpad moves keys against blocks.
        alone = traits.split in ("", "fixed") and not traits.leftpad if in_order else alone
        visits = listed and alone and tile is not None and divides(tile)
        if visits:
            modifiers = [m.visiting() if m.lists_blocks else m for m in modifiers]
        maxima = Maxima(traits.varlen) if traits.max_scores else None
        of_traits = (traits.softcap, traits.top_left, sinks, derivatives, maxima)
        return EpilogueChain(Mask.of(traits), tuple(modifiers), dropout, *of_traits, visits, in_order)

    @staticmethod
    def decline(traits: Traits) -> str | None:
        """The reason why no kernel supports the epilogues of ``traits``, or None; for ``supports`` of kernels."""
        if not traits.differentiates:
            return None
        missing = [name for name in traits.epilogues if not user_epilogue(name).differentiable()]
        if not missing:
            return None
        return f"epilogue {missing[0]!r} has no backward: a forward kernel can use it, no backward can"

    @property
    def _parts(self) -> tuple:
        return (*self._begun_parts, *((self.sinks,) if self.sinks else ()))

    @property
    def _begun_parts(self) -> tuple:
        """The epilogues that have a state per work tile; dropout is last."""
        last = (part for part in (self.maxima, self.dropout) if part)
        return (self.mask, *self.modifiers, *last)

    @property
    def may_mask_rows(self) -> bool:
        """True if modifiers, even without the mask, can set all scores of a row to -inf."""
        return any(not isinstance(m, Softcap | Alibi) for m in self.modifiers)

    @property
    def may_be_large(self) -> bool:
        """True if a modifier can make scores so large that fp32 loses all digits of Q K^T."""
        return any(not (isinstance(m, Softcap | Alibi | Tree) or m.lists_blocks) for m in self.modifiers)

    @property
    def has_bias(self) -> bool:
        """True with a bias: :meth:`forward` then leaves the scores themselves in the accumulator."""
        return any(isinstance(m, Bias) for m in self.modifiers)

    def scale_log2(self, score_scale: Float32) -> Float32:
        """log2(e) times the factor that converts accumulators after all modifiers to scores; see ``ScoreContext``."""
        return Float32(LOG2_E) if self.has_bias else score_scale * LOG2_E

    @property
    def adds_tangents(self) -> bool:
        """True if :meth:`tangents` adds tangents of tensors, and so multiplies by the softmax scale."""
        return any(m.adds_tangents for m in self.modifiers)

    def tangent_scale(self, softmax_scale: Float32) -> Float32:
        """The factor that converts accumulators after :meth:`tangents` to tangents of scores."""
        return Float32(1.0) if self.adds_tangents else softmax_scale

    def tangents_may_be_nan(self, masked: bool) -> bool:
        """True if :meth:`tangents` may leave NaN or infinity at hidden scores. masked: if the mask was applied."""
        return (masked and self.adds_tangents) or any(m.tangents_may_be_nan for m in self.modifiers)

    def fake_args(self) -> tuple:
        """The cap, then the fake arguments of mask, modifiers, dropout and sinks."""
        return (Float32(1.0), *(part.fake_args() for part in self._parts))

    def host_args(self, inputs: ScoreInputs) -> tuple:
        """The cap (1.0 without softcap), then one tuple of arguments per epilogue."""
        return (inputs.softcap if self.softcap else 1.0, *(part.host_args(inputs) for part in self._parts))

    @property
    def bias_has_scores_gradient(self) -> bool:
        """True if the bias gradient equals the score gradient after :meth:`backward`, element by element."""
        return self.dropout is None and all(isinstance(m, Alibi | Bias) for m in self.modifiers)

    def bias(self, args: tuple) -> cute.Tensor:
        """The bias tensor in a chain's arguments."""
        return self._bias_args(args)[0]

    def bias_gradient(self, args: tuple) -> cute.Tensor:
        """The bias gradient tensor in a chain's arguments; requires ``bias_grad``."""
        return self._bias_args(args)[1]

    def _bias_args(self, args: tuple) -> tuple:
        index = next(i for i, part in enumerate(self._parts) if isinstance(part, Bias))
        return args[1 + index]

    def context(
        self,
        args: tuple,
        seqlens: Seqlens,
        info: SeqlenInfo,
        batch: Int32,
        head: Int32,
        nheads: Int32,
        scale: Float32,
        heads_left: Int32 | None = None,
    ) -> ScoreContext:
        """The context of one work tile, shared by its epilogues."""
        score_scale = args[0] if self.softcap else scale
        first_row = None  # the sequence's first row, in a tensor with a row per query
        if self.maxima or any(isinstance(m, Tree) for m in self.modifiers):
            first_row = batch * seqlens.max_seqlen_q if seqlens.cu_seqlens_q is None else info.offset_q
        gradient_scale = Float32(1.0)
        if self.dropout:
            gradient_scale = self.dropout.rescale_of(args[len(self._begun_parts)])
        return ScoreContext(
            batch=batch, head=head, nheads=nheads, seqlen_q=info.seqlen_q, seqlen_k=info.seqlen_k,
            max_seqlen_q=seqlens.max_seqlen_q, max_seqlen_k=seqlens.max_seqlen_k,
            shift=Int32(0) if self.top_left else info.seqlen_k - info.seqlen_q, softmax_scale=scale,
            score_scale=score_scale, inv_score_scale=1.0 / score_scale, gradient_scale=gradient_scale,
            tangent_scale=scale, first_key=info.first_key, first_row=first_row, heads_left=heads_left,
        )  # fmt: skip

    def begin(self, args: tuple, context: ScoreContext) -> ScoreState:
        """Begin every epilogue for one work tile."""
        parts, begun = self._begun_parts, []
        for part, own in zip(parts, args[1 : 1 + len(parts)], strict=True):
            begun.append(part.begin(own, context))
            if isinstance(part, Bias):
                context = replace(context, score_scale=Float32(1.0), inv_score_scale=Float32(1.0))
            if isinstance(part, Epilogue) and part.adds_tangents:
                context = replace(context, tangent_scale=Float32(1.0))
        dropout = begun.pop() if self.dropout else None
        maxima = begun.pop() if self.maxima else None
        return ScoreState(begun[0], tuple(begun[1:]), dropout, maxima)

    def begin_tile(self, params: Any, tile: Any, head: Int32) -> tuple[ScoreContext, ScoreState]:
        """Begin every epilogue for one head of a work tile. params: the kernel's; tile: has ``info`` and ``batch``."""
        args, seqlens = params.score_args, params.seqlens
        context = self.context(
            *(args, seqlens, tile.info, tile.batch, head, params.nheads, params.softmax_scale),
            heads_left=getattr(tile, "heads_left", None),  # a backward's tiles have none
        )
        return context, self.begin(args, context)

    def _listed(self, state: ScoreState) -> tuple[Epilogue, Any]:
        """The epilogue that lists blocks, and its state."""
        return next((m, s) for m, s in zip(self.modifiers, state.modifiers, strict=True) if m.lists_blocks)

    def key_blocks(self, state: ScoreState, row0: Int32, end_row: Int32, tile_n: int) -> BlockRange:
        """The key blocks that the query block [row0, end_row) visits."""
        if self.visits_lists:
            modifier, own = self._listed(state)
            listed = modifier.key_blocks(own, row0, tile_n)
            if not self.in_order:
                return listed
            seen = BlockRange.of_queries(state.band, row0, end_row, tile_n)
            return listed.within(seen, state.band.has_first)
        return BlockRange.of_queries(state.band, row0, end_row, tile_n)

    def query_blocks(
        self, state: ScoreState, key0: Int32, end_key: Int32, seqlen_q: Int32, tile_m: int
    ) -> BlockRange:
        """The query blocks that visit the key block [key0, end_key)."""
        if self.visits_lists:
            modifier, own = self._listed(state)
            return modifier.query_blocks(own, key0, tile_m)
        return BlockRange.of_keys(state.band, key0, end_key, seqlen_q, tile_m)

    def load(self, state: ScoreState, tile: ScoreTile) -> tuple:
        """Start every modifier's reads of global memory for ``tile``."""
        return tuple(m.load(s, tile) for m, s in zip(self.modifiers, state.modifiers, strict=True))

    def forward(
        self,
        state: ScoreState,
        tile: ScoreTile,
        loaded: tuple,
        masked: Constexpr,
        partial: Boolean | None = None,
        ends: Boolean | bool = True,
    ) -> tuple:
        """Convert Q K^T in ``tile.acc`` to scores, times log2(e) / :meth:`scale_log2`; apply the mask if ``masked``.

        partial: in a masked step, True if the mask of listed blocks applies too; see ``BlockRange.visit``.
        ends: True if a listed block may reach beyond the sequence; a constant False omits the code.

        Returns each modifier's values for :meth:`backward`, registers or None; () in a forward kernel.
        """
        saved = tuple(
            self._modify(modifier, own, tile, read, masked, partial)
            for modifier, own, read in zip(self.modifiers, state.modifiers, loaded, strict=True)
        )
        edges = self.mask.causal or self.mask.windowed
        if masked and (ends is True or edges or not self.visits_lists):
            self.mask.forward(state.band, tile)
        elif masked and ends is not False:
            run_if(ends, functools.partial(self.mask.forward, state.band, tile))
        return saved if self.differentiable else ()

    def _modify(
        self,
        modifier: Epilogue,
        state: Any,
        tile: ScoreTile,
        read: Any,
        masked: bool,
        partial: Boolean | None,
    ) -> Any:
        if not (self.visits_lists and modifier.lists_blocks):
            return modifier.forward(state, tile, read)
        if masked:
            assert partial is not None
            run_if(partial, lambda: modifier.forward(state, tile, read))
        return ()

    def backward(self, state: ScoreState, tile: ScoreTile, saved: tuple, adds: Boolean | None = None) -> None:
        """Convert d(loss)/d(scores after all modifiers) in ``tile.acc`` to d(loss)/d(scores before), in place.

        Gradients lack the factor ``context.gradient_scale``. Modifiers act on each score separately, so the same
        factors convert tangents of the scores before to tangents of the scores after.

        adds: if several CTAs have the same scores, True in the CTA that adds the tensors' gradients; else None.
        """
        steps = list(zip(self.modifiers, state.modifiers, saved, strict=True))
        for modifier, own, kept in reversed(steps):
            if adds is None:
                modifier.add_gradients(own, tile, kept)
            elif modifier.has_gradients:
                run_if(adds, functools.partial(modifier.add_gradients, own, tile, kept))
            modifier.backward(own, tile, kept)

    def tangents(self, state: ScoreState, tile: ScoreTile, saved: tuple) -> None:
        """Convert tangents of the scores before all modifiers to tangents of the scores after, in ``tile.acc``.

        They are divided by the softmax scale, afterwards by :meth:`tangent_scale`.
        """
        for modifier, own, kept in zip(self.modifiers, state.modifiers, saved, strict=True):
            modifier.tangents(own, tile, kept)

    def drop(self, state: ScoreState, tile: ScoreTile, p: cute.Tensor) -> None:
        """Zero the dropped elements of p: P in 16 bits, (rows, cols)."""
        if self.dropout and state.dropout:
            self.dropout.forward(state.dropout, tile, p)

    def dropout_mask(self, state: ScoreState, tile: ScoreTile) -> tuple:
        """The tile's dropout mask, one bit per element, for :meth:`zero_dropped`; () without dropout.

        ``tile.acc`` is not read, so products may still run. All lanes of a warp must call it: they shuffle.
        """
        if self.dropout and state.dropout:
            return self.dropout.packed_mask(state.dropout, tile)
        return ()

    def zero_dropped(self, mask: tuple, view: cute.Tensor) -> None:
        """Zero the dropped elements of ``view``: (rows, cols), 16-bit or fp32."""
        if self.dropout:
            self.dropout.zero_dropped(mask, view)

    def sinks_of_rows(
        self, args: tuple, head: Int32, heads_left: Int32 | None, score_map: ScoreMap
    ) -> tuple[Float32, ...] | None:
        """The attention sink of each of the thread's rows, see :meth:`Sinks.of_rows`; None without sinks."""
        return self.sinks.of_rows(args[-1][0], head, heads_left, score_map) if self.sinks else None

    def sink_tangents_of_rows(
        self, args: tuple, head: Int32, score_map: ScoreMap
    ) -> tuple[Float32, ...] | None:
        """The tangents of :meth:`sinks_of_rows`, all of one head; None if the sinks have none."""
        if not (self.sinks and self.sinks.tangent):
            return None
        return self.sinks.of_rows(args[-1][1], head, None, score_map)

    def store_maxima(self, state: ScoreState, seen: cute.Tensor, score_map: ScoreMap, row0: Int32) -> None:
        """Store a thread's greatest scores, (rows), after the last key block of a work tile, if they are an output."""
        if self.maxima and state.maxima:
            self.maxima.store(state.maxima, seen, score_map, row0)

    def rescale(self, state: ScoreState) -> Any:
        """The factor that the output is scaled by: 1 / (1 - p), or 1 without dropout."""
        return state.dropout.rescale if state.dropout else Float32(1.0)
