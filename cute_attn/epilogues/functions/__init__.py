"""FlexAttention's score_mod and mask_mod as epilogues: plain Python functions, traced once.

    name, tensors = epilogue_of(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (q_idx - kv_idx), None)

``trace`` calls a function with ``symbols`` that record a graph (``graph``): for each of the ``torch_functions`` some of
the ``operations``. The graph is evaluated as torch operations (``definition``) and, after ``lowering``, as CuTe DSL
expressions (``device``), whose code is in ``device_operations``. Its derivative is another graph. ``epilogue`` makes a
registered epilogue of a trace.
"""
