"""The Hopper backward's steps for head dims above 256: two CTAs, with S of the next query block computed ahead.

dK and dV of such head dims do not fit registers, nor do K, V, Q and dO fit shared memory. So two CTAs (``cluster``)
divide the columns of all these tensors and of dQ. Each computes S and dP from its columns and sends these partial sums
to its peer in fp32. Both add the peer's sums, so both have the whole S and dP with equal bits:

    compute S of the first query block, send it to the peer
    for each query block:
        issue dP; add the peer's S; epilogues, P
        wait for dP, send it to the peer; store P to shared memory; barrier
        issue dV += P dO; add the peer's dP; store dS to shared memory
        wait for dV; barrier
        issue dQ = dS K, dK += dS Q
        wait for dQ, add it to global memory; issue S of the next query block
        wait for dK and S, send S to the peer
"""

import functools
from dataclasses import dataclass

import cutlass
from cutlass import Constexpr, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cute_attn.device.math import rematerialize_each
from cute_attn.device.pipeline import Accessed, consumer_barrier
from cute_attn.device.probabilities import probabilities, start_from
from cute_attn.kernels.backward_sm90.steps import Head, steps


@dataclass(frozen=True)
class ScoresAhead:
    """Loop with P and dS in shared memory. Products overlap all other work and, in a cluster, its exchanges."""

    head: Head

    @cute.jit
    def run(self) -> None:
        """Run the steps of all query blocks of the head that see the key block."""
        head, begin, end = self.head, self.head.blocks.begin, self.head.blocks.end
        full_begin, full_end = head.full_blocks()
        if begin < end:
            acc_s = head.scores_accumulator()
            self.start_s(acc_s, begin)
            warpgroup.wait_group(0)
            self.send_s(acc_s, head.use_of(begin))
            step, last = functools.partial(self.step, acc_s), end - 1  # the last step has no next S
            full_begin, full_end = cutlass.min(full_begin, last), cutlass.min(full_end, last)
            steps(step, begin, full_begin, True)
            steps(step, full_begin, full_end, False)
            if cutlass.const_expr(head.kernel.masks_last_blocks):
                steps(step, full_end, last, True)
            self.step(acc_s, last, True, last=True)

    @cute.jit
    def step(self, acc_s: cute.Tensor, block: Int32, masked: Constexpr, last: Constexpr = False) -> None:
        """Process a query block with S in ``acc_s``, and compute S of the next unless this is the ``last``.

        Stages of P and dS are free when they are written. dV, which reads P, finished in all warpgroups before the
        barrier of the last step's dS. dQ and dK, which read dS, finished before the barrier of this step's P.
        """
        head, shared, n = self.head, self.head.shared, self.head.use_of(block)
        chain, tile = head.kernel.epilogues, head.kernel.tile
        scores, partial = head.score_tile(acc_s, block)
        acc_dp = head.scores_accumulator()
        loaded = chain.load(head.state, scores)
        lse = head.row_values(shared.s_lse, shared.pipeline_q, n)
        self.start_dp(acc_dp, block)
        mask = chain.dropout_mask(head.state, scores)
        if cutlass.const_expr(tile.cluster > 1):
            shared.peer_s.add(acc_s, rematerialize_each(head.thread, n), n)
        saved = chain.forward(head.state, scores, loaded, masked, partial, head.ends())
        probabilities(scores, lse, head.scale_log2, head.visible_keys)
        p = head.p_in_16_bits(acc_s, mask)
        warpgroup.wait_group(0)
        if cutlass.const_expr(tile.cluster > 1):
            shared.peer_dp.send(acc_dp, rematerialize_each(head.thread, n))
        head.store_scores(p, shared.s_p, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer_barrier(tile.warpgroups)

        head.start_dv(p, n)
        if cutlass.const_expr(tile.cluster > 1):
            shared.peer_dp.add(acc_dp, rematerialize_each(head.thread, n), n)
        ds = head.to_gradients(scores, acc_dp, saved, mask, n)
        head.store_scores(ds, shared.s_ds, n)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.wait_group(0)
        shared.pipeline_do.consumer_release(n, Accessed.BY_THREADS_FENCED)
        consumer_barrier(tile.warpgroups)

        acc_dq = head.dq_accumulator()
        head.start_dq(acc_dq, n)
        head.start_dk(ds, n)
        warpgroup.wait_group(1)
        head.add_dq(acc_dq, block)
        if cutlass.const_expr(not last):
            self.start_s(acc_s, block + 1)  # only here are there registers for it
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        shared.pipeline_q.consumer_release(n, Accessed.BY_THREADS_FENCED)
        if cutlass.const_expr(not last):
            warpgroup.wait_group(0)
            self.send_s(acc_s, n + 1)

    @cute.jit
    def send_s(self, acc_s: cute.Tensor, n: Int32) -> None:
        """Send the CTA's partial S of step n to its peer, if any."""
        if cutlass.const_expr(self.head.kernel.tile.cluster > 1):
            self.head.shared.peer_s.send(acc_s, rematerialize_each(self.head.thread, n))

    @cute.jit
    def start_s(self, acc_s: cute.Tensor, block: Int32) -> None:
        head, op, pipeline = self.head, self.head.fragments, self.head.shared.pipeline_q
        n = head.use_of(block)
        pipeline.consumer_wait(n)
        head.zero_queries_out_of_bounds(head.blocks.block(block), n, do=False)
        head.start_scores(op.a_scores, op.b_scores, acc_s, pipeline.stage(n), False)

    @cute.jit
    def start_dp(self, acc_dp: cute.Tensor, block: Int32) -> None:
        head, op, pipeline = self.head, self.head.fragments, self.head.shared.pipeline_do
        kernel, n = head.kernel, head.use_of(block)
        pipeline.consumer_wait(n)
        head.zero_queries_out_of_bounds(head.blocks.block(block), n, q=False)
        if cutlass.const_expr(kernel.dp_starts_from_d):
            minus_d = head.row_values(head.shared.s_minus_d, pipeline, n)
            if cutlass.const_expr(kernel.tile.cluster > 1):  # only one CTA adds it to the sum
                minus_d.store(minus_d.load() * Float32(kernel.part() == 0))
            start_from(head.score_map.view(acc_dp), minus_d)
        head.start_scores(op.a_dp, op.b_dp, acc_dp, pipeline.stage(n), kernel.dp_starts_from_d)
