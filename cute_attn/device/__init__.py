"""Small pieces that kernels are put together from; each file owns one question.

``math`` arithmetic that runs on the device and on the host; ``score_tile`` what a thread holds of a score tile;
``seqlen`` how long a batch's sequences are and where they start; ``block_range`` which key blocks a query block visits;
``gemm`` the two matrix products of mma.sync kernels.
"""
